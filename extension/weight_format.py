"""The layout in which an engine reads 3x3 convolution weights: as they are, or copied to HWC8."""

from __future__ import annotations

from .architecture import Architecture
from .key import EngineKey
from .memory import HEADROOM, free_bytes, hwc8_bytes
from .pool import EnginePool


class FormatChoice:
    """Decided once for each engine: free memory changes from call to call."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self._chosen: dict[EngineKey, EngineKey] = {}

    def choose(
        self, copied: EngineKey, bound: EngineKey, arch: Architecture, device: str
    ) -> EngineKey:
        """``copied``, an engine that reads copies, where memory allows; else ``bound``."""
        if copied.stem in self._pool.lacking:
            return bound
        if copied not in self._chosen:
            self._chosen[copied] = self._fitting(copied, bound, arch, device)
        return self._chosen[copied]

    def _fitting(
        self, copied: EngineKey, bound: EngineKey, arch: Architecture, device: str
    ) -> EngineKey:
        for key in (copied, bound):
            if self._pool.holds(key.stem):
                return key
        return copied if free_bytes(device) > HEADROOM * hwc8_bytes(arch) else bound

    def forget(self) -> None:
        """Decide anew."""
        self._chosen.clear()
