"""fp32 as it is written: without TF32, which rounds what a product or convolution reads to 11 bits.

Where that is allowed (torch allows it for convolutions), a reference in fp32 is little better than
fp16.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Undo = Callable[[], None]


class _FullPrecision:
    """Torch has one setting for the process: the first to come switches, the last switches back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._undo: list[Undo] = []

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._undo = [_switch_off(torch.backends.cuda.matmul), _switch_off_cudnn()]
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0:
                    for undo in self._undo:
                        undo()


def _switch_off_cudnn() -> Undo:
    cudnn = torch.backends.cudnn
    return _switch_off(cudnn, getattr(cudnn, "conv", cudnn))


def _switch_off(owner: Any, newer: Any = None) -> Undo:
    """Through torch's older setting, which the newer one follows; where a host has used the newer
    one (torch 2.9 and later), the older can no longer be read."""
    try:
        return _set(owner, "allow_tf32", False)
    except RuntimeError:
        return _set(newer or owner, "fp32_precision", "ieee")


def _set(owner: Any, name: str, value: object) -> Undo:
    before = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before)


full_precision = _FullPrecision()


@contextmanager
def reference_math(device: torch.device) -> Iterator[None]:
    """For a reference on ``device``: fp32 in full, without a host's autocast and gradients."""
    with torch.autocast(device.type, enabled=False), full_precision(), torch.no_grad():
        yield
