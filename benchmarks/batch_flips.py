"""How often the most probable token depends on the batch that it is computed in.

The last token of many contexts is run alone, as plain decoding of one stream does, and again in
other shapes: with 7 and with 31 other sessions, and as the root of a verify of 6 rows, alone and
with 7 others. A flip is a context whose argmax is not that of the run alone: in a text, the place
where greedy decoding goes another way under load or with a draft.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from acceptance import PROMPTS
from report import machine, table

from specdec_ray import SpeculativeDecoder
from specdec_ray.config import BUNDLED_TARGET, TargetConfig
from specdec_ray.models.loading import load_model
from specdec_ray.models.packed import Segment
from specdec_ray.models.packed_model import PackedModel

DTYPES = ("bfloat16", "float32")
TEXTS = 32
VERIFY_ROWS = 6
# Of a step: sessions in it, and rows of each.
SHAPES = {
    "8 sessions": (8, 1),
    "32 sessions": (32, 1),
    "verify of 6 rows": (1, VERIFY_ROWS),
    "8 verifies of 6 rows": (8, VERIFY_ROWS),
}


@dataclass(slots=True)
class Flips:
    """What one shape changes.

    Attributes:
        difference: the largest change of a logit.
        margin: the largest lead of the most probable token, in logits, that a flip overcame.
    """

    contexts: int = 0
    flipped: int = 0
    difference: float = 0.0
    margin: float = 0.0

    def add(self, alone: torch.Tensor, logits: torch.Tensor) -> None:
        """Count the rows of both, float32 [contexts, V]."""
        best = alone.topk(2).values
        flips = alone.argmax(-1) != logits.argmax(-1)
        margins = (best[:, 0] - best[:, 1])[flips]
        self.contexts += len(alone)
        self.flipped += int(flips.sum())
        self.difference = max(self.difference, float((alone - logits).abs().max()))
        self.margin = max(self.margin, float(margins.max()) if len(margins) else 0.0)


def measure(model: PackedModel, texts: Sequence[Sequence[int]]) -> dict[str, Flips]:
    """Flips by shape, over the positions of texts of one length."""
    length = len(texts[0])
    tables = [model.pool.allocate(-(-length // model.pool.block_size)) for _ in texts]
    found = {shape: Flips() for shape in SHAPES}
    for at in range(length - VERIFY_ROWS):
        changed = {
            shape: _roots(model, texts, tables, at, sessions, rows)
            for shape, (sessions, rows) in SHAPES.items()
        }
        alone = _roots(model, texts, tables, at, 1, 1)  # last: its KV is what stays
        for shape, logits in changed.items():
            found[shape].add(alone, logits)
    model.pool.release(list(chain(*tables)))
    return found


def _roots(
    model: PackedModel,
    texts: Sequence[Sequence[int]],
    tables: Sequence[Sequence[int]],
    at: int,
    sessions: int,
    rows: int,
) -> torch.Tensor:
    """Logits of every text's token `at`, float32 [texts, V], in steps of that shape."""
    segments = [
        Segment(own, at, text[at : at + rows], logit_rows=rows)
        for own, text in zip(tables, texts, strict=True)
    ]
    steps = [segments[i : i + sessions] for i in range(0, len(segments), sessions)]
    return torch.cat([model.forward(step)[::rows] for step in steps])


def write_texts(target: str, threads: int, tokens: int) -> list[tuple[int, ...]]:
    """The model's own samples."""
    with SpeculativeDecoder.from_pretrained(
        target, None, dtype="float32", threads=threads
    ) as decoder:
        return [
            generation.token_ids
            for seed in range(TEXTS // len(PROMPTS))
            for generation in decoder.generate(
                PROMPTS, max_tokens=tokens, temperature=1.0, seed=seed, ignore_eos=True
            )
        ]


def report(by_dtype: dict[str, dict[str, Flips]]) -> str:
    header = ["", "contexts", "flips", "flips per 1000", "largest margin", "logits change by up to"]
    rows = [
        [
            f"{dtype}, {shape}",
            str(flips.contexts),
            str(flips.flipped),
            f"{1000 * flips.flipped / flips.contexts:.2f}",
            f"{flips.margin:.3f}",
            f"{flips.difference:.1e}",
        ]
        for dtype, shapes in by_dtype.items()
        for shape, flips in shapes.items()
    ]
    return table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--target", default=BUNDLED_TARGET, help="Hugging Face id or folder")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each of 32 texts")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    print(machine(options.threads), flush=True)
    texts = write_texts(options.target, options.threads, options.tokens)
    found = {}
    for dtype in DTYPES:
        model = load_model(TargetConfig(model=options.target).source, dtype=dtype, device="cpu")
        blocks = TEXTS * -(-options.tokens // 16)
        found[dtype] = measure(PackedModel(model, block_count=blocks), texts)
    print(report(found))


if __name__ == "__main__":
    main()
