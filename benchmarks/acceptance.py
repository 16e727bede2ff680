"""How many drafted tokens each acceptance rule takes, at several temperatures.

Every rule writes texts of the same prompts and seeds with one pair. The texts differ from rule to
rule, so the figures are means over all rounds, with the standard error of that mean over texts:

    acceptance rate  = accepted tokens / drafted tokens
    mean emitted     = 1 + accepted tokens / rounds

Time plays no part. At temperature 0 all rules are one. Rounds that the end of a text left with
fewer than k drafted tokens do not count.
"""

import argparse
import statistics
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from report import machine, table

from specdec_ray import SpeculativeDecoder
from specdec_ray.config import BUNDLED_DRAFT, BUNDLED_TARGET
from specdec_ray.decoder import Generation
from specdec_ray.rounds.request import SpeculationStats
from specdec_ray.speculation.proposal import Rule

PROMPTS = (
    "The json module",
    "To open a file for reading,",
    "A list is a sequence that",
    "class Counter(dict):",
    "Changed in version 3.8:",
    "The return value of this function",
    "import os",
    "If an exception is raised",
)
TEMPERATURES = (0.0, 0.7, 1.0)


@dataclass(frozen=True, slots=True)
class Cell:
    """One rule at one temperature.

    Attributes:
        k: drafted tokens per round.
        texts: accepted lengths of the rounds of each text.
    """

    k: int
    texts: tuple[tuple[int, ...], ...]

    @property
    def accepted(self) -> float:
        return sum(map(sum, self.texts)) / sum(map(len, self.texts))

    @property
    def rate(self) -> float:
        return self.accepted / self.k

    @property
    def emitted(self) -> float:
        return 1 + self.accepted

    @property
    def error(self) -> float:
        """Standard error of `emitted`: that of a ratio whose texts are independent."""
        off = [sum(text) - self.accepted * len(text) for text in self.texts]
        length = statistics.mean(map(len, self.texts))
        return float(statistics.stdev(off) / length / len(self.texts) ** 0.5)


Cells = dict[tuple[Rule, float], Cell]


def measure(
    decoder: SpeculativeDecoder, rule: Rule, temperature: float, seeds: int, tokens: int, k: int
) -> Cell:
    """A text of `tokens` tokens for each prompt and each of `seeds` seeds."""

    def write(seed: int) -> list[Generation]:
        return decoder.generate(
            PROMPTS,
            max_tokens=tokens,
            temperature=temperature,
            rule=rule,
            seed=seed,
            draft_tokens=k,
            ignore_eos=True,
        )

    with ThreadPoolExecutor(seeds) as threads:  # the engines batch what is in flight together
        written = list(threads.map(write, range(seeds)))
    return Cell(k, tuple(_full_rounds(text.stats, k) for texts in written for text in texts))


def _full_rounds(stats: SpeculationStats, k: int) -> tuple[int, ...]:
    rounds = zip(stats.per_round_accepted, stats.per_round_proposed, strict=True)
    return tuple(accepted for accepted, proposed in rounds if proposed == k)


def measure_all(decoder: SpeculativeDecoder, seeds: int, tokens: int, k: int) -> Cells:
    """Every rule at every temperature; at 0 once for all rules, as nothing is drawn there."""
    cells: Cells = {}
    for temperature in TEMPERATURES:
        for rule in Rule if temperature else [Rule.COUPLED]:
            runs = seeds if temperature else 1
            cells[rule, temperature] = measure(decoder, rule, temperature, runs, tokens, k)
        if not temperature:
            cells |= {(rule, temperature): cells[Rule.COUPLED, temperature] for rule in Rule}
    return cells


def report(cells: Cells) -> str:
    columns = [(f"T = {temperature:g}: rate", "mean emitted") for temperature in TEMPERATURES]
    header = ["", *(name for pair in columns for name in pair)]
    rows = []
    for rule in Rule:
        row = [rule if rule.lossless else f"{rule} (lossy)"]
        for temperature in TEMPERATURES:
            cell = cells[rule, temperature]
            row += [f"{cell.rate:.3f}", f"{cell.emitted:.2f} ± {cell.error:.2f}"]
        rows.append(row)
    changes = [
        _against_rejection(cells, rule, temperature)
        for rule in (Rule.COUPLED, Rule.BLOCK)
        for temperature in TEMPERATURES[1:]
    ]
    return "\n".join([table(header, rows), "", *changes])


def _against_rejection(cells: Cells, rule: Rule, temperature: float) -> str:
    cell, base = cells[rule, temperature], cells[Rule.REJECTION, temperature]
    change = cell.emitted / base.emitted - 1
    error = (cell.error**2 + base.error**2) ** 0.5 / base.emitted
    return (
        f"{rule} against rejection, T = {temperature:g}: "
        f"{change:+.1%} ± {error:.1%} tokens per round"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--target", default=BUNDLED_TARGET, help="Hugging Face id or folder")
    parser.add_argument("--draft", default=BUNDLED_DRAFT)
    parser.add_argument("--k", type=int, default=5, help="drafted tokens per round")
    parser.add_argument("--seeds", type=int, default=12, help="texts per prompt and rule")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per text")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    print(machine(options.threads), f"float32, k = {options.k}\n", sep="\n", flush=True)
    with SpeculativeDecoder.from_pretrained(
        options.target, options.draft, dtype="float32", threads=options.threads
    ) as decoder:
        print(report(measure_all(decoder, options.seeds, options.tokens, options.k)))


if __name__ == "__main__":
    main()
