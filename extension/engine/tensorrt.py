"""TensorRT-RTX and TensorRT as one backend."""

from __future__ import annotations

from pathlib import Path

from ..errors import EngineError
from .interface import BuildResult, BuildSpec, Engine, ProgressCallback
from .trt_api import load_module
from .trt_build import last_fault, make_logger


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

    def probe(self, data: bytes) -> None:
        """Deserialise on the first GPU; raises EngineError where TensorRT refuses the bytes."""
        trt = load_module(self.name)
        log = make_logger(trt)
        if trt.Runtime(log).deserialize_cuda_engine(data) is None:
            raise EngineError(f"TensorRT refuses the engine: {last_fault(log)}")

    def load(
        self, data: bytes, *, device: str, cache: bytes = b"", use_graph: bool = True
    ) -> Engine:
        """Load verified bytes on a CUDA device, with the kernels of an earlier process."""
        from .trt_runtime import TensorRTEngine

        module = load_module(self.name)
        return TensorRTEngine(module, data, device, cache=cache, use_graph=use_graph)
