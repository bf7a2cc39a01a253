"""Engines that are wanted: which one comes next, and which nobody asks for any more."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from .progress import CancelToken

Job = TypeVar("Job")

FORGOTTEN_SECONDS = 3600.0


@dataclass
class Wish(Generic[Job]):
    """An engine that is wanted.

    Attributes:
        asked: by a person, not by a call: it comes first and is never forgotten.
    """

    stem: str
    job: Job
    asked: bool
    cancel: CancelToken = field(default_factory=CancelToken)


class Wishes(Generic[Job]):
    """What is being made ready, and what waits, by stem. Thread-safe.

    What a person asked for comes first, in order; then what most calls have missed. A wish that
    no call has repeated for ``FORGOTTEN_SECONDS`` is dropped.

    Attributes:
        changed: notified whenever a wish ends; hold it to decide on several facts together.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self._waiting: dict[str, Wish[Job]] = {}
        self._current: Wish[Job] | None = None
        self._calls: Counter[str] = Counter()
        self._seen: dict[str, float] = {}

    def miss(self, stem: str) -> int:
        """A call has missed this engine; returns how many have."""
        with self.changed:
            self._calls[stem] += 1
            self._seen[stem] = time.monotonic()
            return self._calls[stem]

    def add(self, stem: str, job: Job, *, asked: bool) -> None:
        """Want an engine; once more is no other wish, but a person's comes before the calls'."""
        with self.changed:
            if stem in self:
                wish = self._waiting.get(stem)
                if wish is not None:
                    wish.asked |= asked
                return
            self._seen[stem] = time.monotonic()
            self._waiting[stem] = Wish(stem, job, asked)

    def take(self) -> Wish[Job] | None:
        """The wish to fulfil now, kept until ``done``; None where nothing is wanted."""
        with self.changed:
            self._forget()
            if self._waiting:
                stem = min(self._waiting, key=self._rank)
                self._current = self._waiting.pop(stem)
            return self._current

    def done(self) -> None:
        """The wish that was taken is fulfilled, or never will be."""
        with self.changed:
            self._current = None
            self.changed.notify_all()

    def cancel(self) -> list[str]:
        """Cancel what is being made ready and drop what waits; returns what was dropped."""
        with self.changed:
            if self._current is not None:
                self._current.cancel.cancel()
            dropped = list(self._waiting)
            self._waiting.clear()
            self.changed.notify_all()
            return dropped

    def wait(self, timeout: float | None) -> bool:
        """Wait until nothing is wanted; False if ``timeout`` seconds were not enough."""
        with self.changed:
            return self.changed.wait_for(lambda: not self.stems, timeout)

    @property
    def stems(self) -> list[str]:
        """What is being made ready (first), and what waits, in order."""
        with self.changed:
            waiting = sorted(self._waiting, key=self._rank)
            return [self._current.stem, *waiting] if self._current else waiting

    def __contains__(self, stem: str) -> bool:
        with self.changed:
            current = self._current is not None and self._current.stem == stem
            return current or stem in self._waiting

    def _rank(self, stem: str) -> tuple[bool, int]:
        asked = self._waiting[stem].asked
        return (not asked, 0 if asked else -self._calls[stem])

    def _forget(self) -> None:
        oldest = time.monotonic() - FORGOTTEN_SECONDS
        for stem, wish in list(self._waiting.items()):
            if not wish.asked and self._seen[stem] < oldest:
                del self._waiting[stem]
                self._calls.pop(stem, None)
                self.changed.notify_all()
