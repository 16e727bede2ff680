"""What a grammar allows next: structured output, by llguidance.

Masks are computed per row, each below its own drafted path, so a rejected draft leaves no trace.
"""

import logging
from collections.abc import Sequence

import llguidance
import llguidance.hf
import llguidance.torch
import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from specdec_ray.errors import InvalidParameter
from specdec_ray.models.loading import id_limit
from specdec_ray.sampling.params import MAX_GRAMMAR_CHARS

logger = logging.getLogger(__name__)


class GrammarState:
    """One session's place in its grammar.

    Args:
        start: how many of the session's tokens are the prompt; the grammar begins behind them.
        known_ids: ids that the grammar's tokenizer knows.
        vocab_size: V, ids that the model may choose from.
        end_token_ids: what may follow where nothing else may.
    """

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        start: int,
        known_ids: int,
        vocab_size: int,
        end_token_ids: Sequence[int],
    ) -> None:
        self._matcher = matcher
        self._followed = start
        self._known_ids = known_ids
        self._vocab_size = vocab_size
        ends = [token for token in end_token_ids if token < vocab_size]
        self._otherwise = ends or list(range(vocab_size))

    def allowed(self, tokens: Sequence[int], paths: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """What may follow the committed tokens and each path: bool [paths, V].

        Below a node that the grammar forbids everything is allowed: it is never reached.

        Args:
            tokens: the session's committed tokens; they only ever grow.
        """
        self._matcher.try_consume_tokens(list(tokens[self._followed :]))
        self._followed = len(tokens)
        masks = llguidance.torch.allocate_token_bitmask(len(paths), self._known_ids)
        for row, path in enumerate(paths):
            consumed = self._matcher.try_consume_tokens(list(path))
            if consumed == len(path) or self._matcher.is_stopped():
                llguidance.torch.fill_next_token_bitmask(self._matcher, masks, row)
            self._matcher.rollback(consumed)
        bits = np.unpackbits(masks.numpy().view(np.uint8), axis=1, bitorder="little")
        allowed = torch.from_numpy(bits[:, : self._vocab_size]).bool()
        stuck = ~allowed.any(-1)  # the vocabulary may lack a byte that the grammar needs
        allowed[stuck.nonzero(), self._otherwise] = True
        return allowed


class Grammars:
    """Makes grammar states over one model's vocabulary.

    Args:
        vocab_size: V, ids that the model may choose from; the tokenizer may know others, which
            are followed and never allowed.

    Raises:
        InvalidParameter: the tokenizer cannot be read byte by byte, or there is no end token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        end_token_ids: Sequence[int],
    ) -> None:
        if not end_token_ids:
            raise InvalidParameter("grammar", "the model has no end token")
        self._vocab_size = vocab_size
        self._ends = sorted(end_token_ids)
        try:
            self._tokenizer = llguidance.hf.from_tokenizer(
                tokenizer, n_vocab=max(vocab_size, id_limit(tokenizer)), eos_token=self._ends
            )
        except ValueError as error:
            raise InvalidParameter("grammar", str(error)) from error

    def token_bytes(self, token: int) -> bytes:
        """What a token spells; a special token its name."""
        # llguidance keeps the byte 0xFF, which no UTF-8 text has, for itself.
        return self._tokenizer.decode_bytes([token]) or b"\xff"

    def start(self, grammar: str, prompt_length: int) -> GrammarState:
        """Begin a grammar behind a prompt.

        Raises:
            InvalidParameter: it is none, or too large.
        """
        if len(grammar) > MAX_GRAMMAR_CHARS:
            raise InvalidParameter(
                "grammar", f"limit is {MAX_GRAMMAR_CHARS} characters, got {len(grammar)}"
            )
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # some are found too large only now
        if matcher.is_error():
            reason = matcher.get_error().partition("<backtrace>")[0]
            raise InvalidParameter("grammar", f"cannot be followed: {reason.strip():.500}")
        return GrammarState(
            matcher, prompt_length, self._tokenizer.vocab_size, self._vocab_size, self._ends
        )
