"""What an engine is asked and what it answers. The wire carries these one to one.

A session is one generation's state on one replica. `tokens` below always means ids; a *length*
counts tokens. A target whose session knows `n` tokens holds the KV of the first `n - 1`: the last
one is the root that the next round verifies on.
"""

from dataclasses import dataclass
from enum import StrEnum

from specdec_ray.sampling.params import SamplingParams
from specdec_ray.speculation.logprobs import TokenLogprobs
from specdec_ray.speculation.proposal import DraftProbs, Rule
from specdec_ray.speculation.shape import Budget
from specdec_ray.speculation.tree import TokenTree


class RefusalCode(StrEnum):
    STALE_LENGTH = "stale_length"
    STALE_EPOCH = "stale_epoch"
    STALE_ROUND = "stale_round"
    UNKNOWN_SESSION = "unknown_session"
    BUSY = "busy"
    INVALID = "invalid"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class CacheHandle:
    """Names the KV state of a session on a replica; it is a name, no KV crosses the network.

    Attributes:
        session_id: 16 unguessable bytes issued by the replica with the session's lease.
        replica_id: the replica that holds the state.
        incarnation: start of the replica's process (ns); tells a restarted replica from the old.
        epoch: how often the state was rebuilt.
        length: tokens whose KV is committed (target), or tokens known (draft).
    """

    session_id: bytes
    replica_id: str
    incarnation: int
    epoch: int
    length: int


@dataclass(frozen=True, slots=True)
class Load:
    """State of an engine, published with each verdict.

    Attributes:
        waiting: sessions waiting to be opened.
        free_blocks: KV blocks not in use or promised.
    """

    waiting: int = 0
    free_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Open:
    """Prefill a context. The same call re-opens a generation elsewhere after a loss.

    Attributes:
        tokens: prompt plus everything emitted so far; not empty.
        prompt_length: how many of them are the prompt, for parameters that tell it from the output.
        max_length: tokens the session may ever hold, drafted ones included; KV for all of them
            is promised before the prefill starts.
    """

    session_id: bytes
    tokens: tuple[int, ...]
    params: SamplingParams
    rule: Rule
    max_length: int
    prompt_length: int = 0


@dataclass(frozen=True, slots=True)
class Opened:
    """Answer to Open. `emitted` holds the target's first token; a draft emits none.

    `logprobs` has one entry per emitted token if they were asked for, here and in Verdict;
    `prompt_logprobs` has one for each token of the prompt but the first.
    """

    handle: CacheHandle
    emitted: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Propose:
    """Ask a draft for a tree after the committed tokens.

    Attributes:
        tokens: the committed tokens from `handle.length` on.
    """

    handle: CacheHandle
    tokens: tuple[int, ...]
    budget: Budget


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """A token tree on top of `base_length` committed tokens; `draft_probs` only where the
    acceptance rule needs them."""

    handle: CacheHandle
    base_length: int
    tree: TokenTree
    draft_probs: DraftProbs | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Verify:
    """Ask a target for its verdict on a tree. Idempotent by (session, epoch, round).

    Attributes:
        round: 1 for the first verify of an epoch, then one more each time.
        base_length: committed tokens the tree stands on.
        own: the target is to draft the tree by itself, `tree` being empty; None if not.
    """

    handle: CacheHandle
    round: int
    base_length: int
    tree: TokenTree
    draft_probs: DraftProbs | None = None
    own: Budget | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Answer to Verify: of `proposed` nodes `accepted` ones, followed by one bonus token, all in
    `emitted`."""

    handle: CacheHandle
    round: int
    proposed: int
    accepted: int
    emitted: tuple[int, ...]
    load: Load
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Close:
    """End a session and free its KV. Unknown sessions are ignored: closing twice is no error."""

    session_id: bytes


@dataclass(frozen=True, slots=True)
class Refused:
    """Any refusal. `known_length` lets the caller send only the missing suffix."""

    session_id: bytes
    code: RefusalCode
    message: str
    known_length: int = 0
    retry_after_s: float = 0.0


Request = Open | Propose | Verify | Close
Reply = Opened | Proposal | Verdict | Refused
