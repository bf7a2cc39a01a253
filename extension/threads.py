"""Background threads that end before the interpreter does.

At exit Python ends daemon threads wherever they are; inside native code (torch, an engine) that
aborts the process. So each is told to stop, and waited for, before.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from typing import Any

EXIT_SECONDS = 20.0

_running: dict[threading.Thread, Callable[[], None]] = {}


def start(
    work: Callable[..., None], *args: Any, name: str, stop: Callable[[], None]
) -> threading.Thread:
    """Run ``work`` in a daemon thread; at exit ``stop`` is called, and the thread waited for."""

    def run() -> None:
        try:
            work(*args)
        finally:
            _running.pop(threading.current_thread(), None)

    thread = threading.Thread(target=run, name=f"engine-room-{name}", daemon=True)
    _running[thread] = stop
    thread.start()
    return thread


@atexit.register
def _end_all() -> None:
    running = dict(_running)
    for stop in running.values():
        stop()
    deadline = time.monotonic() + EXIT_SECONDS
    for thread in running:
        thread.join(max(deadline - time.monotonic(), 0.0))
