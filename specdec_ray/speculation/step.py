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
    race,
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
    """One session's row in a draft step.

    Attributes:
        position: that of the token to draw.
        depth: tokens of this round drafted before it.
        context: the tokens before it; read only where the parameters depend on them.
        prompt_length: how many of those are the prompt.
        allowed: bool [1, V], what a grammar allows.
    """

    params: SamplingParams
    rule: Rule
    position: int
    context: Sequence[int] = ()
    prompt_length: int = 0
    allowed: torch.Tensor | None = None
    depth: int = 0


def draw(
    logits: torch.Tensor, rows: Sequence[DrawRow], vocab_limit: int
) -> list[tuple[int, DraftProbs | None]]:
    """Drafted tokens of one draft step, each from its 64 most probable ids.

    Under the coupled rule the draft races with the target's own noise; under the others it draws
    independently and, where the rule needs it, returns the very q it drew from, float32 [1, 64].

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
    drawn = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
    drawing: list[int] = []
    laws: list[Distribution] = []
    for batch in batches(groups, logits, partial(_same, DRAFT_SUPPORT)):
        own, index = batch.take(logits), batch.index(logits.device)
        if batch.rule is None:
            drawn[index] = greedy(own)
            continue
        params = batch.row_params(logits.device)
        # The draft's law ends at its candidates, so they are always complete.
        q = replace(distribution(own, params, DRAFT_SUPPORT), complete=None)
        if batch.rule is Rule.COUPLED:
            drawn[index] = coupled(q, params)
        else:
            drawn[index] = race(q, params, Purpose.DRAFT)
            if batch.rule.needs_draft_probs:
                drawing += batch.rows
                laws.append(q)
    tokens, shipped = _fetch(drawn, laws)
    _check(tokens)
    probs = dict(zip(drawing, shipped, strict=True))
    return [(token, probs.get(row)) for row, token in enumerate(tokens)]


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
    tokens: torch.Tensor, laws: Sequence[Distribution]
) -> tuple[list[int], list[DraftProbs]]:
    """Bring drawn tokens and the laws of some of them to the host in one copy."""
    if not laws:
        return tokens.tolist(), []
    ids = torch.cat([law.ids for law in laws])
    probs = torch.cat([law.probs for law in laws])
    bits = probs.view(torch.int32).long()
    packed = torch.cat((tokens, ids.flatten(), bits.flatten())).cpu()
    own, id_values, prob_bits = packed.split([len(tokens), ids.numel(), bits.numel()])
    shipped_ids = id_values.view(ids.shape)
    shipped_probs = prob_bits.int().view(torch.float32).view(ids.shape)
    rows = [DraftProbs(shipped_ids[i : i + 1], shipped_probs[i : i + 1]) for i in range(len(ids))]
    return own.tolist(), rows


def _check(tokens: Sequence[int]) -> None:
    if INVALID in tokens:
        raise FloatingPointError("the model produced logits that are NaN or have no finite maximum")
