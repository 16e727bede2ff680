"""A session's token tree as a model grows it, whichever model that is."""

from specdec_ray.engine.sessions import Session
from specdec_ray.speculation.proposal import Rule
from specdec_ray.speculation.shape import Budget, Growth, Shape, StaticShape
from specdec_ray.speculation.step import DrawRow


def start_growth(session: Session, shape: Shape, budget: Budget) -> Growth:
    """A tree of this shape, or a chain as deep where the session's rule verifies nothing else."""
    if session.rule is Rule.BLOCK and not session.params.greedy:
        shape = StaticShape.chain(shape.depth)
    return Growth(shape, budget)


def draw_rows(session: Session, growth: Growth) -> list[DrawRow]:
    """What is drawn next: the children of each sprout."""
    paths = [growth.path(sprout.node) for sprout in growth.sprouts]
    allowed = session.allowed(paths)
    return [
        DrawRow(
            session.params,
            session.rule,
            position=len(session.tokens) + len(path),
            depth=len(path),
            context=(*session.tokens, *path) if session.params.edits_logits else (),
            prompt_length=session.prompt_length,
            allowed=None if allowed is None else allowed[row : row + 1],
            width=sprout.width,
            scored=growth.pruned,
        )
        for row, (sprout, path) in enumerate(zip(growth.sprouts, paths, strict=True))
    ]
