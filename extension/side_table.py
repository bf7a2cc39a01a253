"""A small table in the library folder whose loss does no harm."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import LibraryError, OutputError
from .files import atomic_write
from .log import logger
from .manifest import read_json


class SideTable:
    """One JSON object under ``name`` in a file of ``"format": 1``.

    A file that is missing or damaged is an empty table; one that cannot be written is logged.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name

    def read(self) -> dict[str, Any]:
        """The table; what its values are is the reader's to check."""
        try:
            content = read_json(self.path)
        except LibraryError:
            return {}
        table = content.get(self.name) if isinstance(content, dict) else None
        return table if isinstance(table, dict) else {}

    def write(self, table: Mapping[str, Any]) -> None:
        """Put ``table`` in the place of the one that is there."""
        try:
            atomic_write(self.path, json.dumps({"format": 1, self.name: table}).encode())
        except OutputError as error:
            logger.debug("'%s' was not saved: %s", self.path.name, error)
