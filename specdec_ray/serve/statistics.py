"""Speculation statistics of a request, in the shape that vLLM defined and AIPerf reads."""

from typing import Any

from specdec_ray.rounds.request import SpeculationStats


def speculation_metrics(stats: SpeculationStats) -> dict[str, Any]:
    """The `metrics.speculative_decoding` object; only rounds that proposed count as steps."""
    steps = len(stats.per_round_accepted)
    accepted, drafted = sum(stats.per_round_accepted), sum(stats.per_round_proposed)
    histogram = [0] * (stats.max_draft_tokens + 1)
    for count in stats.per_round_accepted:
        histogram[count] += 1
    return {
        "num_spec_tokens": stats.max_draft_tokens,
        "num_spec_steps": steps,
        "num_draft_tokens": drafted,
        "num_accepted_draft_tokens": accepted,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "mean_acceptance_length": 1 + (accepted / steps if steps else 0.0),
        "acceptance_histogram": histogram,
    }
