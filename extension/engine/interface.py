"""What every backend and every loaded engine provides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import SettingError

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS_MODES = ("shared", "baked")
CONV_FORMATS = ("linear", "hwc8")
DTYPES = ("fp16", "fp32", "bf16")

ProgressCallback = Callable[[float, str], None]


@dataclass(frozen=True, kw_only=True)
class BuildSpec:
    """How to compile a model.

    Attributes:
        weights: ``shared`` (inputs of the network) or ``baked`` (constants).
        capabilities: compute capabilities such as ``("8.9", "12.0")``, ``("current",)``, or
            ``("cpu",)``.
        conv_format: memory format of 3x3 convolution weights that are inputs.
        io_dtype: of every input and output but ``timesteps``, which is fp32.
        weight_inputs: names of the inputs that are weights (empty if baked).
    """

    weights: str
    capabilities: tuple[str, ...]
    conv_format: str = "linear"
    io_dtype: str = "fp16"
    weight_inputs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_choice("weights mode", self.weights, WEIGHTS_MODES)
        check_choice("precision", self.io_dtype, DTYPES)
        check_choice("weight format", self.conv_format, CONV_FORMATS)
        if self.conv_format == "hwc8" and self.io_dtype == "fp32":
            raise SettingError(
                "Convolution weights in HWC8 need a 16-bit precision.", hint="Use fp16 or linear."
            )


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise SettingError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise SettingError(f"The {name} {value!r} is unknown.", hint=f"Use one of {choices}.")


@dataclass(frozen=True, kw_only=True)
class BuildResult:
    """What a build found out: bytes of activations, and facts for the log."""

    activation_bytes: int
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """An input or output: dtype (``fp16`` ...), shape, and memory format of a weight input."""

    dtype: str
    shape: tuple[int, ...]
    format: str = "linear"


class Engine(Protocol):
    """A loaded engine. Not thread-safe: one call at a time."""

    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    weights: Mapping[str, TensorSpec]
    activation_bytes: int
    cache_refused: bool  # kernels given to ``load`` were another driver's or GPU's

    def bind(self, weights: Mapping[str, Tensor]) -> None:
        """Point weight inputs at tensors that fit their specs; the caller keeps them alive."""

    def run(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Run one call; returns ``out``, valid until the next call."""

    def kernel_cache(self) -> bytes:
        """Kernels that were compiled for this device, for ``load`` in a later process."""

    def close(self) -> None:
        """Release everything; may be called twice."""


class Backend(Protocol):
    """A compiler and its runtime."""

    name: str

    def version(self) -> str:
        """Full version; raises MissingPackageError when the package is absent."""

    def build(
        self, model: Path, spec: BuildSpec, out: Path, progress: ProgressCallback
    ) -> BuildResult:
        """Compile the ONNX file ``model`` into ``out`` (worker process, torch-free)."""

    def probe(self, data: bytes) -> None:
        """Load an engine and drop it (worker process, torch-free); raises EngineError."""

    def load(self, data: bytes, *, device: str, cache: bytes = b"") -> Engine:
        """Load an engine from verified bytes on a torch device such as ``cpu`` or ``cuda:0``.

        Args:
            cache: what ``kernel_cache`` of an engine on this kind of device returned.
        """
