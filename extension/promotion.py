"""Weights that have served for long get an engine with them baked in: a little faster, not shared.

Off by default. On the H200 a baked engine is 5 % faster than a shared one with copies; it takes the
weights' size on disk and in GPU memory, and serves these weights alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping

from torch import Tensor

from .architecture import Architecture
from .baking import UNKNOWN, bake
from .contest import kind_of
from .errors import WeightsChangedError
from .library import Entry
from .memory import HEADROOM, free_bytes, parameter_bytes
from .progress import CancelToken, ProgressSink
from .router import Call
from .tiers import TierManager
from .wanted import Job, target_of


class Promotions:
    """Counts the calls that weights have served, and asks for engines; see ``TierSettings``."""

    def __init__(self, tiers: TierManager) -> None:
        self._tiers = tiers
        self._calls: Counter[Hashable] = Counter()

    def note(self, arch: Architecture, call: Call, weights: Mapping[str, Tensor]) -> None:
        """Engines have served ``call`` with these weights, whose fingerprint it names."""
        needed = self._tiers.settings.promote_after
        if not needed or not call.fingerprint:
            return
        name = (kind_of(call), call.fingerprint)
        self._calls[name] += 1
        if self._calls[name] % needed == 0 and self._fits(arch, call):
            self._tiers.promote(_job(self._tiers, arch, call, weights))

    def _fits(self, arch: Architecture, call: Call) -> bool:
        """Whether the engine has room on the device, beside what is there now."""
        return free_bytes(call.device) > HEADROOM * parameter_bytes(arch, call.dtype)


def _job(tiers: TierManager, arch: Architecture, call: Call, weights: Mapping[str, Tensor]) -> Job:
    target, fingerprint = target_of(call), str(call.fingerprint)

    def make(on_progress: ProgressSink, cancel: CancelToken) -> Entry:
        try:
            return bake(
                tiers.library,
                arch,
                weights,
                call.shape,
                target,
                label=f"weights {fingerprint[:8]}",
                source={"promoted": True},
                model={"prediction": UNKNOWN},
                expected=fingerprint,
                on_progress=on_progress,
                cancel=cancel,
            )
        except KeyError as error:
            raise WeightsChangedError("The model is gone.") from error

    return Job(arch=arch, shape=call.shape, target=target, fingerprint=fingerprint, make=make)
