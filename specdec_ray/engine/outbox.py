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

    def flush(self) -> None:
        replies, self._replies = self._replies, defaultdict(list)
        for sink, batch in replies.items():
            try:
                sink(batch)
            except Exception:  # whoever asked is gone; the other sessions are not
                logger.exception("%d replies could not be delivered", len(batch))
