"""How fast an engine is beside the host, as measured on this machine and kept with the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

from .contest import HOST, kind_of_engine
from .key import EngineKey
from .library import Library
from .machine import machine_of
from .pool import EnginePool


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Milliseconds of the same work (a UNet call, or a sampling step) by host and by engine."""

    host_ms: float
    engine_ms: float

    @property
    def ratio(self) -> float:
        """How many times as fast as the host the engine is."""
        return self.host_ms / max(self.engine_ms, 1e-9)


def record(library: Library, stem: str, device: str, speed: Speed) -> None:
    """Keep a measurement in the engine's state; the last one of a GPU counts."""
    gpu = machine_of(device).gpu
    kept = [item for item in _items(library.read_state(stem)) if item.get("gpu") != gpu]
    when = datetime.now(timezone.utc).isoformat(timespec="seconds")
    library.update_state(stem, speed=[*kept, {"gpu": gpu, **asdict(speed), "when": when}])


def recorded(state: Mapping[str, Any], gpu: str) -> Speed | None:
    """The measurement of ``gpu`` in an engine's state, if there is one."""
    for item in reversed(_items(state)):
        numbers = [item.get("host_ms"), item.get("engine_ms")]
        if item.get("gpu") == gpu and all(isinstance(n, int | float) and n > 0 for n in numbers):
            return Speed(host_ms=float(numbers[0]), engine_ms=float(numbers[1]))
    return None


def in_service(pool: EnginePool, key: EngineKey, device: str) -> Speed | None:
    """As pictures were made in this process; None where host or engine made too few."""
    kind = kind_of_engine(key, device)
    host, engine = (pool.pace.milliseconds(kind, server) for server in (HOST, key.weights))
    if host is None or engine is None:
        return None
    return Speed(host_ms=host, engine_ms=engine)


def _items(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    items = state.get("speed")
    return [i for i in items if isinstance(i, dict)] if isinstance(items, list) else []
