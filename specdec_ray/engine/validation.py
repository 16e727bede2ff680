"""Checks that both engines make before a request enters their state."""

from collections.abc import Sequence

import torch

from specdec_ray.engine.messages import Open, RefusalCode, Refused
from specdec_ray.engine.sessions import Session
from specdec_ray.speculation.proposal import DraftProbs
from specdec_ray.speculation.tree import TokenTree


def refuse(session_id: bytes, code: RefusalCode, message: str, known_length: int = 0) -> Refused:
    return Refused(session_id, code, message, known_length)


def check_tokens(tokens: Sequence[int], vocab_limit: int) -> str | None:
    """Why these ids cannot be embedded, or None."""
    for token in tokens:
        if not 0 <= token < vocab_limit:
            return f"token id {token} is outside [0, {vocab_limit})"
    return None


def check_draft_probs(probs: DraftProbs, tree: TokenTree, vocab_limit: int) -> str | None:
    """Why a proposal's q cannot be what its nodes were drawn from, or None."""
    if probs.ids.shape != probs.probs.shape or len(probs.ids) != len(tree):
        return f"draft_probs have shape {tuple(probs.ids.shape)} for {len(tree)} nodes"
    if not bool(((probs.ids >= 0) & (probs.ids < vocab_limit)).all()):
        return f"draft_probs name a token id outside [0, {vocab_limit})"
    if not bool(((probs.probs >= 0) & ((probs.probs.sum(-1) - 1).abs() < 1e-3)[:, None]).all()):
        return "draft_probs must be probabilities that sum to one"
    nodes = torch.tensor(tree.tokens, dtype=torch.int64)[:, None]
    if not bool(((probs.ids == nodes) & (probs.probs > 0)).any(-1).all()):
        return "a drafted token is not in its own draft_probs"
    return None


def check_open(
    session: Session | None, request: Open, context_length: int, vocab_limit: int
) -> Refused | None:
    """Refuse an Open of an unknown session, of one at work, or one that can never fit."""
    session_id = request.session_id
    if session is None:
        return refuse(session_id, RefusalCode.UNKNOWN_SESSION, "the session has no lease here")
    if session.sink is not None:
        return refuse(session_id, RefusalCode.BUSY, "a request of this session is under way")
    if not request.tokens:
        return refuse(session_id, RefusalCode.INVALID, "the context is empty")
    if request.max_length < len(request.tokens):
        fault: str | None = f"max_length {request.max_length} is below the context's length"
    elif request.max_length > context_length:
        fault = f"{request.max_length} tokens never fit this replica's {context_length}"
    elif request.prompt_length > len(request.tokens):
        fault = f"prompt_length {request.prompt_length} exceeds the context's length"
    else:
        fault = check_tokens(request.tokens, vocab_limit)
    return refuse(session_id, RefusalCode.INVALID, fault) if fault else None
