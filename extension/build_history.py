"""How long builds took on this machine, so that progress can tell the time left."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .side_table import SideTable

FILE_NAME = "build-history.json"
KEPT = 5
# Seconds, measured on 2 CPU cores without a GPU, per backend and weights mode: a constant, and
# what each node of the graph adds.
DEFAULTS = {
    ("tensorrt_rtx", "shared"): (2.0, 0.004),
    ("tensorrt_rtx", "baked"): (4.0, 0.009),
    ("tensorrt", "shared"): (60.0, 0.04),
    ("tensorrt", "baked"): (60.0, 0.04),
    ("onnxruntime", "shared"): (0.5, 0.001),
    ("onnxruntime", "baked"): (1.0, 0.002),
}


def job_class(backend: str, weights: str, parameters: int, capabilities: int) -> str:
    """Jobs of one class take about the same time."""
    return f"{backend} {weights} {parameters} {capabilities}"


class BuildHistory:
    """Past build times by job class, in one small file of the library folder."""

    def __init__(self, folder: Path) -> None:
        self._table = SideTable(folder / FILE_NAME, "seconds")

    def expect(self, backend: str, weights: str, parameters: int, capabilities: int) -> float:
        """Seconds a build will take: the median of the last ones, else a default."""
        past = self._read().get(job_class(backend, weights, parameters, capabilities), [])
        if past:
            return sorted(past)[len(past) // 2]
        constant, each = DEFAULTS.get((backend, weights), (30.0, 0.02))
        return constant + each * parameters * 3

    def record(
        self, backend: str, weights: str, parameters: int, capabilities: int, seconds: float
    ) -> None:
        """Remember a build; a failure to write is no error."""
        table = {key: list(values) for key, values in self._read().items()}
        name = job_class(backend, weights, parameters, capabilities)
        table[name] = [*table.get(name, []), round(seconds, 2)][-KEPT:]
        self._table.write(table)

    def _read(self) -> Mapping[str, list[float]]:
        return {
            name: [float(v) for v in values if isinstance(v, int | float) and 0 < v < 1e6]
            for name, values in self._table.read().items()
            if isinstance(values, list)
        }
