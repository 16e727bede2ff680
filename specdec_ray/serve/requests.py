"""From what a client wrote to generation requests: the checks both front doors share."""

import asyncio
import re
import secrets
import uuid
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

from jinja2 import TemplateError

from specdec_ray.errors import ContextOverflow, InvalidParameter
from specdec_ray.rounds.request import GenerationRequest
from specdec_ray.sampling.params import SamplingParams
from specdec_ray.serve.service import GenerationService
from specdec_ray.serve.structure import Structure
from specdec_ray.speculation.proposal import Rule

MAX_DRAFT_TOKENS = 64
DEFAULT_MAX_TOKENS = 16  # where the prompt is no chat, as the OpenAI API documents
INLINE_PROMPT_CHARS = 20_000  # longer texts are tokenised off the event loop
GREEDY = "greedy"  # as a rule's name: temperature 0, under which all rules are one
SEED_BITS = 53  # a drawn seed goes back in JSON, which many clients read as doubles

# Names the request under way in the logs. Clients choose it, so it is never a key.
request_id: ContextVar[str] = ContextVar("request_id", default="-")
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class UnknownModel(InvalidParameter):
    """The request names a model that is not served."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a request asks for besides its prompt; None takes the default.

    Attributes:
        max_tokens: None takes the room that is left, up to `default_max_tokens`.
        temperature: None is 1, or 0 under the rule "greedy".
        seed: None draws a fresh one.
        rule: an acceptance rule's name, or "greedy"; None is the deployment's.
        logit_bias: bias of each token id.
        bad_words: texts that may not be emitted, with or without a space before them.
        logprobs, prompt_logprobs, processed_logprobs: as in `SamplingParams`.
        structure: what the output must match; None for anything.
        max_tokens_field: what the client called `max_tokens`.
    """

    max_tokens: int | None
    default_max_tokens: int | None = None
    temperature: float | None = None
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    draft_tokens: int | None = None
    rule: str | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    min_tokens: int = 0
    structure: Structure | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    processed_logprobs: bool = False
    max_tokens_field: str = "max_tokens"


@dataclass(frozen=True, slots=True)
class Message:
    """A chat message."""

    role: str
    content: str


def name_request(given: str) -> str:
    """Name the request under way as the client did, if that is fit for a log, or anew."""
    name = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
    request_id.set(name)
    return name


def check_model(service: GenerationService, name: str | None) -> None:
    """Raise UnknownModel unless the name, where there is one, is that of the model served."""
    if name and name != service.model.name:
        raise UnknownModel("model", f"{name!r:.80} is not served; {service.model.name!r} is")


async def encode_text(
    service: GenerationService, text: str, field: str, *, special_tokens: bool = True
) -> tuple[int, ...]:
    """Token ids of a prompt.

    Raises:
        InvalidParameter: too many bytes, or no Unicode text.
    """
    _check_size(service, text, field)
    return await _encode(service, text, special_tokens)


async def encode_chat(
    service: GenerationService, messages: Sequence[Message], field: str
) -> tuple[int, ...]:
    """Token ids of a chat in the tokenizer's template, which alone adds special tokens.

    Raises:
        InvalidParameter: no messages, no template, a template that refuses them, too many bytes,
            or no Unicode text.
    """
    tokenizer = service.model.tokenizer
    if not messages:
        raise InvalidParameter(field, "is empty")
    if tokenizer.chat_template is None:
        raise InvalidParameter(field, f"{service.model.name} has no chat template")
    conversation = [{"role": message.role, "content": message.content} for message in messages]
    try:
        text = tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=True
        )
    except TemplateError as error:
        raise InvalidParameter(field, f"the chat template refuses them: {error}") from error
    _check_size(service, text, field)
    return await _encode(service, text, special_tokens=False)


def check_ids(service: GenerationService, ids: Sequence[int], field: str) -> tuple[int, ...]:
    """The ids, if the model knows them all.

    Raises:
        InvalidParameter: naming the first it does not know.
    """
    vocab_size = service.model.vocab_size
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidParameter(field, f"token ids must be in [0, {vocab_size}), got {token}")
    return tuple(ids)


async def choices_of(
    service: GenerationService, prompt: tuple[int, ...], options: Options, field: str
) -> list[GenerationRequest]:
    """One generation request per choice; they differ in their noise only.

    Raises:
        InvalidParameter: naming the field, its limit and the value.
        ContextOverflow: prompt and completion do not fit the context.
    """
    _check_options(service, options)
    if not prompt:
        raise InvalidParameter(field, "is empty")
    context = service.model.context_length
    room = context - len(prompt)
    if room < 1:
        raise ContextOverflow(field, context, len(prompt) + 1)
    wanted = options.max_tokens
    if wanted is None:
        limit = service.limits.max_tokens
        wanted = min(room, limit, options.default_max_tokens or limit)
    if wanted > room:
        raise ContextOverflow(field, context, len(prompt) + wanted)
    _check_range("min_tokens", options.min_tokens, 0, wanted)
    rule = _rule(options)
    grammar = await _grammar(service, options.structure)
    params = replace(_sampling_params(service, options), grammar=grammar)
    return [
        GenerationRequest(
            prompt=prompt,
            params=replace(params, choice=choice),
            max_tokens=wanted,
            stop=options.stop,
            stop_token_ids=frozenset(check_ids(service, options.stop_token_ids, "stop_token_ids")),
            ignore_eos=options.ignore_eos,
            draft_tokens=options.draft_tokens,
            rule=rule,
        )
        for choice in range(options.n)
    ]


def _sampling_params(service: GenerationService, options: Options) -> SamplingParams:
    biased = check_ids(service, tuple(options.logit_bias), "logit_bias")
    return SamplingParams(
        temperature=_temperature(options),
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=secrets.randbits(SEED_BITS) if options.seed is None else options.seed,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        repetition_penalty=options.repetition_penalty,
        logit_bias=tuple(zip(biased, options.logit_bias.values(), strict=True)),
        bad_words=_bad_word_tokens(service, options.bad_words),
        min_tokens=options.min_tokens,
        logprobs=options.logprobs,
        prompt_logprobs=options.prompt_logprobs,
        processed_logprobs=options.processed_logprobs,
    )


async def _grammar(service: GenerationService, structure: Structure | None) -> str:
    if structure is None:
        return ""
    # Large schemas take some 100 ms.
    return await asyncio.to_thread(structure.grammar, service.model.grammars)


def _rule(options: Options) -> Rule | None:
    name = options.rule
    if name is None or name == GREEDY:
        return None
    if name not in list(Rule):
        allowed = ", ".join((*Rule, GREEDY))
        raise InvalidParameter("rule", f"must be one of {allowed}, got {name!r:.40}")
    return Rule(name)


def _temperature(options: Options) -> float:
    if options.rule != GREEDY:
        return 1.0 if options.temperature is None else options.temperature
    if options.temperature:
        raise InvalidParameter(
            "temperature", f"must be 0 or absent under rule 'greedy', got {options.temperature}"
        )
    return 0.0


def _bad_word_tokens(
    service: GenerationService, words: Sequence[str]
) -> tuple[tuple[int, ...], ...]:
    """Token sequences of the words; most tokenizers spell a word after a space differently."""
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        if not word.strip():
            raise InvalidParameter("bad_words", "words must not be blank")
        for text in (word, f" {word}"):
            encoded = service.model.tokenizer(text, add_special_tokens=False)["input_ids"]
            sequences[tuple(encoded)] = None
    return tuple(sequences)


async def _encode(service: GenerationService, text: str, special_tokens: bool) -> tuple[int, ...]:
    def encode() -> tuple[int, ...]:
        encoded = service.model.tokenizer(text, add_special_tokens=special_tokens)
        return tuple(encoded["input_ids"])

    return encode() if len(text) <= INLINE_PROMPT_CHARS else await asyncio.to_thread(encode)


def _check_options(service: GenerationService, options: Options) -> None:
    limits = service.limits
    _check_range("n", options.n, 1, limits.max_choices)
    if options.max_tokens is not None:
        _check_range(options.max_tokens_field, options.max_tokens, 1, limits.max_tokens)
    if options.draft_tokens is not None:
        _check_range("draft_tokens", options.draft_tokens, 0, MAX_DRAFT_TOKENS)
    if len(options.stop) > limits.max_stop_strings:
        raise InvalidParameter(
            "stop", f"limit is {limits.max_stop_strings} strings, got {len(options.stop)}"
        )
    for stop in options.stop:
        if not 1 <= len(stop) <= limits.max_stop_chars:
            raise InvalidParameter(
                "stop",
                f"strings must have 1 to {limits.max_stop_chars} characters, got {len(stop)}",
            )


def _check_range(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidParameter(field, f"must be in [{low}, {high}], got {value}")


def _check_size(service: GenerationService, text: str, field: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        raise InvalidParameter(field, f"is no Unicode text at character {error.start}") from None
    limit = service.limits.max_prompt_bytes
    if size > limit:
        raise InvalidParameter(field, f"limit is {limit} bytes, got {size}")
