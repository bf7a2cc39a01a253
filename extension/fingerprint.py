"""Weights identified by content: SHA-256 over names, dtypes, shapes and bytes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from .errors import OutputError
from .files import atomic_write
from .log import logger

Buffer = bytes | bytearray | memoryview
CACHE_FORMAT = 1
CACHE_LIMIT = 4096


class Fingerprinter:
    """Collects tensors in any order; the digest does not depend on it."""

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}

    def add(self, name: str, dtype: str, shape: tuple[int, ...], data: Buffer) -> None:
        """Add a tensor: LDM name, dtype (``F16``), shape, and its bytes in C order."""
        content = hashlib.sha256(data).hexdigest()
        self._digests[name] = f"{name} {dtype} {list(shape)} {content}"

    def hexdigest(self) -> str:
        """The fingerprint of what was added, as hex."""
        text = "\n".join(self._digests[name] for name in sorted(self._digests))
        return hashlib.sha256(text.encode()).hexdigest()


class FingerprintCache:
    """Fingerprints of files by path, size and modification time; losing it only costs time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def get(self, file: Path) -> str | None:
        """The fingerprint of ``file`` as it is now, if it is known."""
        entry = self._read().get(str(file.resolve()))
        return entry[1] if entry and entry[0] == _stamp(file) else None

    def put(self, file: Path, fingerprint: str) -> None:
        """Remember a fingerprint; an unwritable cache is no error."""
        entries = self._read()
        entries.pop(str(file.resolve()), None)
        entries[str(file.resolve())] = (_stamp(file), fingerprint)
        newest = dict(list(entries.items())[-CACHE_LIMIT:])
        text = json.dumps({"format": CACHE_FORMAT, "files": newest})
        try:
            atomic_write(self.path, text.encode())
        except OutputError as error:
            logger.debug("The fingerprint cache was not written: %s", error)

    def _read(self) -> dict[str, tuple[str, str]]:
        try:
            table = json.loads(self.path.read_bytes())
            if table["format"] != CACHE_FORMAT:
                return {}
            return {
                name: (stamp, digest)
                for name, (stamp, digest) in table["files"].items()
                if isinstance(stamp, str) and isinstance(digest, str)
            }
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
            return {}


def _stamp(file: Path) -> str:
    facts = file.stat()
    return f"{facts.st_size}-{facts.st_mtime_ns}"
