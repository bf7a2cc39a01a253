"""Kernels that a GPU's driver compiled for engines, kept between starts of a program.

One file per GPU model and backend version; its first 32 bytes are the SHA-256 of the rest, so that
a damaged file never reaches the native parser.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from .errors import EngineRoomError
from .files import atomic_write, lock
from .log import logger

DIGEST = 32
MAX_BYTES = 1 << 31
WAIT_SECONDS = 10.0


class KernelCache:
    """The cache of one GPU model for one backend version, in a library's folder."""

    def __init__(self, folder: Path, gpu: str, version: str) -> None:
        name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{gpu}-{version}").strip("-")[:80]
        self.path = folder / f"kernels-{name}.cache"

    def read(self) -> bytes:
        """The cached kernels; empty where there are none or the file is damaged."""
        try:
            if self.path.stat().st_size > MAX_BYTES:
                return b""
            data = self.path.read_bytes()
        except OSError:
            return b""
        digest, body = data[:DIGEST], data[DIGEST:]
        return body if hashlib.sha256(body).digest() == digest else b""

    def write(self, body: bytes, *, instead: bytes = b"") -> None:
        """Keep ``body`` unless it is shorter than what another program has kept meanwhile.

        Args:
            instead: what the backend refused, if that is why there is a new body.

        A failure to write is logged: it costs time at the next start, no more.
        """
        if not body:
            return
        try:
            with lock(self.path.with_suffix(".lock"), wait=WAIT_SECONDS):
                kept = self.read()
                if len(body) > len(kept) or (instead and kept == instead):
                    atomic_write(self.path, hashlib.sha256(body).digest() + body)
        except EngineRoomError as error:
            logger.debug("The kernel cache was not saved: %s", error)
