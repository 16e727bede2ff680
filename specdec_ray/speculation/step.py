"""The two entries that engines call once per step: a target's `judge`, a draft's `draw`.

Rows of many sessions are decided together, whatever their rules and parameters; one copy to the
host ends a step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise

import torch

from specdec_ray.sampling.logits import (
    WIDE_CANDIDATES,
    Distribution,
    RowParams,
    candidate_count,
    distribution,
)
from specdec_ray.sampling.noise import Purpose
from specdec_ray.sampling.params import SamplingParams
from specdec_ray.speculation.acceptance import (
    INCOMPLETE,
    INVALID,
    Judgement,
    block,
    coupled,
    greedy,
    race_keys,
    rejection,
    typical,
    walk,
)
from specdec_ray.speculation.batches import RowBatch, RowGroup, batches, edited
from specdec_ray.speculation.proposal import DraftProbs, Rule

__all__ = ["DRAFT_SUPPORT", "DrawRow", "RowGroup", "draw", "judge"]

# Ids a draft samples among: 2.5 KB of q a round at k = 5, whatever the vocabulary.
DRAFT_SUPPORT = 64


def judge(logits: torch.Tensor, groups: Sequence[RowGroup], vocab_limit: int) -> list[Judgement]:
    """Verdicts of one target step over the rows of all sessions, whatever their rules.

    Args:
        logits: float32 [R, V], R = sum of 1 + len(tree) over the groups.
        vocab_limit: ids from here on are padding of the embedding and have probability zero.

    Raises:
        FloatingPointError: the model produced NaN or a row without a finite maximum.
        InvalidParameter: block verification is asked of more than a chain.
    """
    if not groups:
        return []
    logits = edited(logits[:, :vocab_limit], groups)
    starts = list(accumulate(map(len, groups), initial=0))
    spans = [slice(*span) for span in pairwise(starts)]
    tokens, accepted = _decide(logits, groups, candidate_count)
    for candidates in (WIDE_CANDIDATES, None):
        again = [at for at, span in enumerate(spans) if INCOMPLETE in tokens[span]]
        if not again:
            break
        # Filters that keep more than their candidates: rare, so worth a copy of their own.
        rows = [row for at in again for row in range(starts[at], starts[at + 1])]
        own = [groups[at] for at in again]
        redone = _decide(logits[rows], own, partial(_same, candidates))
        for row, token, flag in zip(rows, *redone, strict=True):
            tokens[row], accepted[row] = token, flag
    _check(tokens)
    return [
        _verdict(group, tokens[span], accepted[span])
        for group, span in zip(groups, spans, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class DrawRow:
    """A node of a draft's tree whose children are to be drawn.

    Attributes:
        position: that of the children.
        depth: nodes of this round above them.
        context: the tokens before them; read only where the parameters depend on them.
        prompt_length: how many of those are the prompt.
        allowed: bool [1, V], what a grammar allows.
        width: most children.
        scored: whether the tree will be pruned by how likely its nodes seem. Where q counts, such
            a choice among draws would bias them, so the most probable ids are taken instead.
    """

    params: SamplingParams
    rule: Rule
    position: int
    context: Sequence[int] = ()
    prompt_length: int = 0
    allowed: torch.Tensor | None = None
    depth: int = 0
    width: int = 1
    scored: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """Children of one node, in the order in which they are tried.

    Attributes:
        tokens: at most the row's width, fewer where fewer ids have a probability.
        scores: logarithms of how likely each seems to be accepted; empty unless asked for.
        probs: the very q they were drawn from without replacement, float32 [1, 64], where the rule
            needs one.
    """

    tokens: tuple[int, ...]
    scores: tuple[float, ...] = ()
    probs: DraftProbs | None = None


def draw(logits: torch.Tensor, rows: Sequence[DrawRow], vocab_limit: int) -> list[Drawn]:
    """Children of the nodes of one draft step, each from its 64 most probable ids.

    They are the first of an exponential race, which draws without replacement (Kool, van Hoof,
    Welling 2019, "Stochastic Beams and Where to Find Them"). Under the coupled rule the noise is
    the target's own; under the others it is independent.

    Args:
        logits: float32 [N, V], one row per entry of `rows`.

    Raises:
        FloatingPointError: the model produced NaN or a row without a finite maximum.
    """
    groups = [
        RowGroup(
            _narrowed(row.params),
            row.rule,
            row.position,
            context=row.context,
            prompt_length=row.prompt_length,
            allowed=row.allowed,
            depth=row.depth,
        )
        for row in rows
    ]
    logits = edited(logits[:, :vocab_limit], groups)
    width = max((row.width for row in rows), default=1)
    scored = any(row.scored for row in rows)
    tokens = torch.full((len(rows), width), INVALID, device=logits.device)
    scores = torch.zeros(len(rows), width if scored else 0, device=logits.device)
    drawing: list[int] = []
    laws: list[Distribution] = []
    for batch in batches(groups, logits, partial(_same, DRAFT_SUPPORT)):
        pruned = any(rows[row].scored for row in batch.rows)
        ids, weights, total, law = _race(batch, batch.take(logits), width, pruned)
        index, found = batch.index(logits.device), slice(ids.shape[1])
        tokens[index, found] = torch.where(weights.isfinite() & (weights > 0), ids, INVALID)
        if pruned:
            scores[index, found] = (weights / total).log().float()
        if law is not None:
            drawing += batch.rows
            laws.append(law)
    host_tokens, host_scores, shipped = _fetch(tokens, scores, laws)
    _check([row[0] for row in host_tokens])
    probs = dict(zip(drawing, shipped, strict=True))
    drawn = []
    for at, (row, own, own_scores) in enumerate(zip(rows, host_tokens, host_scores, strict=True)):
        count = sum(token != INVALID for token in own[: row.width])
        drawn.append(Drawn(tuple(own[:count]), tuple(own_scores[:count]), probs.get(at)))
    return drawn


def _race(
    batch: RowBatch, logits: torch.Tensor, width: int, pruned: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Distribution | None]:
    """The first of each row of a batch: ids and their weights [N, up to width], the weight of all
    [N, 1], and the law they were drawn from where the rule needs it."""
    if batch.rule is None:
        if width == 1 and not pruned:
            ids = greedy(logits)[:, None]
            return ids, (ids != INVALID).float(), torch.ones_like(ids), None
        best = logits.amax(-1, keepdim=True)
        weights = (logits - best).exp()
        first, ids = weights.topk(min(width, logits.shape[1]))
        return ids, first, weights.sum(-1, keepdim=True), None
    params = batch.row_params(logits.device)
    law = distribution(logits, params, DRAFT_SUPPORT)
    needs_law = batch.rule.needs_draft_probs and not pruned
    if batch.rule is Rule.COUPLED:
        keys = race_keys(law, params, Purpose.COUPLED)
    elif needs_law or batch.rule is Rule.TYPICAL:
        keys = race_keys(law, params, Purpose.DRAFT)
    else:
        keys = law.probs.double()
    first, columns = keys.topk(min(width, keys.shape[1]))
    total = keys.sum(-1, keepdim=True)
    return law.ids.gather(1, columns), first, total, law if needs_law else None


def _narrowed(params: SamplingParams) -> SamplingParams:
    """The request as a draft sees it: filters act within the support that it can ship."""
    return replace(params, top_k=min(params.top_k or DRAFT_SUPPORT, DRAFT_SUPPORT))


def _decide(
    logits: torch.Tensor,
    groups: Sequence[RowGroup],
    candidates: Callable[[SamplingParams], int | None],
) -> tuple[list[int], list[int]]:
    """Each row's token, and whether its node is accepted where that is more than equality."""
    tokens = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    accepted = torch.zeros_like(tokens)
    for batch in batches(groups, logits, candidates):
        own, index = batch.take(logits), batch.index(logits.device)
        if batch.rule is None:
            tokens[index] = greedy(own)
            continue
        params = batch.row_params(logits.device)
        target = distribution(own, params, batch.candidates)
        if batch.rule is Rule.COUPLED:
            tokens[index] = coupled(target, params)
        else:
            taken, tokens[index] = _verify(batch, target, params)
            accepted[index] = batch.by_node(taken).long()
    host_tokens, host_accepted = torch.stack((tokens, accepted)).tolist()
    return host_tokens, host_accepted


def _verify(
    batch: RowBatch, target: Distribution, params: RowParams
) -> tuple[torch.Tensor, torch.Tensor]:
    """By the batch's rule: bool [N, B] accepted children, int64 [N] the token if none is."""
    children = batch.children(target.ids.device)
    if batch.rule is Rule.BLOCK:
        return block(target, params, children, batch.longest)
    rule = typical if batch.rule is Rule.TYPICAL else rejection
    return rule(target, params, children)


def _same(candidates: int | None, params: SamplingParams) -> int | None:
    """Candidates whatever the request."""
    return candidates


def _verdict(group: RowGroup, tokens: Sequence[int], accepted: Sequence[int]) -> Judgement:
    tree = group.tree
    if not group.compares:
        return walk(tree, tokens, [bool(flag) for flag in accepted[1:]])
    equal = [
        tokens[parent + 1] == token for parent, token in zip(tree.parents, tree.tokens, strict=True)
    ]
    return walk(tree, tokens, equal)


def _fetch(
    tokens: torch.Tensor, scores: torch.Tensor, laws: Sequence[Distribution]
) -> tuple[list[list[int]], list[list[float]], list[DraftProbs]]:
    """Bring drawn tokens, their scores and the laws of some to the host in one copy."""
    parts = [tokens.flatten(), _bits(scores)]
    if laws:
        ids = torch.cat([law.ids for law in laws])
        parts += [ids.flatten(), _bits(torch.cat([law.probs for law in laws]))]
    host = torch.cat(parts).cpu().split([len(part) for part in parts])
    shipped = []
    if laws:
        pairs = zip(host[2].view(ids.shape), _floats(host[3]).view(ids.shape), strict=True)
        shipped = [DraftProbs(own_ids[None], own_probs[None]) for own_ids, own_probs in pairs]
    host_scores = _floats(host[1]).view(scores.shape)
    return host[0].view(tokens.shape).tolist(), host_scores.tolist(), shipped


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32).long().flatten()


def _floats(bits: torch.Tensor) -> torch.Tensor:
    return bits.int().view(torch.float32)


def _check(tokens: Sequence[int]) -> None:
    if INVALID in tokens:
        raise FloatingPointError("the model produced logits that are NaN or have no finite maximum")
