"""Prometheus metrics of one router replica, named as the field names them."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from specdec_ray.rounds.request import Emission, GenerationRequest

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)

disable_created_metrics()  # type: ignore[no-untyped-call]  # dashboards that match names by their beginning would sum timestamps


class RouterMetrics:
    """Counts what the rounds of all generations did. Acceptance rate is the rate of
    `specdec_num_accepted_tokens_total` over that of `specdec_num_draft_tokens_total`."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

        def counter(name: str, documentation: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"specdec_{name}", documentation, labels, registry=self._registry)

        def histogram(name: str, documentation: str) -> Histogram:
            return Histogram(
                f"specdec_{name}", documentation, buckets=SECONDS, registry=self._registry
            )

        self.running = Gauge(
            "specdec_generations_running", "Choices in flight.", registry=self._registry
        )
        self.refused = counter("generations_refused", "Choices refused because of load.")
        self._generations = counter(
            "generations", "Choices begun, by acceptance rule.", ("rule", "lossless")
        )
        self._tokens = counter("generation_tokens", "Tokens emitted.")
        self._drafts = counter("num_drafts", "Rounds that proposed something.")
        self._proposed = counter("num_draft_tokens", "Drafted tokens shown to a target.")
        self._accepted = counter("num_accepted_tokens", "Drafted tokens accepted.")
        self._accepted_at = counter(
            "num_accepted_tokens_per_pos", "Accepted, by position in the draft.", ("position",)
        )
        self._first_token_s = histogram("time_to_first_token_seconds", "Prefill and queue.")
        self._round_s = histogram("round_seconds", "A round, plain ones included.")

    def text(self) -> str:
        return generate_latest(self._registry).decode()

    async def observed(
        self, rounds: AsyncGenerator[Emission, None], request: GenerationRequest
    ) -> AsyncGenerator[Emission, None]:
        """The same emissions, counted."""
        rule = request.rule
        assert rule is not None, "the caller settles the rule"
        lossless = rule.lossless or request.params.greedy
        self._generations.labels(rule, str(lossless).lower()).inc()
        since, duration_s = time.monotonic(), self._first_token_s
        with self.running.track_inprogress():
            async with aclosing(rounds):
                async for emission in rounds:
                    duration_s.observe(time.monotonic() - since)
                    self._count(emission)
                    yield emission
                    since, duration_s = time.monotonic(), self._round_s

    def _count(self, emission: Emission) -> None:
        self._tokens.inc(len(emission.tokens))
        if emission.proposed:
            self._drafts.inc()
            self._proposed.inc(emission.proposed)
            self._accepted.inc(emission.accepted)
            for position in range(emission.accepted):
                self._accepted_at.labels(position).inc()
