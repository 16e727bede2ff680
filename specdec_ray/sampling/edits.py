"""Changes a request makes to the model's logits before anything is filtered or drawn.

Order as in vLLM: bad words, min_tokens, logit bias, penalties. All but the bias depend on the
tokens before a row, so each node of a tree has a history of its own: the context and its path.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec_ray.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """The tokens before each of a session's rows.

    Attributes:
        context: prompt and committed output.
        prompt_length: how many of them are the prompt.
        paths: drafted tokens between the context and each row, row by row.
    """

    context: Sequence[int]
    prompt_length: int
    paths: Sequence[tuple[int, ...]]


def edit_(
    logits: torch.Tensor,
    params: SamplingParams,
    history: History,
    allowed: torch.Tensor | None = None,
) -> None:
    """Edit a session's rows in place.

    Bans that leave a row without any token are lifted there: a grammar may allow nothing but what
    another parameter forbids, and the text has to go on.

    Args:
        logits: float32 [rows, V].
        allowed: bool [rows, V], what a grammar allows; None where there is none.
    """
    if allowed is not None:
        logits.masked_fill_(~allowed, -torch.inf)
    banned = [
        (row, token)
        for row, path in enumerate(history.paths)
        for token in _banned(params, history, path)
        if token < logits.shape[1]
    ]
    if banned:
        rows, tokens = torch.tensor(banned, device=logits.device).T
        cut = logits.index_put((rows, tokens), logits.new_tensor(-torch.inf))
        logits.copy_(torch.where(cut.isneginf().all(-1, keepdim=True), logits, cut))
    bias = [(token, value) for token, value in params.logit_bias if token < logits.shape[1]]
    if bias:
        tokens = torch.tensor([token for token, _ in bias], device=logits.device)
        logits[:, tokens] += logits.new_tensor([value for _, value in bias])
    if params.penalised:
        _penalise_(logits, params, history)


def _banned(params: SamplingParams, history: History, path: tuple[int, ...]) -> set[int]:
    """Ids that may not follow the context and `path`."""
    emitted = len(history.context) - history.prompt_length + len(path)
    banned = set(params.end_token_ids) if emitted < params.min_tokens else set()
    longest = max((len(word) for word in params.bad_words), default=1) - 1
    first = max(len(history.context) - longest, history.prompt_length)
    output = (*history.context[first:], *path)
    for *beginning, last in params.bad_words:
        if not beginning or output[-len(beginning) :] == tuple(beginning):
            banned.add(last)
    return banned


def _penalise_(logits: torch.Tensor, params: SamplingParams, history: History) -> None:
    """Penalties on the ids that occur before each row; the others keep their logits."""
    repeats = params.repetition_penalty != 1
    context = history.context if repeats else history.context[history.prompt_length :]
    prompt_length = history.prompt_length if repeats else 0
    drafted = [(row, token) for row, path in enumerate(history.paths) for token in path]
    tokens = torch.tensor([*context, *(token for _, token in drafted)], dtype=torch.int64)
    ids, column = tokens.unique(return_inverse=True)
    emitted = column[prompt_length : len(context)].bincount(minlength=len(ids))
    counts = emitted.repeat(len(history.paths), 1)
    if drafted:
        rows = torch.tensor([row for row, _ in drafted])
        counts.index_put_((rows, column[len(context) :]), torch.tensor(1), accumulate=True)
    seen = counts > 0
    seen[:, column[:prompt_length]] = True
    known = ids < logits.shape[1]  # a draft may know fewer tokens than the context holds
    ids, counts, seen = ids[known], counts[:, known], seen[:, known]
    ids, counts, seen = (each.to(logits.device) for each in (ids, counts, seen))
    values = logits[:, ids]
    shrunk = torch.where(
        values > 0, values / params.repetition_penalty, values * params.repetition_penalty
    )
    values = torch.where(seen, shrunk, values)
    values -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    logits[:, ids] = values
