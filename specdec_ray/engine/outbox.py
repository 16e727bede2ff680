"""Replies on their way out of an engine."""

import logging
from collections import defaultdict
from collections.abc import Callable

from specdec_ray.engine.messages import Reply

logger = logging.getLogger(__name__)

ReplySink = Callable[[list[Reply]], None]


class Outbox:
    """Replies of one step, delivered together: one call per sink."""

    def __init__(self) -> None:
        self._replies: defaultdict[ReplySink, list[Reply]] = defaultdict(list)

    def put(self, sink: ReplySink, reply: Reply) -> None:
        self._replies[sink].append(reply)

    def drain(self) -> dict[ReplySink, list[Reply]]:
        """Take the replies out, in order for each sink."""
        replies, self._replies = self._replies, defaultdict(list)
        return replies

    def flush(self) -> None:
        for sink, batch in self.drain().items():
            try:
                sink(batch)
            except Exception:  # whoever asked is gone; the other sessions are not
                logger.exception("%d replies could not be delivered", len(batch))
