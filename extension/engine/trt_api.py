"""The part of TensorRT's Python API that Engine Room uses, and how its editions differ.

The published stubs are incomplete, so calls are typed against the protocols here. TensorRT-RTX
and TensorRT share the classes; ``EDITIONS`` holds what differs.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

from .. import packages
from ..errors import MissingPackageError
from ..packages import import_private


@dataclass(frozen=True, kw_only=True)
class Edition:
    """One edition of TensorRT.

    Attributes:
        module: name of its Python module.
        package: what pip installs.
        ahead_of_time: builds for a named compute capability, without a GPU.
        runtime_cache: keeps compiled kernels in a runtime cache.
    """

    module: str
    package: str
    ahead_of_time: bool
    runtime_cache: bool


EDITIONS = {
    "tensorrt_rtx": Edition(
        module="tensorrt_rtx", package="tensorrt-rtx", ahead_of_time=True, runtime_cache=True
    ),
    "tensorrt": Edition(
        module="tensorrt", package="tensorrt", ahead_of_time=False, runtime_cache=False
    ),
}


class Context(Protocol):
    """IExecutionContext."""

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool: ...
    def set_tensor_address(self, name: str, pointer: int) -> bool: ...
    def set_device_memory(self, pointer: int, size: int) -> None: ...
    def execute_async_v3(self, stream: int) -> bool: ...


class CudaEngine(Protocol):
    """ICudaEngine."""

    num_io_tensors: int
    device_memory_size_v2: int

    def get_tensor_name(self, index: int) -> str: ...
    def get_tensor_mode(self, name: str) -> Any: ...
    def get_tensor_dtype(self, name: str) -> Any: ...
    def get_tensor_shape(self, name: str) -> Any: ...
    def get_tensor_format(self, name: str) -> Any: ...
    def create_runtime_config(self) -> Any: ...
    def create_execution_context(self, config: Any) -> Context | None: ...


def load_module(name: str) -> ModuleType:
    """Import an edition: what the process already has, else the private folder's copy.

    Raises:
        MissingPackageError: it is not installed, with the command that installs it.
    """
    edition = EDITIONS[name]
    if edition.module in sys.modules:
        return sys.modules[edition.module]
    try:
        return import_private(edition.module, name)
    except ImportError as error:
        raise MissingPackageError.of(
            edition.package, "to build and run engines", packages.install_command(name)
        ) from error


def capability_enum(trt: ModuleType, capability: str) -> Any:
    """``"8.9"`` to ComputeCapability.SM89; a capability that the package cannot name, or
    ``"current"``, to CURRENT."""
    name = "SM" + capability.replace(".", "")
    return getattr(trt.ComputeCapability, name, trt.ComputeCapability.CURRENT)


def dtype_name(trt: ModuleType, dtype: Any) -> str:
    """TensorRT data type to ``fp16``, ``fp32``, ``bf16`` or the type's own name."""
    known = {trt.float16: "fp16", trt.float32: "fp32", trt.bfloat16: "bf16"}
    return known.get(dtype, str(dtype))
