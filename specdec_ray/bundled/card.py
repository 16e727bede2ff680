"""Measures a made pair and writes its model card."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

PROMPT_TOKENS, NEW_TOKENS = 32, 96
DRAFTED = 5  # tokens per simulated round of speculation


@dataclass(frozen=True)
class Measurement:
    """What the card reports. Sizes in MB (10^6 bytes), losses in bits per byte, times in ms."""

    target_mb: float
    draft_mb: float
    target_shape: str
    draft_shape: str
    target_millions: float
    draft_millions: float
    target_tokens: int
    draft_tokens: int
    target_bits: float
    draft_bits: float
    agreement: float
    accepted: float
    target_ms: float
    draft_ms: float

    @classmethod
    def of(
        cls, out: Path, held_out: npt.NDArray[np.uint16], target_tokens: int, draft_tokens: int
    ) -> Self:
        """Measure the exported pair in float32 on one thread."""
        torch.set_num_threads(1)
        target, draft = (_load(out / name) for name in ("target", "draft"))
        tokenizer = AutoTokenizer.from_pretrained(out / "target")
        windows = torch.from_numpy(held_out[: len(held_out) // 256 * 256].astype(np.int64))
        windows = windows.view(-1, 256)[:128]
        text_bytes = sum(
            len(tokenizer.decode(window[1:], skip_special_tokens=True).encode())
            for window in windows
        )
        agreement, accepted = _agreement(target, draft, windows[:32, :PROMPT_TOKENS])
        return cls(
            target_mb=_megabytes(out / "target"),
            draft_mb=_megabytes(out / "draft"),
            target_shape=_shape(target),
            draft_shape=_shape(draft),
            target_millions=target.num_parameters() / 1e6,
            draft_millions=draft.num_parameters() / 1e6,
            target_tokens=target_tokens,
            draft_tokens=draft_tokens,
            target_bits=_bits(target, windows) / text_bytes,
            draft_bits=_bits(draft, windows) / text_bytes,
            agreement=agreement,
            accepted=accepted,
            target_ms=_step_ms(target),
            draft_ms=_step_ms(draft),
        )


def write_card(path: Path, m: Measurement) -> None:
    path.write_text(f"""\
# The bundled pair

A demonstration target and its draft, small enough for the repository and a laptop's CPU. They
continue text in the manner of Python's documentation and source code. They know nothing reliable
and follow no instructions; serve your own models for that.

| | target | draft |
|---|---|---|
| architecture (Llama) | {m.target_shape} | {m.draft_shape} |
| parameters | {m.target_millions:.1f}M | {m.draft_millions:.1f}M |
| weights, bfloat16 | {m.target_mb:.1f} MB | {m.draft_mb:.1f} MB |
| tokens trained on | {m.target_tokens / 1e6:.1f}M | {m.draft_tokens / 1e6:.1f}M |
| held-out loss, bits per byte | {m.target_bits:.3f} | {m.draft_bits:.3f} |
| one token, float32, one thread | {m.target_ms:.2f} ms | {m.draft_ms:.2f} ms |

On the target's own greedy continuations of held-out text the draft's first choice is the target's
for {m.agreement:.0%} of the tokens. Of {DRAFTED} drafted tokens {m.accepted:.2f} are accepted on
average (greedy). A step of the target takes as long as {m.target_ms / m.draft_ms:.1f} steps of the
draft, measured with one token on top of 128.

Tokenizer: byte-level BPE of 4096 tokens, shared. Context: 2048 positions, but the target was
trained on 512 tokens at a time; expect less beyond that. The bits per byte
are those of windows of 256 tokens.

## Text and licence

Sources of the Python 3.11 documentation and the Python standard library, both under the PSF
License Agreement (https://docs.python.org/3/license.html). The weights come under this
repository's licence.

## Make it again

    apt-get install python3.11-doc
    python -m specdec_ray.bundled.recipe --out build/pair --minutes 80

The command resumes when interrupted, and is done with `build/pair/target` and `build/pair/draft`.
The draft starts from the target's embedding and first layer and is distilled from the target, on
the text and on the target's own samples. Training is paced by the clock, so a faster or idler
machine sees more tokens in the same minutes and makes a better pair.
""")


def _load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _shape(model: PreTrainedModel) -> str:
    config = model.config
    layers = "1 layer" if config.num_hidden_layers == 1 else f"{config.num_hidden_layers} layers"
    return f"{config.hidden_size} wide, {layers}"


def _megabytes(folder: Path) -> float:
    return (folder / "model.safetensors").stat().st_size / 1e6


@torch.inference_mode()
def _bits(model: PreTrainedModel, windows: torch.Tensor) -> float:
    """Total bits the model needs for the windows."""
    total = 0.0
    for batch in windows.split(16):
        logits = model(batch[:, :-1]).logits.log_softmax(-1)
        total -= logits.gather(-1, batch[:, 1:, None]).sum().item()
    return total / math.log(2)


@torch.inference_mode()
def _agreement(
    target: PreTrainedModel, draft: PreTrainedModel, prompts: torch.Tensor
) -> tuple[float, float]:
    """Share of the target's greedy tokens that are the draft's, and mean accepted per round."""
    text = target.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        pad_token_id=1,
    )
    drafted = draft(text).logits[:, PROMPT_TOKENS - 1 : -1].argmax(-1)
    same = (drafted == text[:, PROMPT_TOKENS:]).tolist()
    rounds = [accepted for row in same for accepted in _rounds(row)]
    return sum(map(sum, same)) / (len(same) * NEW_TOKENS), sum(rounds) / len(rounds)


def _rounds(same: list[bool]) -> Iterator[int]:
    """Tokens accepted in each round of greedy speculation over one continuation.

    A round accepts the agreeing tokens at its start; the target adds one after them.
    """
    start = 0
    while start + DRAFTED <= len(same):
        accepted = [*same[start : start + DRAFTED], False].index(False)
        yield accepted
        start += accepted + 1


@torch.inference_mode()
def _step_ms(model: PreTrainedModel) -> float:
    """Median time of one token on top of 128."""
    context = torch.zeros(1, 128, dtype=torch.long)
    cache = model(context, use_cache=True).past_key_values
    times = []
    for _ in range(40):
        started = time.perf_counter()
        cache = model(context[:, :1], past_key_values=cache, use_cache=True).past_key_values
        times.append(time.perf_counter() - started)
    return 1e3 * sorted(times)[len(times) // 2]
