from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Rule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RULE_UNSPECIFIED: _ClassVar[Rule]
    RULE_COUPLED: _ClassVar[Rule]
    RULE_REJECTION: _ClassVar[Rule]
    RULE_BLOCK: _ClassVar[Rule]
    RULE_TYPICAL: _ClassVar[Rule]

class RefusalCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REFUSAL_CODE_UNSPECIFIED: _ClassVar[RefusalCode]
    REFUSAL_CODE_STALE_LENGTH: _ClassVar[RefusalCode]
    REFUSAL_CODE_STALE_EPOCH: _ClassVar[RefusalCode]
    REFUSAL_CODE_STALE_ROUND: _ClassVar[RefusalCode]
    REFUSAL_CODE_UNKNOWN_SESSION: _ClassVar[RefusalCode]
    REFUSAL_CODE_BUSY: _ClassVar[RefusalCode]
    REFUSAL_CODE_INVALID: _ClassVar[RefusalCode]
    REFUSAL_CODE_FAILED: _ClassVar[RefusalCode]
RULE_UNSPECIFIED: Rule
RULE_COUPLED: Rule
RULE_REJECTION: Rule
RULE_BLOCK: Rule
RULE_TYPICAL: Rule
REFUSAL_CODE_UNSPECIFIED: RefusalCode
REFUSAL_CODE_STALE_LENGTH: RefusalCode
REFUSAL_CODE_STALE_EPOCH: RefusalCode
REFUSAL_CODE_STALE_ROUND: RefusalCode
REFUSAL_CODE_UNKNOWN_SESSION: RefusalCode
REFUSAL_CODE_BUSY: RefusalCode
REFUSAL_CODE_INVALID: RefusalCode
REFUSAL_CODE_FAILED: RefusalCode

class RoundsRequest(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[EngineRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[EngineRequest, _Mapping]]] = ...) -> None: ...

class RoundsResponse(_message.Message):
    __slots__ = ("replies",)
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    replies: _containers.RepeatedCompositeFieldContainer[EngineReply]
    def __init__(self, replies: _Optional[_Iterable[_Union[EngineReply, _Mapping]]] = ...) -> None: ...

class EngineRequest(_message.Message):
    __slots__ = ("open", "propose", "verify", "close")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    PROPOSE_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    open: Open
    propose: Propose
    verify: Verify
    close: Close
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., propose: _Optional[_Union[Propose, _Mapping]] = ..., verify: _Optional[_Union[Verify, _Mapping]] = ..., close: _Optional[_Union[Close, _Mapping]] = ...) -> None: ...

class EngineReply(_message.Message):
    __slots__ = ("opened", "proposal", "verdict", "refused")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    opened: Opened
    proposal: Proposal
    verdict: Verdict
    refused: Refused
    def __init__(self, opened: _Optional[_Union[Opened, _Mapping]] = ..., proposal: _Optional[_Union[Proposal, _Mapping]] = ..., verdict: _Optional[_Union[Verdict, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ...) -> None: ...

class CacheHandle(_message.Message):
    __slots__ = ("session_id", "replica_id", "incarnation", "epoch", "length")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    replica_id: str
    incarnation: int
    epoch: int
    length: int
    def __init__(self, session_id: _Optional[bytes] = ..., replica_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., epoch: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "choice", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words", "min_tokens", "end_token_ids", "grammar", "logprobs", "prompt_logprobs", "processed_logprobs")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROCESSED_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    choice: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[LogitBias]
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    min_tokens: int
    end_token_ids: _containers.RepeatedScalarFieldContainer[int]
    grammar: str
    logprobs: int
    prompt_logprobs: int
    processed_logprobs: bool
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., choice: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[LogitBias, _Mapping]]] = ..., bad_words: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., min_tokens: _Optional[int] = ..., end_token_ids: _Optional[_Iterable[int]] = ..., grammar: _Optional[str] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., processed_logprobs: _Optional[bool] = ...) -> None: ...

class LogitBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("session_id", "tokens", "sampling", "rule", "max_length", "prompt_length")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    tokens: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    rule: Rule
    max_length: int
    prompt_length: int
    def __init__(self, session_id: _Optional[bytes] = ..., tokens: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., rule: _Optional[_Union[Rule, str]] = ..., max_length: _Optional[int] = ..., prompt_length: _Optional[int] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("handle", "emitted", "logprobs", "prompt_logprobs")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    EMITTED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    handle: CacheHandle
    emitted: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, handle: _Optional[_Union[CacheHandle, _Mapping]] = ..., emitted: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class Propose(_message.Message):
    __slots__ = ("handle", "tokens", "budget")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    handle: CacheHandle
    tokens: _containers.RepeatedScalarFieldContainer[int]
    budget: Budget
    def __init__(self, handle: _Optional[_Union[CacheHandle, _Mapping]] = ..., tokens: _Optional[_Iterable[int]] = ..., budget: _Optional[_Union[Budget, _Mapping]] = ...) -> None: ...

class Budget(_message.Message):
    __slots__ = ("nodes", "depth")
    NODES_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    nodes: int
    depth: int
    def __init__(self, nodes: _Optional[int] = ..., depth: _Optional[int] = ...) -> None: ...

class TokenTree(_message.Message):
    __slots__ = ("tokens", "parents")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ...) -> None: ...

class DraftProbs(_message.Message):
    __slots__ = ("width", "ids", "probs")
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    PROBS_FIELD_NUMBER: _ClassVar[int]
    width: int
    ids: _containers.RepeatedScalarFieldContainer[int]
    probs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, width: _Optional[int] = ..., ids: _Optional[_Iterable[int]] = ..., probs: _Optional[_Iterable[float]] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("handle", "base_length", "tree", "draft_probs")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PROBS_FIELD_NUMBER: _ClassVar[int]
    handle: CacheHandle
    base_length: int
    tree: TokenTree
    draft_probs: DraftProbs
    def __init__(self, handle: _Optional[_Union[CacheHandle, _Mapping]] = ..., base_length: _Optional[int] = ..., tree: _Optional[_Union[TokenTree, _Mapping]] = ..., draft_probs: _Optional[_Union[DraftProbs, _Mapping]] = ...) -> None: ...

class Verify(_message.Message):
    __slots__ = ("handle", "round", "base_length", "tree", "draft_probs", "own")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PROBS_FIELD_NUMBER: _ClassVar[int]
    OWN_FIELD_NUMBER: _ClassVar[int]
    handle: CacheHandle
    round: int
    base_length: int
    tree: TokenTree
    draft_probs: DraftProbs
    own: Budget
    def __init__(self, handle: _Optional[_Union[CacheHandle, _Mapping]] = ..., round: _Optional[int] = ..., base_length: _Optional[int] = ..., tree: _Optional[_Union[TokenTree, _Mapping]] = ..., draft_probs: _Optional[_Union[DraftProbs, _Mapping]] = ..., own: _Optional[_Union[Budget, _Mapping]] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("handle", "round", "accepted", "emitted", "load", "logprobs", "proposed")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    EMITTED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_FIELD_NUMBER: _ClassVar[int]
    handle: CacheHandle
    round: int
    accepted: int
    emitted: _containers.RepeatedScalarFieldContainer[int]
    load: Load
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    proposed: int
    def __init__(self, handle: _Optional[_Union[CacheHandle, _Mapping]] = ..., round: _Optional[int] = ..., accepted: _Optional[int] = ..., emitted: _Optional[_Iterable[int]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., proposed: _Optional[int] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("waiting", "free_blocks")
    WAITING_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    waiting: int
    free_blocks: int
    def __init__(self, waiting: _Optional[int] = ..., free_blocks: _Optional[int] = ...) -> None: ...

class Close(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    def __init__(self, session_id: _Optional[bytes] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("session_id", "code", "message", "known_length", "retry_after_s")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    KNOWN_LENGTH_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    code: RefusalCode
    message: str
    known_length: int
    retry_after_s: float
    def __init__(self, session_id: _Optional[bytes] = ..., code: _Optional[_Union[RefusalCode, str]] = ..., message: _Optional[str] = ..., known_length: _Optional[int] = ..., retry_after_s: _Optional[float] = ...) -> None: ...
