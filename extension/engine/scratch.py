"""One block of scratch memory per device for all engines, whose calls take turns with it.

It is allocated by torch, so that a host's memory manager sees it, and is as large as the
largest engine needs. It moves when it grows: an engine asks for it at every call.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .turns import turns

_blocks: dict[torch.device, Scratch] = {}
_blocks_lock = threading.Lock()


class Scratch:
    """The block of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._lock = threading.RLock()
        self._needs: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._block: Tensor | None = None
        self._stream: torch.cuda.Stream | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated now."""
        return 0 if self._block is None else self._block.numel()

    def join(self, user: object, nbytes: int) -> None:
        """Promise ``user`` at least ``nbytes`` from now on, and allocate them.

        Raises:
            torch.cuda.OutOfMemoryError: they are not there; the promise is taken back.
        """
        with self._lock:
            self._needs[user] = nbytes
            try:
                self._grow()
            except torch.cuda.OutOfMemoryError:
                del self._needs[user]
                raise

    def leave(self, user: object) -> None:
        """End a promise; what only this user needed is freed."""
        with self._lock:
            self._needs.pop(user, None)
            if self.nbytes > max(self._needs.values(), default=0):
                self.free()

    def free(self) -> None:
        """Give the memory back; the next call allocates it again."""
        with self._lock:
            if self._block is not None and self.device.type == "cuda":
                with turns.work():
                    torch.cuda.synchronize(self.device)
            self._block = None

    @contextmanager
    def claimed(self) -> Iterator[Tensor]:
        """The block for launches on the current stream; others wait for their turn."""
        with self._lock:
            block = self._grow()
            self._wait_for_last()
            yield block

    def _grow(self) -> Tensor:
        needed = max(self._needs.values(), default=1) or 1
        if self._block is None or self.nbytes < needed:
            self.free()
            # Hosts switch inference mode on.
            with torch.inference_mode(False):
                self._block = torch.empty(needed, dtype=torch.uint8, device=self.device)
        return self._block

    def _wait_for_last(self) -> None:
        """Launches of another stream may still use the block."""
        if self.device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self.device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream


def scratch_of(device: torch.device) -> Scratch:
    """The block of ``device``."""
    with _blocks_lock:
        return _blocks.setdefault(device, Scratch(device))


def scratch_bytes() -> int:
    """Bytes of all blocks."""
    with _blocks_lock:
        return sum(block.nbytes for block in _blocks.values())


def free_scratch() -> None:
    """Give all blocks back; calls allocate them again."""
    with _blocks_lock:
        blocks = list(_blocks.values())
    for block in blocks:
        block.free()
