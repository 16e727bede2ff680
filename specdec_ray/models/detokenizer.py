"""Text of a growing token list, as far as it is final."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"
MAX_HELD_TOKENS = 8  # two characters of four single-byte tokens


class Detokenizer:
    """Turns ids into text piece by piece; special tokens are skipped.

    Only a short window is decoded: the tokens of the piece sent last, whose presence makes the
    decoder treat the new ones as it would in the middle of a text (SentencePiece drops the space
    of a first token), and the tokens after it. A window that ends in U+FFFD may end inside a
    character and waits. Bytes that no later token can complete are let go after
    `MAX_HELD_TOKENS`, so neither delay nor work grows with what a model babbles.

    The pieces, put together, are `tokenizer.decode(ids, skip_special_tokens=True)` for every
    decoder that concatenates. SentencePiece's byte fallback does not where bytes are invalid: it
    replaces the valid characters before them as well, which may have been sent.

    Args:
        before: tokens whose text, known already, is continued.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window = self._tail(before)
        self._sent_tokens = len(self._window)  # of the window
        self._sent_chars = len(self._decode(self._window))  # of the window's text

    @property
    def holds(self) -> bool:
        """Whether tokens wait for what follows them."""
        return len(self._window) > self._sent_tokens

    def push(self, token_id: int) -> str:
        """The text that became final with this token."""
        self._window.append(token_id)
        text = self._decode(self._window)
        if len(text) <= self._sent_chars:
            self._drop_if_special(token_id)
            return ""
        if not text.endswith(REPLACEMENT):
            return self._send(text, len(self._window))
        if len(self._window) - self._sent_tokens > MAX_HELD_TOKENS:
            return self._let_go(text)
        return ""

    def flush(self) -> str:
        """What was held back, incomplete characters as U+FFFD."""
        piece = self._decode(self._window)[self._sent_chars :]
        self._window, self._sent_tokens, self._sent_chars = [], 0, 0
        return piece

    def _tail(self, ids: Sequence[int]) -> list[int]:
        """The fewest last tokens that are text; none where they end inside a character."""
        for size in range(1, min(MAX_HELD_TOKENS, len(ids)) + 1):
            tail = list(ids[-size:])
            if (text := self._decode(tail)) and REPLACEMENT not in text:
                return tail
        return []

    def _send(self, text: str, end: int) -> str:
        """Send `text`, that of the window's first `end` tokens, and begin the window with them."""
        piece = text[self._sent_chars :]
        del self._window[: self._sent_tokens]
        self._sent_tokens = end - self._sent_tokens
        self._sent_chars = len(self._decode(self._window[: self._sent_tokens]))
        return piece

    def _let_go(self, text: str) -> str:
        """Send the part of `text` that no later token can change.

        An incomplete character begins in the last three tokens, and of four cuts in a row at least
        one does not split a complete one.
        """
        size = len(self._window)
        for end in range(size - 3, size - 7, -1):
            head, tail = self._decode(self._window[:end]), self._decode(self._window[end:])
            if head + tail == text:
                piece = head[self._sent_chars :]
                self._window, self._sent_tokens, self._sent_chars = self._window[end:], 0, 0
                return piece
        return ""

    def _drop_if_special(self, token_id: int) -> None:
        """Without this, end tokens that are generated past would fill the window."""
        if self._decode([token_id], skip_special_tokens=False) != self._decode([token_id]) == "":
            self._window.pop()

    def _decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        # Clean-up rewrites text that may have been sent, and is not what the model wrote.
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text
