"""Training of the bundled pair, paced by the clock so that it fits any time budget."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional
from transformers import LlamaForCausalLM

Loss = Callable[[LlamaForCausalLM, torch.Tensor], torch.Tensor]

SAVE_EVERY_S = 30.0


@dataclass(frozen=True)
class Budget:
    """How long and how hard to train one model.

    Attributes:
        seconds: training time in all, over all runs.
        batch_tokens: tokens per optimizer step.
        length: tokens per sequence.
        peak_lr: learning rate after warm-up; it falls to a tenth along a cosine.
    """

    seconds: float
    batch_tokens: int
    length: int
    peak_lr: float


def train(
    model: LlamaForCausalLM,
    ids: npt.NDArray[np.uint16],
    loss_of: Loss,
    budget: Budget,
    checkpoint: Path,
) -> int:
    """Train in place until the budget is spent; resumes from `checkpoint`. Returns tokens seen."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=budget.peak_lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    spent, step = _resume(model, optimizer, checkpoint)
    model.train()
    started, saved = time.monotonic() - spent, time.monotonic()
    while (spent := time.monotonic() - started) < budget.seconds:
        for group in optimizer.param_groups:
            group["lr"] = budget.peak_lr * _pace(spent / budget.seconds)
        batch = _batch(ids, budget, step)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 100 == 0:
            rate = step * budget.batch_tokens / spent
            print(
                f"{spent / 60:6.1f} of {budget.seconds / 60:.0f} min  step {step}  "
                f"loss {loss.item():.3f}  {rate:.0f} tokens/s",
                flush=True,
            )
        if time.monotonic() - saved > SAVE_EVERY_S:
            _save(model, optimizer, checkpoint, spent, step)
            saved = time.monotonic()
    _save(model, optimizer, checkpoint, spent, step)
    model.eval()
    return step * budget.batch_tokens


def next_token_loss(model: LlamaForCausalLM, batch: torch.Tensor) -> torch.Tensor:
    """Cross entropy with the text, nats per token."""
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def distillation_loss(teacher: LlamaForCausalLM) -> Loss:
    """KL(teacher || student) per token: the student learns to agree, not just to be right."""

    def loss_of(student: LlamaForCausalLM, batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = teacher(input_ids=batch, use_cache=False).logits.float().log_softmax(-1)
        given = student(input_ids=batch, use_cache=False).logits.float().log_softmax(-1)
        return functional.kl_div(
            given.flatten(0, 1), wanted.flatten(0, 1), reduction="batchmean", log_target=True
        )

    return loss_of


def _pace(progress: float) -> float:
    warm_up = min(1.0, progress / 0.02)
    return warm_up * (0.1 + 0.45 * (1 + math.cos(math.pi * min(progress, 1.0))))


def _batch(ids: npt.NDArray[np.uint16], budget: Budget, step: int) -> torch.Tensor:
    """Random windows; the step is the seed, so a resumed run sees the same batches."""
    starts = np.random.default_rng(step).integers(
        0, len(ids) - budget.length - 1, budget.batch_tokens // budget.length
    )
    windows = np.stack([ids[start : start + budget.length + 1] for start in starts])
    return torch.from_numpy(windows.astype(np.int64))


def _save(
    model: LlamaForCausalLM,
    optimizer: torch.optim.Optimizer,
    checkpoint: Path,
    spent: float,
    step: int,
) -> None:
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "spent": spent,
        "step": step,
    }
    partial = checkpoint.with_suffix(".partial")
    torch.save(state, partial)
    partial.rename(checkpoint)  # a run killed while saving keeps the last whole checkpoint


def _resume(
    model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, checkpoint: Path
) -> tuple[float, int]:
    if not checkpoint.exists():
        return 0.0, 0
    state = torch.load(checkpoint, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["spent"], state["step"]
