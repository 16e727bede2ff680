"""One text under two tokenizers: a target's tokens and what they are to a draft of another kind.

Timor et al. 2025, "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies", string-level exact match; known in transformers as universal assisted
generation. What is translated here are guesses: a wrong one costs speed and never a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from specdec_ray.errors import UnsupportedModel
from specdec_ray.models.detokenizer import Detokenizer
from specdec_ray.models.loading import stand_in_id

WINDOW_TOKENS = 32  # encoded again when text is added
TAIL_CHARS = 64
PROBE = (
    "The tokenizers of two models cut the same text (say, 3.14 or naïve) differently:\n"
    "    for name, value in sorted(options.items()):\n        print(f'{name}={value!r}')\n"
)


@dataclass(frozen=True, slots=True)
class Token:
    """A token and the characters of the text that it stands for."""

    id: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TokenizerPair:
    """The tokenizers of a target and of its draft.

    Attributes:
        ratio: draft tokens per target token, on prose and code.

    Raises:
        UnsupportedModel: one of them cannot tell which characters a token stands for.
    """

    target: PreTrainedTokenizerBase
    draft: PreTrainedTokenizerBase
    ratio: float = field(init=False)

    def __post_init__(self) -> None:
        for role, tokenizer in (("target", self.target), ("draft", self.draft)):
            if not tokenizer.is_fast:
                raise UnsupportedModel(f"the {role}'s tokenizer has no fast backend")
        target, draft = (len(encode(each, PROBE)) for each in (self.target, self.draft))
        object.__setattr__(self, "ratio", draft / target)


def encode(tokenizer: PreTrainedTokenizerBase, text: str, start: int = 0) -> list[Token]:
    """The tokens of a text whose first character is number `start` of a longer one."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return [
        Token(token_id, start + first, start + end)
        for token_id, (first, end) in zip(
            encoded["input_ids"], encoded["offset_mapping"], strict=True
        )
    ]


class Translation:
    """A generation's committed text, growing in the target's tokens and in the draft's.

    Attributes:
        tokens: the target's tokens.
    """

    def __init__(self, pair: TokenizerPair, tokens: Sequence[int]) -> None:
        self._pair = pair
        self.tokens = list(tokens)
        self._detokenizer = Detokenizer(pair.target, tokens)
        self._text: str = pair.target.decode(
            self.tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        self._drafts = encode(pair.draft, self._text)
        self._head = _head(pair.draft, self._drafts)
        self._sent = 0

    def __len__(self) -> int:
        """Draft tokens of the text."""
        return len(self._head) + len(self._drafts)

    @property
    def complete(self) -> bool:
        """Whether the text ends between characters, where a draft can go on."""
        return not self._detokenizer.holds

    def extend(self, tokens: Sequence[int]) -> None:
        """Take further committed tokens of the target in."""
        self.tokens += tokens
        self._append("".join(map(self._detokenizer.push, tokens)))

    def unsent(self) -> tuple[int, tuple[int, ...]]:
        """The draft's ids from the first one that is new since the last call, and its index."""
        start, self._sent = self._sent, len(self)
        return start, (*self._head, *(token.id for token in self._drafts))[start:]

    def back(self, drafted: Sequence[int]) -> tuple[int, ...]:
        """The target's tokens for what the draft would say next.

        They are cut from an encoding of the text's end and its continuation where that has a
        boundary between the two; the continuation is encoded for itself where it has none.
        """
        detokenizer = Detokenizer(self._pair.draft, [token.id for token in self._drafts[-8:]])
        text = "".join(map(detokenizer.push, drafted))
        # SentencePiece puts a space before a text that begins with a letter, not with "\n".
        for before in (self._text[-TAIL_CHARS:], "\n"):
            tokens = encode(self._pair.target, before + text)
            following = [token for token in tokens if token.end > len(before)]
            if following and following[0].start >= len(before):
                return tuple(token.id for token in following)
        return tuple(token.id for token in encode(self._pair.target, text))

    def _append(self, piece: str) -> None:
        """Encode the text's end again, from the first token that comes out as it was."""
        if not piece:
            return
        self._text += piece
        keep = max(0, len(self._drafts) - WINDOW_TOKENS)
        start = self._drafts[keep].start if keep else 0
        window = encode(self._pair.draft, self._text[start:], start)
        if keep:
            # The first tokens of a window lack what stands before them.
            places = {token: place for place, token in enumerate(self._drafts[keep:], keep)}
            at, keep = next(
                ((at, places[token]) for at, token in enumerate(window) if token in places),
                (0, keep),
            )
            window = window[at:]
        same = 0
        for old, new in zip(self._drafts[keep:], window, strict=False):
            if old != new:
                break
            same += 1
        self._sent = min(self._sent, len(self._head) + keep + same)
        self._drafts[keep:] = window


def _head(tokenizer: PreTrainedTokenizerBase, text: Sequence[Token]) -> tuple[int, ...]:
    """What the draft reads before a text: BOS if its tokenizer puts that there, and never nothing
    at all."""
    added = tokenizer.encode("")[:1]
    if added and added[0] == tokenizer.bos_token_id:
        return tuple(added)
    return () if text else (stand_in_id(tokenizer),)
