"""Progress as one fraction that never falls, with time left; and a token to cancel."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .errors import CancelledError

ALMOST = 0.99


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A moment of a job.

    Attributes:
        fraction: from 0 to 1; 1 only when the job has succeeded.
        phase: in words.
        detail: more words, or empty.
        elapsed: seconds since the start.
        remaining: seconds left by the model of past jobs; None where it cannot say.
    """

    fraction: float
    phase: str
    detail: str = ""
    elapsed: float = 0.0
    remaining: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields as a JSON object."""
        return asdict(self)


ProgressSink = Callable[[Progress], None]


class CancelToken:
    """Set from any thread; looked at by the job.

    Args:
        asked: a host's own request to stop, which is looked at as well.
    """

    def __init__(self, asked: Callable[[], bool] = lambda: False) -> None:
        self._event = threading.Event()
        self._asked = asked

    def cancel(self) -> None:
        """Ask the job to stop."""
        self._event.set()

    @property
    def cancelled(self) -> bool:
        """Whether the job was asked to stop; once it was, it stays so."""
        if not self._event.is_set() and self._asked():
            self._event.set()
        return self._event.is_set()

    def raise_if_cancelled(self) -> None:
        """Raise CancelledError if the job was asked to stop."""
        if self.cancelled:
            raise CancelledError("Cancelled.")


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A part of a job and the seconds it is expected to take."""

    name: str
    seconds: float


class Timeline:
    """Turns named phases of expected length into a steady fraction.

    A builder's own steps cannot carry progress: nearly all come in the first moments, then one
    phase is silent for most of the time. So time is measured against what past jobs took: within
    a phase the fraction grows in proportion up to 80 % of its share, then ever more slowly, so
    that an overrun neither stops nor passes the phase's end.
    """

    def __init__(
        self, phases: Sequence[Phase], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._phases = list(phases)
        self._clock = clock
        self._start = self._entered = clock()
        self._index = 0
        self._detail = ""
        self._shown = 0.0

    def enter(self, name: str, detail: str = "") -> None:
        """A phase has begun; unknown names and earlier phases change the words only."""
        self._detail = detail
        for index, phase in enumerate(self._phases):
            if phase.name == name and index > self._index:
                self._index, self._entered = index, self._clock()
                return
            if phase.name == name:
                return
        self._detail = detail or name

    def now(self) -> Progress:
        """Where the job stands."""
        total = sum(phase.seconds for phase in self._phases) or 1.0
        before = sum(phase.seconds for phase in self._phases[: self._index])
        phase = self._phases[self._index]
        spent = max(0.0, self._clock() - self._entered)
        inside = _approach(spent / max(phase.seconds, 1e-6))
        fraction = min(ALMOST, (before + inside * phase.seconds) / total)
        self._shown = max(self._shown, fraction)
        after = sum(later.seconds for later in self._phases[self._index + 1 :])
        left = max(phase.seconds - spent, phase.seconds * (1 - inside)) + after
        return Progress(
            fraction=self._shown,
            phase=phase.name,
            detail=self._detail,
            elapsed=self._clock() - self._start,
            remaining=left,
        )

    def done(self) -> Progress:
        """The last moment of a job that succeeded."""
        self._shown = 1.0
        elapsed = self._clock() - self._start
        return Progress(fraction=1.0, phase="done", elapsed=elapsed, remaining=0.0)


def _approach(ratio: float) -> float:
    """Share of a phase to show after ``ratio`` of its expected time: linear, then asymptotic."""
    if ratio <= 0.8:
        return ratio
    return 1.0 - 0.2 * math.exp(-(ratio - 0.8) / 0.2)
