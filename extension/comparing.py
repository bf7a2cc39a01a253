"""The same seed through torch and through an engine: error, pictures, time, memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .accuracy import relative_l2
from .engine.turns import turns
from .full_precision import reference_math
from .model import Model
from .ops_torch import TorchUNet
from .picture import psnr, tile
from .progress import CancelToken
from .sampler import Conditioning, SampleSettings, sample
from .serving import Target

UNetCall = Callable[..., Tensor]


@dataclass
class Recorder:
    """Wraps a UNet: times its calls and can keep their inputs and outputs."""

    unet: UNetCall
    device: str
    keep: bool = False
    seconds: list[float] = field(default_factory=list)
    calls: list[tuple[tuple[Any, ...], Tensor]] = field(default_factory=list)

    def __call__(self, *args: Any) -> Tensor:
        started = time.perf_counter()
        out = self.unet(*args)
        if self.device != "cpu":
            with turns.work():
                torch.cuda.synchronize(self.device)
        self.seconds.append(time.perf_counter() - started)
        if self.keep:
            self.calls.append((args, out.clone()))
        return out

    @property
    def milliseconds(self) -> float:
        """Median time of a call; the first one is left out where there are more."""
        times = sorted(self.seconds[1:] or self.seconds)
        return 1e3 * times[len(times) // 2]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What two runs with one seed differ by.

    Attributes:
        errors: relative L2 of every engine call against fp32 torch on the same inputs.
        latent_error: relative L2 of the final latents.
        psnr: of the pictures, in dB.
    """

    host_picture: Tensor
    engine_picture: Tensor
    errors: list[float]
    latent_error: float
    psnr: float
    host_ms: float
    engine_ms: float
    peak_memory: int

    def to_json(self) -> dict[str, Any]:
        """The figures as a JSON object, without the pictures."""
        return {
            "worst_call_error": max(self.errors),
            "calls": len(self.errors),
            "latent_error": self.latent_error,
            "psnr_db": self.psnr,
            "host_ms": self.host_ms,
            "engine_ms": self.engine_ms,
            "peak_memory_bytes": self.peak_memory,
        }


def draw(
    model: Model,
    unet: UNetCall,
    conditioning: Conditioning,
    settings: SampleSettings,
    target: Target,
    *,
    on_step: Callable[[int], None] = lambda step: None,
    cancel: CancelToken | None = None,
) -> Tensor:
    """Latents of ``settings`` through ``unet``."""
    return sample(
        unet,
        conditioning,
        settings,
        device=torch.device(target.device),
        dtype=target.torch_dtype,
        channels=model.architecture.out_channels,
        on_step=on_step,
        cancel=cancel,
    )


def compare(
    model: Model,
    host: UNetCall,
    engine: UNetCall,
    weights: dict[str, Tensor],
    conditioning: Conditioning,
    settings: SampleSettings,
    target: Target,
) -> Comparison:
    """Draw with both, then repeat every engine call in fp32."""
    first = Recorder(host, target.device)
    second = Recorder(engine, target.device, keep=True)
    latents = [draw(model, unet, conditioning, settings, target) for unet in (first, second)]
    exact = TorchUNet(model.architecture, weights)
    with reference_math(torch.device(target.device)):
        errors = [relative_l2(out, exact(*args)) for args, out in second.calls]
    pictures = [tile(model.decode(latent)) for latent in latents]
    return Comparison(
        host_picture=pictures[0],
        engine_picture=pictures[1],
        errors=errors,
        latent_error=relative_l2(latents[1], latents[0]),
        psnr=psnr(pictures[1], pictures[0]),
        host_ms=first.milliseconds,
        engine_ms=second.milliseconds,
        peak_memory=peak_memory(target.device),
    )


def peak_memory(device: str) -> int:
    """Most bytes in use so far: of the GPU's allocator, or of this process."""
    if device != "cpu":
        return int(torch.cuda.max_memory_allocated(device))
    if sys.platform == "win32":
        return 0
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
