"""Text to train on: files of plain text, or of chats as JSON lines, as windows of token ids."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from specdec_ray.errors import ConfigError


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Windows of equal length, one behind the other."""

    def __init__(self, tokens: torch.Tensor, length: int) -> None:
        if len(tokens) < length:
            raise ConfigError(f"the text has {len(tokens)} tokens, a window needs {length}")
        self._windows = tokens[: len(tokens) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._windows[index]}


def read_tokens(files: Sequence[Path], tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """All token ids of the files, int64 [N].

    `.jsonl` lines are `{"messages": [...]}`, which goes through the chat template, or
    `{"text": "..."}`.

    Raises:
        ConfigError: a file cannot be read or a line is neither.
    """
    ids: list[int] = []
    for path in files:
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"text {path}: {error}") from error
        if path.suffix == ".jsonl":
            for number, line in enumerate(text.splitlines(), start=1):
                ids += tokenizer(_entry(path, number, line, tokenizer))["input_ids"]
        else:
            ids += tokenizer(text)["input_ids"]
    return torch.tensor(ids, dtype=torch.int64)


def _entry(path: Path, number: int, line: str, tokenizer: PreTrainedTokenizerBase) -> str:
    try:
        entry = json.loads(line)
        if "messages" in entry:
            return str(tokenizer.apply_chat_template(entry["messages"], tokenize=False))
        return str(entry["text"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"text {path}, line {number}: has neither messages nor text") from error
