"""The manifest beside each engine: written once, checked whole before anything is believed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .errors import LibraryError
from .key import HEX64, EngineKey

FORMAT = 1
MAX_BYTES = 1 << 20
MAX_ENGINE = 1 << 44


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Facts about an engine that never change.

    Attributes:
        engine_bytes, engine_sha256: of the engine file.
        created: UTC, ISO 8601.
        build_seconds: what the build took.
        activation_bytes: scratch memory of one call; 0 where unknown.
        label: for people.
        source: fingerprints and labels of checkpoint and LoRAs (baked only).
        model: prediction type, sigma settings, latent format (baked only).
    """

    key: EngineKey
    engine_bytes: int
    engine_sha256: str
    build_seconds: float
    activation_bytes: int
    label: str
    created: str = ""
    source: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        object.__setattr__(self, "created", self.created or now)

    def to_bytes(self) -> bytes:
        """The file's contents."""
        obj = {
            "format": FORMAT,
            "key": self.key.to_json(),
            "engine_bytes": self.engine_bytes,
            "engine_sha256": self.engine_sha256,
            "created": self.created,
            "build_seconds": round(self.build_seconds, 2),
            "activation_bytes": self.activation_bytes,
            "label": self.label,
            "source": dict(self.source),
            "model": dict(self.model),
        }
        return json.dumps(obj, indent=1, sort_keys=True).encode()


class UnknownFormatError(LibraryError):
    """A manifest of another version of Engine Room: outdated, never guessed at."""

    code = "unknown-format"


def read_manifest(path: Path) -> Manifest:
    """Read and check a manifest.

    Raises:
        UnknownFormatError: it has another format number.
        LibraryError: it is missing, damaged, or of wrong types.
    """
    obj = read_json(path)
    if not isinstance(obj, dict):
        raise LibraryError(f"'{path.name}' is no JSON object.")
    if obj.get("format") != FORMAT:
        raise UnknownFormatError(f"'{path.name}' has the format {obj.get('format')!r:.20}.")
    fields: dict[str, Any] = {
        name: obj.get(name) for name in Manifest.__dataclass_fields__ if name != "key"
    }
    valid = (
        _whole(fields["engine_bytes"], MAX_ENGINE)
        and _whole(fields["activation_bytes"], MAX_ENGINE)
        and isinstance(fields["engine_sha256"], str)
        and HEX64.fullmatch(fields["engine_sha256"])
        and isinstance(fields["build_seconds"], int | float)
        and isinstance(fields["label"], str)
        and isinstance(fields["created"], str)
        and isinstance(fields["source"], dict)
        and isinstance(fields["model"], dict)
    )
    if not valid:
        raise LibraryError(f"'{path.name}' is damaged: a field is missing or of the wrong type.")
    return Manifest(key=EngineKey.from_json(obj.get("key")), **fields)


def read_json(path: Path) -> Any:
    """Parse a small JSON file; raises LibraryError whatever is wrong with it."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise LibraryError(f"'{path.name}' cannot be read: {error.strerror or error}.") from error
    if len(data) > MAX_BYTES:
        raise LibraryError(f"'{path.name}' is larger than any manifest.")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise LibraryError(f"'{path.name}' is damaged: {str(error)[:80]}.") from error


def _whole(value: Any, most: int) -> bool:
    return type(value) is int and 0 <= value <= most
