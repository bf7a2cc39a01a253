"""How long a step of a sampler takes, by who serves its UNet call; measured as pictures are made.

A step lasts from one UNet call to the next of the same kind, on the GPU's own clock and without
waiting for it: what the host launches slowly counts, what it only queues does not. Nothing counts
while an engine is made beside it, which slows whoever serves.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

TIMED = ("cuda",)
LEAST = 5  # steps: their median survives a first call, a new LoRA, and the gap between two jobs
WINDOW = 9
LATER = 64  # steps whose end the GPU has not reached


class Pace:
    """Milliseconds a step, by kind of call and server (``host`` or a weights mode). Thread-safe.

    Only devices in ``TIMED`` are measured: on a CPU engines are for tests.

    Attributes:
        trials: kinds of calls whose host is being timed again.
        calls: how many there were on devices that are measured, by kind.
    """

    def __init__(self) -> None:
        self.trials: set[Hashable] = set()
        self.calls: Counter[Hashable] = Counter()
        self._disturbed = 0
        self._last: tuple[Hashable, str, Any] | None = None
        self._open: deque[tuple[Hashable, str, Any, Any]] = deque(maxlen=LATER)
        self._steps: dict[tuple[Hashable, str], deque[float]] = {}
        self._best: dict[tuple[Hashable, str], float] = {}
        self._lock = threading.Lock()

    def step(self, kind: Hashable, server: str, device: torch.device) -> None:
        """A call of this kind is about to be served by ``server``."""
        if not measured(device):
            return
        self.calls[kind] += 1
        if self._disturbed:
            return
        now = mark(device)
        with self._lock:
            if self._last is not None and self._last[0] == kind:
                self._open.append((*self._last, now))
            self._last = (kind, server, now)
            self._settle()

    def rest(self) -> None:
        """What follows is not to be measured."""
        self._last = None

    @property
    def is_disturbed(self) -> bool:
        """Whether an engine is being made."""
        return self._disturbed > 0

    @contextmanager
    def disturbed(self) -> Iterator[None]:
        """Steps are not measured meanwhile."""
        with self._lock:
            self._disturbed += 1
        try:
            yield
        finally:
            with self._lock:
                self._disturbed -= 1
                self._last = None

    def milliseconds(self, kind: Hashable, server: str) -> float | None:
        """The median of the last steps; None while they are too few."""
        steps = list(self._steps.get((kind, server), ()))
        return median(steps) if len(steps) >= LEAST else None

    def best(self, kind: Hashable, server: str) -> float | None:
        """The least median so far, since it was last forgotten."""
        return self._best.get((kind, server))

    def forget(self, kind: Hashable, server: str) -> None:
        """Measure from scratch."""
        self._steps.pop((kind, server), None)
        self._best.pop((kind, server), None)

    def _settle(self) -> None:
        while self._open:
            kind, server, start, end = self._open[0]
            elapsed = between(start, end)
            if elapsed is None:
                return
            self._open.popleft()
            name = (kind, server)
            self._steps.setdefault(name, deque(maxlen=WINDOW)).append(elapsed)
            now = self.milliseconds(kind, server)
            if now is not None:
                self._best[name] = min(now, self._best.get(name, now))


def measured(device: torch.device | str) -> bool:
    """Whether steps on ``device`` are measured."""
    return torch.device(device).type in TIMED


def mark(device: torch.device) -> Any:
    """A moment on the device's clock."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def between(start: Any, end: Any) -> float | None:
    """Milliseconds; None where the device has not reached ``end`` yet."""
    return float(start.elapsed_time(end)) if end.query() else None
