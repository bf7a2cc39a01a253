"""Backends: compilers for ONNX graphs and the runtimes of what they make."""

from __future__ import annotations

from ..errors import SettingError
from .interface import Backend

BACKENDS = ("tensorrt_rtx", "tensorrt", "onnxruntime")


def get_backend(name: str) -> Backend:
    """Return the backend called ``name``; its package is imported on first use only."""
    if name == "onnxruntime":
        from .onnxruntime import OnnxRuntimeBackend

        return OnnxRuntimeBackend()
    if name in BACKENDS:
        from .tensorrt import TensorRTBackend

        return TensorRTBackend(name)
    raise SettingError(f"There is no backend '{name}'.", hint=f"Choose one of {list(BACKENDS)}.")
