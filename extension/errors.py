"""Every error that Engine Room raises on purpose.

The core raises these; only entry points (command line, nodes, tab) render them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar


class EngineRoomError(Exception):
    """Base of the tree.

    Attributes:
        message: one sentence that names the thing at fault and says what was expected.
        hint: what to do about it; may be empty.
        details: facts for a bug report, JSON-serialisable.
        code: stable name of the kind of error, as the worker's events carry it.
    """

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1

    def __init__(
        self, message: str, *, hint: str = "", details: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = dict(details or {})

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()

    def to_json(self) -> dict[str, Any]:
        """Return the error as a JSON object: code, message, hint, details."""
        return {
            "code": self.code,
            "message": self.message,
            "hint": self.hint,
            "details": self.details,
        }


class BadFileError(EngineRoomError):
    """A file is missing, truncated, of another format, or unsafe to read."""

    code = "bad-file"
    exit_code = 3


class UnsupportedModelError(EngineRoomError):
    """The weights are not an LDM UNet that Engine Room knows."""

    code = "unsupported-model"
    exit_code = 4


class LoraError(EngineRoomError):
    """A LoRA file cannot be applied."""

    code = "lora"
    exit_code = 5


class WrongBaseError(LoraError):
    """A LoRA was made for another base model."""

    code = "wrong-base"


class SettingError(EngineRoomError):
    """A setting, a size or an argument is out of range."""

    code = "setting"
    exit_code = 2


class MissingPackageError(EngineRoomError):
    """A Python package is needed and absent; the hint holds the exact command."""

    code = "missing-package"
    exit_code = 6

    @classmethod
    def of(cls, package: str, purpose: str, command: str = "") -> MissingPackageError:
        """Make the error for ``package``, needed for ``purpose``."""
        command = command or f"python -m pip install {package}"
        return cls(
            f"The Python package '{package}' is needed {purpose} and is not installed.",
            hint=f"Install it with: {command}",
            details={"package": package, "command": command},
        )


class UnsupportedMachineError(EngineRoomError):
    """No TensorRT runs on this machine: its GPU, driver, system or Python."""

    code = "unsupported-machine"
    exit_code = 12


class OutputError(EngineRoomError):
    """A file cannot be written: folder read-only, disk full, name taken."""

    code = "output"
    exit_code = 7


class BuildError(EngineRoomError):
    """The backend could not build the engine."""

    code = "build"
    exit_code = 8


class WorkerError(BuildError):
    """The worker process crashed, was killed, hung, or broke its protocol."""

    code = "worker"


class EngineError(EngineRoomError):
    """An engine cannot be loaded, bound or run; the host should serve instead."""

    code = "engine"
    exit_code = 9


class MemoryShortError(EngineError):
    """There is too little GPU memory for an engine, or for the copies of weights that it reads."""


class LibraryError(EngineRoomError):
    """An entry of the engine library is missing, damaged or in use."""

    code = "library"
    exit_code = 10


class ParityError(EngineRoomError):
    """An engine computes something else than the reference."""

    code = "parity"
    exit_code = 11


class WeightsChangedError(EngineRoomError):
    """A host has changed its weights while they were read."""

    code = "weights-changed"


class CancelledError(EngineRoomError):
    """The user cancelled; nothing is left behind."""

    code = "cancelled"
    exit_code = 130


def all_error_types() -> dict[str, type[EngineRoomError]]:
    """Return every concrete error type by its code (used to rebuild a worker's error)."""
    found: dict[str, type[EngineRoomError]] = {}
    queue: list[type[EngineRoomError]] = [EngineRoomError]
    while queue:
        kind = queue.pop()
        found[kind.code] = kind
        queue.extend(kind.__subclasses__())
    return found
