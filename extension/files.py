"""Files that are whole or absent: atomic writes, free space, folders, checksums."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from .errors import OutputError


def atomic_write(path: Path, data: bytes | memoryview) -> None:
    """Write ``data`` to a temporary name in the same folder, flush it, and rename it.

    Raises:
        OutputError: the folder cannot be written or the disk is full; nothing is left behind.
    """
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(
            prefix=f".{path.name}.", suffix=".tmp", dir=path.parent
        )
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise OutputError(f"'{path}' cannot be written: {error.strerror or error}.") from error
