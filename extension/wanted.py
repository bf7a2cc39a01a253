"""An engine that is wanted, and what happens to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .architecture import Architecture
from .binding import TORCH_DTYPES
from .errors import SettingError
from .library import Entry
from .progress import CancelToken, Progress, ProgressSink
from .router import Call
from .serving import Target
from .shapes import Shape


@dataclass(frozen=True, kw_only=True)
class Job:
    """An engine that is wanted: for this architecture and shape, where, in which precision.

    Attributes:
        fingerprint: of the weights baked into it; empty for a shared engine.
        make: bakes it where it is missing; else it must be there.
    """

    arch: Architecture
    shape: Shape
    target: Target
    fingerprint: str = ""
    make: Callable[[ProgressSink, CancelToken], Entry] | None = None


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened to a wanted engine, for whoever shows it."""

    stem: str
    label: str
    kind: str
    text: str = ""
    progress: Progress | None = None


def target_of(call: Call) -> Target:
    """Where and in which precision a call runs; raises EngineRoomError where no backend can."""
    if call.dtype not in TORCH_DTYPES:
        raise SettingError(f"The host computes in {call.dtype}, which no engine does.")
    return Target(device=call.device, dtype=call.dtype)
