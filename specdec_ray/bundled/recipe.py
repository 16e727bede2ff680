"""Make the bundled pair: train a small target, distil a smaller draft from it, measure both.

One command, repeatable and resumable:

    python -m specdec_ray.bundled.recipe --out build/pair --minutes 80
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from specdec_ray.bundled.card import Measurement, write_card
from specdec_ray.bundled.corpus import (
    DOCUMENTATION,
    STANDARD_LIBRARY,
    encode,
    read_documents,
    train_tokenizer,
)
from specdec_ray.bundled.training import Budget, distillation_loss, next_token_loss, train

VOCAB_SIZE = 4096
CONTEXT = 2048
HELD_OUT = 0.01
HIDDEN, TARGET_LAYERS, DRAFT_LAYERS = 256, 14, 1
TARGET_SHARE, SAMPLE_SHARE, DRAFT_SHARE = 0.75, 0.05, 0.20  # of the time
SAMPLE_LENGTH = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/pair"))
    parser.add_argument("--minutes", type=float, default=80, help="training time in all")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--text", type=Path, nargs="+", default=[DOCUMENTATION, STANDARD_LIBRARY], metavar="FOLDER"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    make_pair(arguments.out, arguments.minutes * 60, arguments.text)


def make_pair(out: Path, seconds: float, roots: list[Path]) -> None:
    """Train, save `out`/target and `out`/draft in bfloat16, and write `out`/README.md."""
    out.mkdir(parents=True, exist_ok=True)
    documents = read_documents(roots)
    tokenizer = _tokenizer(out, documents)
    ids = encode(tokenizer, documents)
    split = int(len(ids) * (1 - HELD_OUT))
    text, held_out = ids[:split], ids[split:]
    print(f"{len(documents)} files, {len(ids) / 1e6:.1f}M tokens", flush=True)

    torch.manual_seed(0)
    target = LlamaForCausalLM(_config(TARGET_LAYERS))
    budget = Budget(seconds * TARGET_SHARE, batch_tokens=1024, length=512, peak_lr=1.5e-3)
    target_tokens = train(target, text, next_token_loss, budget, out / "target.pt")
    _export(target, tokenizer, out / "target")

    samples = _samples(target, tokenizer, text, out / "samples.npy", seconds * SAMPLE_SHARE)
    draft = _first_layers(target)
    budget = Budget(seconds * DRAFT_SHARE, batch_tokens=2048, length=512, peak_lr=2e-3)
    mixture = np.concatenate([np.tile(samples, 1 + len(text) // len(samples)), text])
    draft_tokens = train(draft, mixture, distillation_loss(target), budget, out / "draft.pt")
    _export(draft, tokenizer, out / "draft")

    measured = Measurement.of(out, held_out, target_tokens, draft_tokens)
    write_card(out / "README.md", measured)


def _config(layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=HIDDEN // 64,
        num_key_value_heads=HIDDEN // 128,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )


def _first_layers(target: LlamaForCausalLM) -> LlamaForCausalLM:
    """A draft that starts from the target's embedding and first layers: it learns far sooner."""
    draft = LlamaForCausalLM(_config(DRAFT_LAYERS))
    draft.load_state_dict(target.state_dict(), strict=False)  # later layers have no place in it
    return draft


def _tokenizer(out: Path, documents: list[str]) -> PreTrainedTokenizerFast:
    folder = out / "tokenizer"
    if folder.exists():
        return PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer = train_tokenizer(documents, VOCAB_SIZE)
    tokenizer.save_pretrained(folder)
    return tokenizer


def _samples(
    target: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    text: npt.NDArray[np.uint16],
    path: Path,
    seconds: float,
) -> npt.NDArray[np.uint16]:
    """The target's own continuations, half of them greedy: distilled on, they raise agreement."""
    if path.exists():
        saved: npt.NDArray[np.uint16] = np.load(path)
        return saved
    sequences = []
    for prompts, greedy in _prompts(text, seconds):
        generated = target.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=not greedy,
            temperature=None if greedy else 0.8,
            max_new_tokens=SAMPLE_LENGTH - prompts.shape[1],
            pad_token_id=tokenizer.eos_token_id,
        )
        sequences.append(generated.flatten().numpy().astype(np.uint16))
    samples = np.concatenate(sequences)
    print(f"{len(samples) / 1e6:.2f}M sampled tokens", flush=True)
    np.save(path, samples)
    return samples


def _prompts(text: npt.NDArray[np.uint16], seconds: float) -> Iterator[tuple[torch.Tensor, bool]]:
    """Batches of 64 prompts of 16 tokens until the time is over, every other one greedy."""
    rng = np.random.default_rng(1)
    deadline, greedy = time.monotonic() + seconds, False
    while time.monotonic() < deadline:
        starts = rng.integers(0, len(text) - 16, 64)
        prompts = np.stack([text[start : start + 16] for start in starts]).astype(np.int64)
        yield torch.from_numpy(prompts), greedy
        greedy = not greedy


def _export(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    torch.set_default_dtype(torch.float32)
    exported = LlamaForCausalLM(model.config)
    exported.load_state_dict(model.state_dict())
    exported.generation_config = GenerationConfig(
        do_sample=False, bos_token_id=0, eos_token_id=1, pad_token_id=1
    )
    exported.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
