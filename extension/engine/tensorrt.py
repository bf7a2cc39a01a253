"""TensorRT-RTX and TensorRT as one backend."""

from __future__ import annotations

from pathlib import Path

from .interface import BuildResult, BuildSpec, Engine, ProgressCallback
from .trt_api import load_module


class TensorRTBackend:
    """Backend over ``tensorrt_rtx`` (RTX cards) or ``tensorrt`` (data-centre GPUs)."""

    def __init__(self, name: str) -> None:
        self.name = name

    def version(self) -> str:
        """Full version, such as ``1.7.1.116``."""
        return str(load_module(self.name).__version__)

    def build(
        self, model: Path, spec: BuildSpec, out: Path, progress: ProgressCallback
    ) -> BuildResult:
        """Compile ``model``; see ``trt_build.build``."""
        from .trt_build import build

        return build(load_module(self.name), self.name, model, spec, out, progress)

    def load(
        self, data: bytes, *, device: str, cache: bytes = b"", use_graph: bool = True
    ) -> Engine:
        """Load verified bytes on a CUDA device, with the kernels of an earlier process."""
        from .trt_runtime import TensorRTEngine

        module = load_module(self.name)
        return TensorRTEngine(module, data, device, cache=cache, use_graph=use_graph)
