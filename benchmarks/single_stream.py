"""Greedy tokens per second of one stream: stock `generate`, stock assisted generation, and ours.

The three take turns on the same prompts in one run, on one pair with the same threads. In the same
run the price of a forward is measured, and from it the speed-up over stock `generate` that
speculation with k drafted tokens can reach when nothing but forwards takes time:

    limit = (mean emitted per round) / (1 + k * t_draft / t_target)

It counts a verify of k + 1 rows as one target forward, which t_target(k + 1) shows to hold or not.
Before that, in float32, all three must write the same texts, or the benchmark fails.
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from pair import make_pair
from report import machine, spread, table
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.utils import logging

from specdec_ray import SpeculativeDecoder

PROMPTS = (
    "The old lighthouse stood at",
    "def merge(left, right):",
    "Once upon a time a miller",
    "The capital of Norway is",
    "To bake a good bread, first",
    "In the beginning of spring",
    "Rivers carry sand because",
    "She opened the letter and",
)
CHECKED_PROMPTS, CHECKED_TOKENS = 2, 64
WARM_UP_TOKENS = 24
FORWARDS_PER_ROUND = 10


@dataclass(frozen=True, slots=True)
class Text:
    """One timed text.

    Attributes:
        tokens: emitted ids, the prompt left out.
        accepted: accepted length of each round; empty where it is not known.
    """

    tokens: tuple[int, ...]
    seconds: float
    accepted: tuple[int, ...] = ()


class Contenders:
    """The pair loaded for the three ways to generate. Use as a context manager.

    Args:
        target, draft: folders or Hugging Face ids.
        k: drafted tokens per round.
    """

    def __init__(self, target: str, draft: str, dtype: str, k: int, threads: int) -> None:
        torch.set_num_threads(threads)
        self.k = k
        self.target, self.draft = _stock(target, dtype), _stock(draft, dtype)
        self._decoder = SpeculativeDecoder.from_pretrained(
            target, draft, dtype=dtype, draft_tokens=k, threads=threads
        )
        self.ways = {"generate": self.plain, "assisted": self.assisted, "specdec_ray": self.ours}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._decoder.close()

    def prompt(self, text: str) -> list[int]:
        return list(self._decoder.tokenizer(text)["input_ids"])

    def plain(self, prompt: Sequence[int], count: int) -> Text:
        return self._generate(prompt, count, None)

    def assisted(self, prompt: Sequence[int], count: int) -> Text:
        """With k tokens every round: faster here than its adaptive default."""
        config = self.draft.generation_config
        config.num_assistant_tokens = self.k
        config.num_assistant_tokens_schedule = "constant"
        config.assistant_confidence_threshold = 0.0
        return self._generate(prompt, count, self.draft)

    def ours(self, prompt: Sequence[int], count: int) -> Text:
        started = time.perf_counter()
        (generation,) = self._decoder.generate([prompt], max_tokens=count, ignore_eos=True)
        seconds = time.perf_counter() - started
        return Text(generation.token_ids, seconds, tuple(generation.stats.per_round_accepted))

    def _generate(
        self, prompt: Sequence[int], count: int, assistant: PreTrainedModel | None
    ) -> Text:
        ids = torch.tensor([prompt], device=self.target.device)
        started = time.perf_counter()
        with torch.inference_mode():
            text = self.target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                assistant_model=assistant,
            )
        seconds = time.perf_counter() - started
        return Text(tuple(text[0, len(prompt) :].tolist()), seconds)


@dataclass(slots=True)
class Measurements:
    """Everything measured, one entry per round of the benchmark or per forward.

    Attributes:
        rates: tokens per second of each way.
        accepted: accepted lengths of all our rounds.
        equal: texts of each way that equal those of `generate`.
        draft_s: seconds of a draft forward over 1 row, each the mean of k in a row.
        target_s, verify_s: seconds of a target forward over 1 and over k + 1 rows.
    """

    rates: dict[str, list[float]] = field(default_factory=dict)
    accepted: list[int] = field(default_factory=list)
    equal: dict[str, int] = field(default_factory=dict)
    draft_s: list[float] = field(default_factory=list)
    target_s: list[float] = field(default_factory=list)
    verify_s: list[float] = field(default_factory=list)

    def speedup(self, way: str, over: str) -> list[float]:
        """Round by round, so that what slows the machine down for a while cancels."""
        return [a / b for a, b in zip(self.rates[way], self.rates[over], strict=True)]

    @property
    def mean_emitted(self) -> float:
        return 1 + statistics.mean(self.accepted)

    def limit(self, k: int) -> float:
        t_draft, t_target = statistics.median(self.draft_s), statistics.median(self.target_s)
        return self.mean_emitted / (1 + k * t_draft / t_target)


def check_texts(contenders: Contenders, count: int) -> None:
    """Fail unless all ways write the same.

    Raises:
        SystemExit: naming the way, the prompt and the first token that differs.
    """
    for prompt in PROMPTS[:CHECKED_PROMPTS]:
        ids = contenders.prompt(prompt)
        texts = {name: way(ids, count).tokens for name, way in contenders.ways.items()}
        wanted = texts["generate"]
        for name, tokens in texts.items():
            if tokens != wanted:
                pairs = enumerate(zip(tokens, wanted, strict=False))
                at = next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(wanted)))
                raise SystemExit(
                    f"{name} differs from generate in float32 at token {at} of {prompt!r}:\n"
                    f"  {tokens[at : at + 8]}\n  {wanted[at : at + 8]}"
                )


def measure(contenders: Contenders, rounds: int, count: int) -> Measurements:
    for way in contenders.ways.values():
        way(contenders.prompt(PROMPTS[-1]), WARM_UP_TOKENS)
    seen = Measurements()
    for index in range(rounds):
        prompt = contenders.prompt(PROMPTS[index % len(PROMPTS)])
        texts = {name: way(prompt, count) for name, way in contenders.ways.items()}
        for name, text in texts.items():
            seen.rates.setdefault(name, []).append(len(text.tokens) / text.seconds)
            equal = text.tokens == texts["generate"].tokens
            seen.equal[name] = seen.equal.get(name, 0) + equal
            seen.accepted += text.accepted
        context = [*prompt, *texts["generate"].tokens[: count // 2]]
        measure_forwards(contenders, context, seen)
    return seen


def measure_forwards(contenders: Contenders, context: Sequence[int], seen: Measurements) -> None:
    """Forwards in the order that rounds have them, k of the draft and then one of the target: a
    target forward leaves nothing of the draft in the processor's caches, so the first is dearer."""
    draft = CachedForward(contenders.draft, context)
    target = CachedForward(contenders.target, context)
    for _ in range(FORWARDS_PER_ROUND):
        seen.draft_s.append(statistics.mean(draft(1) for _ in range(contenders.k)))
        seen.verify_s.append(target(contenders.k + 1))
        seen.target_s.append(target(1))


class CachedForward:
    """A stock model with a context in its cache."""

    @torch.inference_mode()
    def __init__(self, model: PreTrainedModel, context: Sequence[int]) -> None:
        self._model = model
        self._cache = DynamicCache(config=model.config)
        self._context = torch.tensor([context], device=model.device)
        model(self._context, past_key_values=self._cache)

    @torch.inference_mode()
    def __call__(self, rows: int) -> float:
        """Seconds of a forward over `rows` more tokens, which are then forgotten."""
        started = time.perf_counter()
        logits = self._model(self._context[:, -rows:], past_key_values=self._cache).logits
        logits.argmax(-1).tolist()  # waits for the device
        seconds = time.perf_counter() - started
        self._cache.crop(-rows)
        return seconds


def _stock(source: str, dtype: str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).eval()
    model.generation_config = copy.deepcopy(model.generation_config)
    model.generation_config.do_sample = False
    model.generation_config.eos_token_id = None  # every text has the length asked for
    return model


def report(seen: Measurements, k: int) -> str:
    rows = []
    for name, rates in seen.rates.items():
        over = [spread(seen.speedup(name, other), 2) for other in ("generate", "assisted")]
        rows.append([name, spread(rates), *over, f"{seen.equal[name]} of {len(rates)}"])
    speedup = statistics.median(seen.speedup("specdec_ray", "generate"))
    limit = seen.limit(k)
    times = {"draft": seen.draft_s, "target": seen.target_s, f"target, {k + 1} rows": seen.verify_s}
    forwards = [[name, spread([1e3 * s for s in seconds], 2)] for name, seconds in times.items()]
    return "\n\n".join(
        (
            table(
                ["", "tokens/s", "over generate", "over assisted", "same text as generate"], rows
            ),
            table(["one forward", "ms"], forwards),
            f"mean emitted per round      {seen.mean_emitted:.2f} of {k + 1}\n"
            f"limit over generate         {limit:.2f}\n"
            f"specdec_ray over generate   {speedup:.2f}, {speedup / limit:.0%} of the limit",
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "--pair",
        type=Path,
        help="folder with target/ and draft/; default: the one that pair.py makes",
    )
    parser.add_argument(
        "--target", help="folder or Hugging Face id, with --draft in place of --pair"
    )
    parser.add_argument("--draft")
    parser.add_argument("--k", type=int, default=5, help="drafted tokens per round")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per text")
    parser.add_argument("--rounds", type=int, default=7, help="texts of each way")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="bfloat16",
        help="of the timed models: in bfloat16 6 rows cost a CPU little more than 1 does, in "
        "float32 nearly twice as much",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements here too")
    options = parser.parse_args()
    if (options.target is None) != (options.draft is None):
        parser.error("--target and --draft belong together")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    target, draft = _pair(options)
    print(machine(options.threads), f"{options.dtype}, k = {options.k}", sep="\n", flush=True)

    with Contenders(target, draft, "float32", options.k, options.threads) as contenders:
        check_texts(contenders, min(options.tokens, CHECKED_TOKENS))
    print("float32: all three write the same texts\n", flush=True)
    with Contenders(target, draft, options.dtype, options.k, options.threads) as contenders:
        seen = measure(contenders, options.rounds, options.tokens)
    print(report(seen, options.k))
    if options.json is not None:
        settings = {name: str(value) for name, value in vars(options).items()}
        options.json.write_text(json.dumps({"settings": settings, **asdict(seen)}, indent=1))


def _pair(options: argparse.Namespace) -> tuple[str, str]:
    if options.target is not None:
        return options.target, options.draft
    if options.pair is not None:
        return str(options.pair / "target"), str(options.pair / "draft")
    pair = make_pair()
    return str(pair.target), str(pair.draft)


if __name__ == "__main__":
    main()
