"""Engines that cannot be made on this machine, remembered until something changes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import __version__
from .errors import (
    BuildError,
    EngineError,
    EngineRoomError,
    LibraryError,
    OutputError,
    ParityError,
    WorkerError,
)
from .files import atomic_write
from .log import logger
from .manifest import read_json

if TYPE_CHECKING:
    from .library import Machine

FILE_NAME = "failures.json"
KEPT = 100


class FailureRecord:
    """Why engines failed, by stem, in one small file of the library folder.

    A stem names the backend's version; a failure also ends with this extension's version, the GPU
    or its driver. A file that is damaged or cannot be written is no error: engines are tried again.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME

    def recall(self, stem: str, machine: Machine) -> str:
        """Why the engine failed before; empty where it did not, or where it may work now."""
        found = self._read().get(stem)
        if not isinstance(found, dict) or found.get("machine") != _facts(machine):
            return ""
        text = found.get("text")
        return text if isinstance(text, str) else ""

    def keep(self, stem: str, text: str, machine: Machine) -> None:
        """Remember a failure."""
        others = {name: found for name, found in self._read().items() if name != stem}
        newest = dict(list(others.items())[1 - KEPT :])
        self._write({**newest, stem: {"text": text, "machine": _facts(machine)}})

    def forget(self, stem: str) -> None:
        """The engine works after all, or is to be tried again."""
        table = dict(self._read())
        if table.pop(stem, None) is not None:
            self._write(table)

    def _read(self) -> Mapping[str, Any]:
        try:
            table = read_json(self.path)
        except LibraryError:
            return {}
        failures = table.get("failures") if isinstance(table, dict) else None
        return failures if isinstance(failures, dict) else {}

    def _write(self, table: Mapping[str, Any]) -> None:
        try:
            atomic_write(self.path, json.dumps({"format": 1, "failures": table}, indent=1).encode())
        except OutputError as error:
            logger.debug("The failures were not saved: %s", error)


def lasts(error: EngineRoomError) -> bool:
    """Whether the engine would fail in the same way again: a worker may have died of anything."""
    lasting = isinstance(error, BuildError | EngineError | ParityError)
    return lasting and not isinstance(error, WorkerError)


def _facts(machine: Machine) -> dict[str, str]:
    return {"gpu": machine.gpu, "driver": machine.driver, "extension": __version__}
