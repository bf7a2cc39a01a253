"""The torch UNet as an engine that needs no build: on a GPU its launches are one CUDA graph."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ..architecture import Architecture
from ..binding import TORCH_DTYPES
from ..dispatch import run_unet
from ..errors import EngineError
from ..onnx_graph import graph_inputs
from ..ops_torch import TorchUNet
from ..shapes import Shape
from .cuda_graph import CallGraph
from .interface import TensorSpec
from .turns import turns


class Borrowed(Mapping[str, Tensor]):
    """Tensors that belong to someone else, who may let them go at any time."""

    def __init__(self) -> None:
        self._references: dict[str, weakref.ref[Tensor]] = {}

    def update(self, tensors: Mapping[str, Tensor]) -> None:
        """Borrow these too, or in place of those of the same name."""
        self._references.update({name: weakref.ref(t) for name, t in tensors.items()})

    def clear(self) -> None:
        """Forget all."""
        self._references.clear()

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._references[name]()
        if tensor is None:
            raise EngineError(f"The weight '{name}' is gone.")
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._references)

    def __len__(self) -> int:
        return len(self._references)


class TorchGraphEngine:
    """The torch interpreter over the bound weights, for one shape; see ``Engine``.

    What it computes is what the host computes in the same precision; what it saves is the
    launching of some thousand kernels one by one. The graph's memory is torch's own.

    Args:
        arch: of the weights.
        shape: of every call.
        dtype: of inputs, weights and output: ``fp16``, ``bf16`` or ``fp32``.
        device: torch device; on a CPU each call runs plainly.
    """

    def __init__(self, arch: Architecture, shape: Shape, *, dtype: str, device: str) -> None:
        self.device = torch.device(device)
        self.arch = arch.for_shape(shape)
        self.inputs: Mapping[str, TensorSpec] = {
            name: TensorSpec(
                dtype="fp32" if name == "timesteps" else dtype, shape=tuple(map(int, dims))
            )
            for name, dims in graph_inputs(self.arch, shape, control=shape.control).items()
        }
        out = (shape.batch, arch.out_channels, shape.height, shape.width)
        self.outputs: Mapping[str, TensorSpec] = {"out": TensorSpec(dtype=dtype, shape=out)}
        self.weights: Mapping[str, TensorSpec] = {
            name: TensorSpec(dtype=dtype, shape=dims) for name, dims in arch.parameters().items()
        }
        self.activation_bytes, self.cache_refused = 0, False
        self._bound = Borrowed()
        self._unet = TorchUNet(self.arch, self._bound, TORCH_DTYPES[dtype])
        # Hosts switch inference mode on, and buffers made in it could not be written outside.
        with torch.inference_mode(False):
            self._buffers = {n: self._zeros(spec) for n, spec in self.inputs.items()}
            self._out = self._zeros(self.outputs["out"])
        self._graph = CallGraph(self.device) if self.device.type == "cuda" else None

    def _zeros(self, spec: TensorSpec) -> Tensor:
        return torch.zeros(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device=self.device)

    def bind(self, weights: Mapping[str, Tensor]) -> None:
        """Read ``weights`` from now on; those not named stay."""
        self._bound.update(weights)
        if self._graph is not None:
            self._graph.invalidate()

    @torch.no_grad()
    def run(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Run one call on the current stream; the output is valid until the next."""
        if len(self._bound) != len(self.weights):
            raise EngineError(f"{len(self.weights) - len(self._bound)} weights are not bound.")
        for name, buffer in self._buffers.items():
            buffer.copy_(inputs[name], non_blocking=True)
        if self._graph is None:
            self._compute()
            return self._out
        with torch.cuda.device(self.device):
            before = torch.cuda.memory_reserved(self.device)
            fresh = not self._graph.captured
            self._graph.run(self._compute, self._out)
            if fresh and self._graph.captured:
                grown = torch.cuda.memory_reserved(self.device) - before
                self.activation_bytes = max(self.activation_bytes, grown)
        return self._out

    def _compute(self) -> None:
        # A host may have switched autocast on for its own calls.
        with torch.autocast(self.device.type, enabled=False):
            self._out.copy_(run_unet(self._unet, self._buffers))

    def kernel_cache(self) -> bytes:
        """Nothing is compiled."""
        return b""

    def close(self) -> None:
        """Release the graph, its memory and the weights; may be called twice."""
        if self._graph is not None:
            with turns.work():
                torch.cuda.synchronize(self.device)
                self._graph.invalidate()
        self._bound.clear()
        self._buffers.clear()
