"""Train Medusa heads on a frozen target: Medusa-1 of Cai et al. 2024, by distillation.

A head learns the target's own distribution a few places ahead rather than the text's next tokens:
what counts is to agree with the target.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from specdec_ray.models.loading import load_tokenizer, load_trainable_model
from specdec_ray.models.medusa import WEIGHTS, MedusaHeads
from specdec_ray.training.text import Windows, read_tokens


@dataclass(frozen=True, slots=True)
class MedusaTraining:
    """What to train and how long.

    Attributes:
        target: Hugging Face id or folder of the target.
        text: files to learn from: plain text, or chats as JSON lines.
        out: folder of the heads; checkpoints lie in it, and a second run goes on from the last.
        steps: optimizer steps of `batch` windows of `length` tokens.
    """

    target: str
    text: tuple[Path, ...]
    out: Path
    heads: int = 3
    steps: int = 300
    batch: int = 4
    length: int = 256
    learning_rate: float = 1e-3


def train_medusa(training: MedusaTraining) -> None:
    """Train, and write `medusa_lm_head.safetensors` and `config.json` as FasterDecoding does.

    Raises:
        ConfigError: the target or the text cannot be read.
    """
    tokenizer = load_tokenizer(training.target)
    tokens = read_tokens(training.text, tokenizer)
    target = load_trainable_model(training.target)
    heads = MedusaHeads.on(target.get_output_embeddings().weight, training.heads)
    checkpoints = training.out / "checkpoints"
    arguments = TrainingArguments(
        output_dir=str(checkpoints),
        max_steps=training.steps,
        per_device_train_batch_size=training.batch,
        learning_rate=training.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, training.steps // 20),
        logging_steps=max(1, training.steps // 20),
        save_steps=max(1, training.steps // 5),
        save_total_limit=1,
        report_to=[],
        remove_unused_columns=False,
        label_names=[],
    )
    trainer = Trainer(
        model=_Distilled(target, heads),
        args=arguments,
        train_dataset=Windows(tokens, training.length),
    )
    last = get_last_checkpoint(str(checkpoints)) if checkpoints.is_dir() else None
    trainer.train(resume_from_checkpoint=last)
    _save(heads, target, training)


class _Distilled(torch.nn.Module):
    """Heads whose loss is their cross entropy with the target's distribution, nats per token."""

    def __init__(self, target: PreTrainedModel, heads: MedusaHeads) -> None:
        super().__init__()
        self.heads = heads
        self._frozen = [target]  # in a list, so that it is neither trained nor saved

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        target = self._frozen[0].to(input_ids.device)
        with torch.no_grad():
            states = target.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
            wanted = target.get_output_embeddings()(states).float().softmax(-1)
        loss = torch.zeros((), device=input_ids.device)
        for ahead, head in enumerate(self.heads, start=1):
            given = head(states[:, :-ahead].float()).flatten(0, 1)
            loss = loss + functional.cross_entropy(given, wanted[:, ahead:].flatten(0, 1))
        return {"loss": loss / len(self.heads)}


def _save(heads: MedusaHeads, target: PreTrainedModel, training: MedusaTraining) -> None:
    weights: dict[str, Any] = {
        name: tensor.detach().to("cpu", target.config.dtype or torch.float32).contiguous()
        for name, tensor in heads.state_dict().items()
    }
    save_file(weights, training.out / WEIGHTS, metadata={"format": "pt"})
    config = {
        "base_model_name_or_path": training.target,
        "medusa_num_heads": training.heads,
        "medusa_num_layers": 1,
    }
    (training.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
