"""What a request asks of sampling. Validated here once, for every front door and the wire."""

import math
from collections.abc import Sized
from dataclasses import dataclass

from specdec_ray.errors import InvalidParameter

MAX_SEED = 2**63 - 1
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 64
MAX_LOGPROBS = 20
MAX_GRAMMAR_CHARS = 2**16  # compiled on the engine's thread: 0.1 s


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one generation.

    Attributes:
        temperature: 0 means greedy; else logits are divided by it. In [0, 100].
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose mass reaches top_p. In (0, 1].
        min_p: drop tokens less probable than min_p times the most probable one. In [0, 1].
        seed: names the noise, so it names the text. In [0, 2**63).
        choice: index among the `n` choices of one request; each has its own noise.
        presence_penalty: subtracted from the logit of every emitted token. In [-2, 2].
        frequency_penalty: subtracted as often as the token has been emitted. In [-2, 2].
        repetition_penalty: divides positive logits of tokens of prompt and output, multiplies
            negative ones (Keskar et al. 2019, CTRL). In (0, 100].
        logit_bias: (token id, bias) pairs; biases in [-100, 100].
        bad_words: token sequences that may not be emitted.
        min_tokens: tokens before the first of `end_token_ids`.
        end_token_ids: ids that `min_tokens` keeps away.
        grammar: what the output must match, in llguidance's form; empty for anything.
        logprobs: report each emitted token's log-probability, and so many of the most probable
            ones beside it; None reports nothing.
        prompt_logprobs: the same of the prompt's tokens; the first has none.
        processed_logprobs: `logprobs` are of the distribution that tokens are drawn from, after
            edits, temperature and filters, not of the model's own.

    Raises:
        InvalidParameter: naming the field, its limit and the value.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    end_token_ids: tuple[int, ...] = ()
    grammar: str = ""
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    processed_logprobs: bool = False

    def __post_init__(self) -> None:
        _check(self.temperature, "temperature", 0, 100)
        _check(self.top_k, "top_k", 0, 2**31 - 1)
        _check(self.top_p, "top_p", 0, 1, open_low=True)
        _check(self.min_p, "min_p", 0, 1)
        _check(self.seed, "seed", 0, MAX_SEED)
        _check(self.choice, "n", 0, 2**31 - 1)
        _check(self.presence_penalty, "presence_penalty", -2, 2)
        _check(self.frequency_penalty, "frequency_penalty", -2, 2)
        _check(self.repetition_penalty, "repetition_penalty", 0, 100, open_low=True)
        _check_count(self.logit_bias, "logit_bias", MAX_LOGIT_BIAS, "entries")
        for _, bias in self.logit_bias:
            _check(bias, "logit_bias", -100, 100)
        _check_count(self.bad_words, "bad_words", MAX_BAD_WORDS, "token sequences")
        for word in self.bad_words:
            _check(len(word), "bad_words", 1, MAX_BAD_WORD_TOKENS)
        _check(self.min_tokens, "min_tokens", 0, 2**31 - 1)
        _check(self.logprobs or 0, "logprobs", 0, MAX_LOGPROBS)
        _check(self.prompt_logprobs or 0, "prompt_logprobs", 0, MAX_LOGPROBS)
        _check_count(self.grammar, "grammar", MAX_GRAMMAR_CHARS, "characters")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1 or bool(self.presence_penalty or self.frequency_penalty)

    @property
    def edits_logits(self) -> bool:
        """Whether the distribution depends on more than the model's logits and filters."""
        return self.penalised or bool(self.logit_bias or self.bad_words or self.min_tokens)


def _check_count(values: Sized, field: str, limit: int, what: str) -> None:
    if len(values) > limit:
        raise InvalidParameter(field, f"limit is {limit} {what}, got {len(values)}")


def _check(value: float, field: str, low: int, high: int, *, open_low: bool = False) -> None:
    above = value > low if open_low else value >= low
    # Written so that NaN, for which every comparison is false, is refused.
    if not (above and value <= high) or math.isinf(value):
        bracket = "(" if open_low else "["
        raise InvalidParameter(field, f"must be in {bracket}{low}, {high}], got {value}")
