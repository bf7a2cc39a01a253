"""Engines that cannot be made on this machine, remembered until something changes."""

from __future__ import annotations

from pathlib import Path

from . import __version__
from .engine_state import Machine
from .errors import BuildError, EngineError, EngineRoomError, ParityError, WorkerError
from .side_table import SideTable

FILE_NAME = "failures.json"
KEPT = 100


class FailureRecord:
    """Why engines failed, by stem, in one small file of the library folder.

    A stem names the backend's version; a failure also ends with this extension's version, the GPU
    or its driver.
    """

    def __init__(self, folder: Path) -> None:
        self._table = SideTable(folder / FILE_NAME, "failures")

    def recall(self, stem: str, machine: Machine) -> str:
        """Why the engine failed before; empty where it did not, or where it may work now."""
        found = self._table.read().get(stem)
        if not isinstance(found, dict) or found.get("machine") != _facts(machine):
            return ""
        text = found.get("text")
        return text if isinstance(text, str) else ""

    def keep(self, stem: str, text: str, machine: Machine) -> None:
        """Remember a failure."""
        others = {name: found for name, found in self._table.read().items() if name != stem}
        newest = dict(list(others.items())[1 - KEPT :])
        self._table.write({**newest, stem: {"text": text, "machine": _facts(machine)}})

    def forget(self, stem: str) -> None:
        """The engine works after all, or is to be tried again."""
        table = self._table.read()
        if table.pop(stem, None) is not None:
            self._table.write(table)


def lasts(error: EngineRoomError) -> bool:
    """Whether the engine would fail in the same way again: a worker may have died of anything."""
    lasting = isinstance(error, BuildError | EngineError | ParityError)
    return lasting and not isinstance(error, WorkerError)


def _facts(machine: Machine) -> dict[str, str]:
    return {"gpu": machine.gpu, "driver": machine.driver, "extension": __version__}
