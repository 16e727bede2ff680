"""Measures a made pair and writes its model card."""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

PROMPT_TOKENS, NEW_TOKENS = 32, 96


@dataclass(frozen=True)
class Measurement:
    """What the card reports. Sizes in MB (10^6 bytes), losses in bits per byte, times in ms."""

    target_mb: float
    draft_mb: float
    target_millions: float
    draft_millions: float
    target_tokens: int
    draft_tokens: int
    target_bits: float
    draft_bits: float
    agreement: float
    accepted_run: float
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
        text_bytes = sum(len(tokenizer.decode(window).encode()) for window in windows)
        agreement, run = _agreement(target, draft, windows[:32, :PROMPT_TOKENS])
        return cls(
            target_mb=_megabytes(out / "target"),
            draft_mb=_megabytes(out / "draft"),
            target_millions=target.num_parameters() / 1e6,
            draft_millions=draft.num_parameters() / 1e6,
            target_tokens=target_tokens,
            draft_tokens=draft_tokens,
            target_bits=_bits(target, windows) / text_bytes,
            draft_bits=_bits(draft, windows) / text_bytes,
            agreement=agreement,
            accepted_run=run,
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
| architecture (Llama) | 256 wide, 14 layers | 192 wide, 2 layers |
| parameters | {m.target_millions:.1f}M | {m.draft_millions:.1f}M |
| weights, bfloat16 | {m.target_mb:.1f} MB | {m.draft_mb:.1f} MB |
| tokens trained on | {m.target_tokens / 1e6:.1f}M | {m.draft_tokens / 1e6:.1f}M |
| held-out loss, bits per byte | {m.target_bits:.3f} | {m.draft_bits:.3f} |
| one token, float32, one thread | {m.target_ms:.2f} ms | {m.draft_ms:.2f} ms |

On the target's own greedy text the draft agrees with {m.agreement:.0%} of the tokens; runs of
agreement are {m.accepted_run:.1f} tokens long on average. The target's step takes
{m.target_ms / m.draft_ms:.1f} draft steps.

Tokenizer: byte-level BPE of 4096 tokens, shared. Context: 2048 positions, trained on 512.

## Text and licence

Sources of the Python 3.11 documentation and the Python standard library, both under the PSF
License Agreement (https://docs.python.org/3/license.html). The weights come under this
repository's licence.

## Make it again

    apt-get install python3.11-doc
    python -m specdec_ray.bundled.recipe --out build/pair --minutes 80

The command resumes when interrupted. The draft is distilled from the target, on the text and on
the target's own samples.
""")


def _load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


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
    """Share of the target's greedy tokens that are the draft's argmax, and mean run of them."""
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
    runs = [len(run) for row in same for run in "".join("01"[s] for s in row).split("0")]
    return sum(map(sum, same)) / (len(same) * NEW_TOKENS), sum(runs) / len(runs)


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
