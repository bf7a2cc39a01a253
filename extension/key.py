"""What identifies an engine: everything that its bytes depend on, and nothing else."""

from __future__ import annotations

import hashlib
import json
import platform as machine
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .engine.interface import CONV_FORMATS, DTYPES, WEIGHTS_MODES, check_choice
from .errors import EngineRoomError, LibraryError
from .shapes import Shape
from .unet import EMITTER_VERSION

STEM_LENGTH = 16
STEM = re.compile(r"[0-9a-f]{16}")
HEX64 = re.compile(r"[0-9a-f]{64}")
WORD = re.compile(r"[A-Za-z0-9._+-]{1,64}")


def host_platform() -> str:
    """Operating system and processor, such as ``linux-x86_64``."""
    return f"{sys.platform}-{machine.machine().lower()}"


@dataclass(frozen=True, kw_only=True)
class EngineKey:
    """Identity of an engine.

    Attributes:
        architecture: id of the architecture, normalised for the shape.
        shape: of the call it serves.
        io_dtype: of inputs and outputs; ``compute`` is the precision inside.
        weights: ``shared`` or ``baked``.
        conv3x3_format: memory format of 3x3 convolution weights, ``linear`` or ``hwc8``.
        fingerprint: of the baked weights; empty for a shared engine.
        backend, backend_version: what compiled it, with its full version.
        capabilities: compute capabilities it is for, or ``("cpu",)``.
        platform: operating system and processor.
        emitter: version of the graph emitter.
    """

    architecture: str
    shape: Shape
    io_dtype: str
    weights: str
    backend: str
    backend_version: str
    capabilities: tuple[str, ...]
    compute: str = ""
    conv3x3_format: str = "linear"
    fingerprint: str = ""
    platform: str = ""
    emitter: int = EMITTER_VERSION

    def __post_init__(self) -> None:
        object.__setattr__(self, "compute", self.compute or self.io_dtype)
        object.__setattr__(self, "platform", self.platform or host_platform())
        check_choice("weights mode", self.weights, WEIGHTS_MODES)
        check_choice("precision", self.io_dtype, DTYPES)
        check_choice("precision", self.compute, DTYPES)
        check_choice("weight format", self.conv3x3_format, CONV_FORMATS)
        words = (self.backend, self.backend_version, self.platform, *self.capabilities)
        valid = (
            HEX64.fullmatch(self.architecture)
            and all(isinstance(word, str) and WORD.fullmatch(word) for word in words)
            and 1 <= len(self.capabilities) <= 16
            and type(self.emitter) is int
            and bool(HEX64.fullmatch(self.fingerprint)) == (self.weights == "baked")
            and (self.weights == "shared" or self.fingerprint)
        )
        if not valid:
            raise LibraryError(f"The engine key contradicts itself: {asdict(self)!r:.300}")

    @property
    def stem(self) -> str:
        """The engine's file name without suffix: 16 hex digits."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:STEM_LENGTH]

    def to_json(self) -> dict[str, Any]:
        """The fields as a JSON object."""
        return {**asdict(self), "capabilities": list(self.capabilities)}

    @classmethod
    def from_json(cls, obj: Any) -> EngineKey:
        """Inverse of ``to_json``; raises LibraryError on anything else."""
        if not isinstance(obj, Mapping) or set(obj) != set(cls.__dataclass_fields__):
            raise LibraryError("The engine key lacks fields or has unknown ones.")
        fields = dict(obj)
        capabilities = fields["capabilities"]
        if not isinstance(capabilities, list):
            raise LibraryError("The engine key's capabilities are no list.")
        try:
            fields |= {
                "shape": Shape.from_json(fields["shape"]),
                "capabilities": tuple(capabilities),
            }
            return cls(**fields)
        except EngineRoomError as error:
            raise LibraryError(error.message) from error
        except (TypeError, ValueError) as error:
            raise LibraryError(f"The engine key has a field of the wrong type: {error}") from error


def check_stem(stem: str) -> str:
    """Return ``stem`` if it is one; raises LibraryError (so no path can be smuggled in)."""
    if not isinstance(stem, str) or not STEM.fullmatch(stem):
        raise LibraryError(
            f"{stem!r:.60} is no engine id.", hint="Ids are 16 hex digits; list them first."
        )
    return stem
