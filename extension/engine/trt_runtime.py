"""Run a TensorRT engine on torch's current stream, with weights bound by pointer."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..errors import EngineError
from .cuda_graph import CallGraph
from .interface import TensorSpec
from .scratch import scratch_of
from .trt_api import CudaEngine, dtype_name
from .trt_build import last_fault, make_logger
from .turns import turns

TORCH_DTYPES = {"fp16": torch.float16, "fp32": torch.float32, "bf16": torch.bfloat16}
ALIGNMENT = 256


class TensorRTEngine:
    """One engine with one execution context and persistent input and output buffers.

    Its scratch memory is the block that all engines of the device share.

    ``run`` copies the inputs into the buffers and enqueues on the current stream; the output
    belongs to the engine and is valid until the next call. From the second call with the same
    weight pointers on, the call is one replay of a CUDA graph.
    """

    def __init__(
        self,
        trt: ModuleType,
        data: bytes,
        device: str,
        *,
        cache: bytes = b"",
        use_graph: bool = True,
    ) -> None:
        self.device = torch.device(device)
        self._graph = CallGraph(self.device) if use_graph else None
        self._log = make_logger(trt)
        with torch.cuda.device(self.device):
            self._runtime = trt.Runtime(self._log)
            engine: CudaEngine | None = self._runtime.deserialize_cuda_engine(data)
            if engine is None:
                raise self._failure("TensorRT cannot load the engine")
            self._engine: Any = engine
            self._read_specs(trt)
            self._make_context(trt, cache)
            self._make_buffers()

    def _read_specs(self, trt: ModuleType) -> None:
        inputs: dict[str, TensorSpec] = {}
        outputs: dict[str, TensorSpec] = {}
        for index in range(self._engine.num_io_tensors):
            name = self._engine.get_tensor_name(index)
            spec = TensorSpec(
                dtype=dtype_name(trt, self._engine.get_tensor_dtype(name)),
                shape=tuple(self._engine.get_tensor_shape(name)),
                format=self._format(trt, name),
            )
            is_input = self._engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
            (inputs if is_input else outputs)[name] = spec
        # A weight carries its LDM name, which always has a dot; other inputs never have one.
        self.weight_names = tuple(name for name in inputs if "." in name)
        self.weights: Mapping[str, TensorSpec] = {n: inputs[n] for n in self.weight_names}
        self.inputs: Mapping[str, TensorSpec] = {
            name: spec for name, spec in inputs.items() if "." not in name
        }
        self.outputs: Mapping[str, TensorSpec] = outputs

    def _format(self, trt: ModuleType, name: str) -> str:
        is_hwc8 = self._engine.get_tensor_format(name) == trt.TensorFormat.HWC8
        return "hwc8" if is_hwc8 else "linear"

    def _make_context(self, trt: ModuleType, cache: bytes) -> None:
        config = self._engine.create_runtime_config()
        self._cache, self.cache_refused = None, False
        if hasattr(config, "create_runtime_cache"):
            self._cache = config.create_runtime_cache()
            if cache:
                self.cache_refused = not self._cache.deserialize(cache)
            config.set_runtime_cache(self._cache)
        strategy = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        config.set_execution_context_allocation_strategy(strategy)
        context = self._engine.create_execution_context(config)
        if context is None:
            raise self._failure("TensorRT cannot make an execution context")
        self._context: Any = context
        self.activation_bytes = int(self._engine.device_memory_size_v2)
        self._scratch = scratch_of(self.device)
        self._scratch.join(self, self.activation_bytes)
        self._scratch_pointer = 0

    def _make_buffers(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        for name, spec in {**self.inputs, **self.outputs}.items():
            buffer = torch.zeros(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device=self.device)
            self._buffers[name] = buffer
            self._context.set_tensor_address(name, buffer.data_ptr())
        self._bound: dict[str, int] = {}

    def bind(self, weights: Mapping[str, Tensor]) -> None:
        """Point weight inputs at ``weights``; those not named keep their pointers.

        Raises:
            EngineError: a tensor does not fit its input (binding.fits says which do).
        """
        for name, tensor in weights.items():
            pointer = tensor.data_ptr()
            if self._bound.get(name) == pointer:
                continue
            if pointer % ALIGNMENT or not self._context.set_tensor_address(name, pointer):
                raise EngineError(f"The weight '{name}' cannot be bound to the engine.")
            self._bound[name] = pointer
            if self._graph is not None:
                self._graph.invalidate()

    def run(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Run one call on the current stream of the engine's device."""
        if len(self._bound) != len(self.weight_names):
            missing = [name for name in self.weight_names if name not in self._bound]
            raise EngineError(f"{len(missing)} weights are not bound, '{missing[0]}' first.")
        with torch.cuda.device(self.device), self._scratch.claimed() as block:
            self._use(block)
            for name in self.inputs:
                self._buffers[name].copy_(inputs[name], non_blocking=True)
            if self._graph is None:
                self._enqueue()
            else:
                self._graph.run(self._enqueue, self._buffers["out"])
        return self._buffers["out"]

    def _use(self, block: Tensor) -> None:
        """Point the context at the scratch block where that has moved."""
        if block.data_ptr() == self._scratch_pointer:
            return
        self._scratch_pointer = block.data_ptr()
        self._context.set_device_memory(self._scratch_pointer, block.numel())
        if self._graph is not None:
            self._graph.invalidate()

    def _enqueue(self) -> None:
        stream = torch.cuda.current_stream(self.device).cuda_stream
        if not self._context.execute_async_v3(stream):
            raise self._failure("TensorRT could not run the engine")

    def kernel_cache(self) -> bytes:
        """The compiled kernels, for the next process; empty where there are none."""
        return b"" if self._cache is None else bytes(self._cache.serialize())

    def close(self) -> None:
        """Release the context, the engine and the buffers; may be called twice."""
        if self._engine is None:
            return
        with turns.work():
            torch.cuda.synchronize(self.device)
            self._graph = None
            self._context = self._cache = self._engine = self._runtime = None
            self._buffers, self._bound = {}, {}
            self._scratch.leave(self)

    def _failure(self, what: str) -> EngineError:
        messages = self._log.faults[-20:]
        return EngineError(f"{what}: {last_fault(self._log)}", details={"messages": messages})
