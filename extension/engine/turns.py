"""Who may work on a GPU: CUDA graphs are captured only while nothing else of ours is at work there.

A capture forbids every thread of the process to wait for the whole device, and such a wait ends
the capture (CUDA C++ Programming Guide, "Prohibited and Unhandled Operations" of stream capture).
Hosts wait for the device between their own calls, so graphs are captured in the host's calling
thread alone; and loading, verifying and closing engines in other threads takes turns with that.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """Work of any number of threads, or one capture."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._workers = 0
        self._capturing: int | None = None

    @contextmanager
    def work(self) -> Iterator[None]:
        """Whatever may wait for the device; waits for a capture to end. May be nested."""
        with self._changed:
            self._changed.wait_for(lambda: self._capturing in (None, threading.get_ident()))
            self._workers += 1
        try:
            yield
        finally:
            with self._changed:
                self._workers -= 1

    @contextmanager
    def capture(self) -> Iterator[bool]:
        """A capture, which never waits: False where it has to be put off."""
        with self._changed:
            free = not self._workers and self._capturing is None
            if free:
                self._capturing = threading.get_ident()
        try:
            yield free
        finally:
            if free:
                with self._changed:
                    self._capturing = None
                    self._changed.notify_all()


turns = Turns()
