"""Prove that an engine computes the same UNet as torch, on the very device it runs on.

A compiler can be silently wrong, so no engine serves a picture before it has agreed with the
reference at several timesteps, with the weights at hand and with strong random ones (biases and
norm scales of a trained model can be so small that an error in them does not show).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .accuracy import relative_l2
from .architecture import Architecture
from .binding import TORCH_DTYPES, Binding
from .dispatch import Inputs, run_unet
from .engine.interface import Engine
from .engine.turns import turns
from .errors import ParityError
from .full_precision import reference_math
from .onnx_graph import graph_inputs
from .ops_torch import TorchUNet
from .shapes import Shape

TIMESTEPS = (999.0, 701.5, 250.25, 1.0)
LEAST_LIMIT, MOST_LIMIT = 2e-3, 4e-2
NOISE_FACTOR = 5.0
BIAS_SPREAD, SCALE_SPREAD, SHARP_GAIN = 0.5, 0.3, 2.8


@dataclass(frozen=True, kw_only=True)
class ParityResult:
    """Worst relative L2 error of the engine against fp32 torch, and the limit it had to keep.

    ``noise`` is the error of torch itself in the engine's dtype: what rounding alone costs.
    """

    worst: float
    noise: float
    limit: float

    @property
    def passed(self) -> bool:
        """Whether the engine may serve."""
        return self.worst <= self.limit

    def require(self, name: str) -> None:
        """Raise ParityError, which names the engine, unless it passed."""
        if not self.passed:
            raise ParityError(
                f"The engine {name} computes something else than the model: relative error "
                f"{self.worst:.2g}, allowed {self.limit:.2g}.",
                hint="It is kept out of service; the host serves. Please report it with the log.",
                details={"worst": self.worst, "limit": self.limit, "noise": self.noise},
            )


def limit_for(noise: float) -> float:
    """Allowed error: 5 times what rounding costs torch, from 2e-3 to 4e-2.

    Honest fp16 engines have 3.2 to 3.5 times torch's rounding error (SD1.5 and SDXL on an H200),
    whichever of norms, softmax, attention and SiLU are kept in fp32, so it comes from the matrix
    products. Below 2e-3 no picture shows a difference; above 4e-2 an error is no rounding,
    whatever torch does. The miscompiled engines that were seen were at 0.1 and above.
    """
    return min(max(NOISE_FACTOR * noise, LEAST_LIMIT), MOST_LIMIT)


def random_inputs(
    arch: Architecture, shape: Shape, timestep: float, *, seed: int, device: torch.device
) -> Inputs:
    """Inputs of one call by engine name, fp32, from a CPU generator (the same everywhere)."""
    generator = torch.Generator().manual_seed(seed)
    inputs = {
        name: torch.randn([int(d) for d in dims], generator=generator).to(device)
        for name, dims in graph_inputs(arch, shape, control=shape.control).items()
    }
    inputs["timesteps"] = torch.full((shape.batch,), timestep, device=device)
    return inputs


def cast_inputs(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """The inputs of an engine of this dtype; timesteps stay in fp32."""
    return {name: t if name == "timesteps" else t.to(dtype) for name, t in inputs.items()}


def strong_weights(
    arch: Architecture, dtype: torch.dtype, device: torch.device, *, seed: int = 0
) -> dict[str, Tensor]:
    """Random weights that alias a few small pools: every bias and scale matters, little memory.

    One pool per kind of vector and per power of two of the fan-in; each is as large as its
    largest tensor, and every tensor is a view of its start.
    """
    shapes = arch.parameters()
    sizes: dict[str, int] = {}
    for name, shape in shapes.items():
        kind = _pool(name, shape)
        sizes[kind] = max(sizes.get(kind, 0), math.prod(shape))
    generator = torch.Generator().manual_seed(seed)
    pools = {
        kind: _fill(kind, size, generator).to(device=device, dtype=dtype)
        for kind, size in sorted(sizes.items())
    }
    return {n: pools[_pool(n, s)][: math.prod(s)].view(s) for n, s in shapes.items()}


def _pool(name: str, shape: tuple[int, ...]) -> str:
    if len(shape) == 1:
        return "bias" if name.endswith("bias") else "scale"
    # Even attention hides queries and keys: theirs are larger, so that it is sharp.
    kind = "sharp" if name.endswith(("to_q.weight", "to_k.weight")) else "fan"
    return f"{kind} {math.prod(shape[1:]).bit_length()}"


def _fill(kind: str, size: int, generator: torch.Generator) -> Tensor:
    values = torch.randn(size, generator=generator)
    if kind == "bias":
        return values * BIAS_SPREAD
    if kind == "scale":
        return 1 + values * SCALE_SPREAD
    name, bits = kind.split()
    gain = SHARP_GAIN if name == "sharp" else 1.0
    return values * (gain * math.sqrt(0.5 ** int(bits)))


def check(
    engine: Engine,
    arch: Architecture,
    shape: Shape,
    weights: Mapping[str, Tensor] | None,
    *,
    dtype: str,
    device: str,
    timesteps: Sequence[float] = TIMESTEPS,
    pause: Callable[[], None] = lambda: None,
) -> ParityResult:
    """Compare ``engine`` with fp32 torch.

    Args:
        weights: the weights at hand, or None for random ones alone (they may be changing); for
            a baked engine, those baked in.
        dtype: the engine's I/O dtype.
        timesteps: at which to compare.
        pause: called between slices of work, so that a host can go on in between.

    Raises:
        EngineError: the weights cannot be bound.
    """
    place = torch.device(device)
    with turns.work(), reference_math(place):
        compared = _Comparison(engine, arch.for_shape(shape), shape, dtype, place, pause)
        for epoch, source in _sources(engine, arch, weights, dtype, place):
            compared.add(source, epoch, timesteps)
    return compared.result


class _Comparison:
    def __init__(
        self,
        engine: Engine,
        arch: Architecture,
        shape: Shape,
        dtype: str,
        place: torch.device,
        pause: Callable[[], None],
    ) -> None:
        self.engine, self.arch, self.shape = engine, arch, shape
        self.dtype, self.place, self.pause = dtype, place, pause
        self.worst = self.noise = 0.0

    def add(
        self, weights: Mapping[str, Tensor], epoch: Hashable, timesteps: Sequence[float]
    ) -> None:
        binding = Binding(self.engine, self.place)
        binding.refresh(weights, epoch)
        exact = TorchUNet(self.arch, weights)
        rounded = TorchUNet(self.arch, weights, TORCH_DTYPES[self.dtype])
        for seed, timestep in enumerate(timesteps):
            inputs = random_inputs(self.arch, self.shape, timestep, seed=seed, device=self.place)
            expected = run_unet(exact, inputs)
            found = self.engine.run(_cast(inputs, self.engine))
            self.worst = max(self.worst, relative_l2(found, expected))
            self.pause()
            if self.dtype != "fp32":
                self.noise = max(self.noise, relative_l2(run_unet(rounded, inputs), expected))
                self.pause()
        # Until here it has kept the copies that the engine reads.
        binding.release()

    @property
    def result(self) -> ParityResult:
        return ParityResult(worst=self.worst, noise=self.noise, limit=limit_for(self.noise))


def _sources(
    engine: Engine,
    arch: Architecture,
    weights: Mapping[str, Tensor] | None,
    dtype: str,
    device: torch.device,
) -> Iterator[tuple[Hashable, Mapping[str, Tensor]]]:
    if weights is not None:
        yield "at hand", weights
    if engine.weights:
        yield "random", strong_weights(arch, TORCH_DTYPES[dtype], device)


def _cast(inputs: Inputs, engine: Engine) -> Inputs:
    return {n: inputs[n].to(TORCH_DTYPES[spec.dtype]) for n, spec in engine.inputs.items()}
