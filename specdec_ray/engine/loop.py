"""The thread that runs one replica's engine: drain the inbox, take a step, deliver the replies."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

from specdec_ray.engine.messages import Load, Request
from specdec_ray.engine.outbox import Outbox, ReplySink
from specdec_ray.engine.sessions import SessionTable

logger = logging.getLogger(__name__)


class Steppable(Protocol):
    """A target or draft engine. All methods run on the engine's thread."""

    sessions: SessionTable

    def release(self, session_id: bytes) -> None:
        """End the session and free its KV; ignore unknown ones."""
        ...

    def accept(self, request: Request, sink: ReplySink, outbox: Outbox) -> None:
        """Take a request in; refusals are answered at once, the rest by later steps."""
        ...

    def step(self, outbox: Outbox) -> bool:
        """Run one packed forward over what is pending; False if nothing was."""
        ...

    def fail_pending(self, outbox: Outbox, error: Exception) -> None:
        """Refuse everything pending after a step raised, and drop those sessions' state."""
        ...


class EngineThread:
    """Runs a Steppable on its own thread, so that a step never blocks the event loop.

    Args:
        engine: built in the caller's thread, afterwards touched by this thread only.
        name: thread name, seen in logs and profilers.

    Attributes:
        busy_s: time spent in commands and steps since the start, seconds.
    """

    MAX_CONSECUTIVE_FAILURES = 3

    def __init__(self, engine: Steppable, name: str) -> None:
        self._engine = engine
        self._inbox: deque[Callable[[Outbox], None]] = deque()
        self._wake = threading.Condition()
        self._stopped = False
        self._failures = 0
        self._busy_since: float | None = None
        self.busy_s = 0.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def lease(self, session_id: bytes) -> None:
        self._post(lambda _: self._engine.sessions.lease(session_id))

    def release(self, session_id: bytes) -> None:
        self._post(lambda _: self._engine.release(session_id))

    def submit(self, request: Request, sink: ReplySink) -> None:
        """Queue a request. Every request but Close gets exactly one reply, through `sink`, which
        is called on the engine's thread with all replies it gets from one step."""
        self._post(lambda outbox: self._engine.accept(request, sink, outbox))

    @property
    def load(self) -> Load:
        return self._engine.sessions.load

    @property
    def session_count(self) -> int:
        return len(self._engine.sessions)

    def unhealthy_reason(self, stall_s: float) -> str | None:
        """Why this engine cannot serve, or None. A step longer than `stall_s` counts as hung."""
        if not self.is_alive():
            return "the engine thread has ended"
        if self._failures >= self.MAX_CONSECUTIVE_FAILURES:
            return f"the last {self._failures} steps failed"
        busy_since = self._busy_since
        if busy_since is not None and time.monotonic() - busy_since > stall_s:
            return f"a step has been running for more than {stall_s:g} s"
        return None

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """End the thread after the step that is running."""
        with self._wake:
            self._stopped = True
            self._wake.notify()
        self._thread.join()

    def _post(self, command: Callable[[Outbox], None]) -> None:
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    def _run(self) -> None:
        outbox = Outbox()
        worked = False
        with torch.inference_mode():
            while True:
                with self._wake:
                    while not (self._inbox or worked or self._stopped):
                        self._wake.wait()
                    stopped = self._stopped
                    commands = list(self._inbox)
                    self._inbox.clear()
                self._busy_since = time.monotonic()
                for command in commands:
                    command(outbox)
                if stopped:  # only once what was asked before is done: sessions are freed
                    return
                worked = self._step(outbox)
                outbox.flush()
                self.busy_s += time.monotonic() - self._busy_since
                self._busy_since = None

    def _step(self, outbox: Outbox) -> bool:
        try:
            worked = self._engine.step(outbox)
        except Exception as error:  # a fault in one step must not take the other sessions along
            logger.exception("engine step failed")
            self._failures += 1
            self._engine.fail_pending(outbox, error)
            return True
        if worked:
            self._failures = 0
        return worked
