"""Draw latents with a UNet: noise schedule, Euler and DPM++ 2M, classifier-free guidance.

Formulas: the discrete schedule of Stable Diffusion (Rombach et al., arXiv:2112.10752), sigmas
and Euler steps of Karras et al. (arXiv:2206.00364, algorithm 2 without churn and their eq. 5),
DPM-Solver++ 2M (Lu et al., arXiv:2211.01095, algorithm 2), v-prediction (Salimans and Ho,
arXiv:2202.00512), guidance (Ho and Salimans, arXiv:2207.12598).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .engine.interface import check_choice
from .errors import SettingError
from .progress import CancelToken
from .shapes import Shape

TRAINING_STEPS = 1000
BETA_START, BETA_END = 0.00085, 0.012
SAMPLERS = ("euler", "dpmpp_2m")
SCHEDULES = ("normal", "karras")
PREDICTIONS = ("eps", "v")
KARRAS_RHO = 7.0

UNetCall = Callable[..., Tensor]
Denoiser = Callable[[Tensor, float], Tensor]


@dataclass(frozen=True, kw_only=True)
class SampleSettings:
    """What to draw.

    Attributes:
        width, height: in pixels, multiples of 8.
        batch: pictures drawn together.
        cfg: guidance scale; at 1 the unconditional call is left out.
        prediction: ``eps`` or ``v``, as the model was trained.
    """

    width: int = 512
    height: int = 512
    batch: int = 1
    steps: int = 20
    cfg: float = 7.0
    seed: int = 0
    sampler: str = "euler"
    schedule: str = "normal"
    prediction: str = "eps"

    def __post_init__(self) -> None:
        _ = self.shape
        check_choice("sampler", self.sampler, SAMPLERS)
        check_choice("schedule", self.schedule, SCHEDULES)
        check_choice("prediction type", self.prediction, PREDICTIONS)
        if not 1 <= self.steps <= TRAINING_STEPS:
            raise SettingError(f"The step count must be from 1 to {TRAINING_STEPS}.")
        if not (math.isfinite(self.cfg) and 1 <= self.cfg <= 100):
            raise SettingError(f"The guidance scale must be from 1 to 100, not {self.cfg}.")
        if not 0 <= self.seed < 2**63:
            raise SettingError(f"The seed must be from 0 to 2^63 - 1, not {self.seed}.")

    @property
    def shape(self) -> Shape:
        """The shape of one UNet call of this job."""
        rows = self.batch * (1 if self.cfg == 1 else 2)
        return Shape.from_pixels(width=self.width, height=self.height, batch=rows)


@dataclass(frozen=True, kw_only=True)
class Conditioning:
    """Text of a job: context [1, T, D] and, for SDXL, y [1, A], for each of the two prompts."""

    positive: Tensor
    negative: Tensor
    y_positive: Tensor | None = None
    y_negative: Tensor | None = None


class Schedule:
    """The model's noise levels: sigma of every training step, and back."""

    def __init__(self) -> None:
        betas = torch.linspace(
            BETA_START**0.5, BETA_END**0.5, TRAINING_STEPS, dtype=torch.float64
        ).square()
        kept = torch.cumprod(1 - betas, dim=0)
        self.log_sigmas = ((1 - kept) / kept).sqrt().log()

    def sigma(self, timestep: float) -> float:
        """Sigma of a fractional timestep, interpolated in log space."""
        low = min(max(int(timestep), 0), TRAINING_STEPS - 2)
        weight = min(max(timestep - low, 0.0), 1.0)
        a, b = self.log_sigmas[low], self.log_sigmas[low + 1]
        return math.exp((1 - weight) * float(a) + weight * float(b))

    def timestep(self, sigma: float) -> float:
        """The fractional timestep of a sigma, clamped to the trained range."""
        log_sigma = math.log(max(sigma, 1e-10))
        below = int((self.log_sigmas <= log_sigma).sum()) - 1
        low = min(max(below, 0), TRAINING_STEPS - 2)
        a, b = float(self.log_sigmas[low]), float(self.log_sigmas[low + 1])
        return low + min(max((log_sigma - a) / (b - a), 0.0), 1.0)

    def sigmas(self, steps: int, kind: str) -> list[float]:
        """``steps`` falling noise levels, and 0 at the end."""
        last = TRAINING_STEPS - 1
        if kind == "normal":
            times = torch.linspace(last, 0, steps, dtype=torch.float64).tolist()
            return [*(self.sigma(time) for time in times), 0.0]
        most, least = self.sigma(last) ** (1 / KARRAS_RHO), self.sigma(0) ** (1 / KARRAS_RHO)
        ramp = torch.linspace(0, 1, steps, dtype=torch.float64).tolist()
        return [*((most + r * (least - most)) ** KARRAS_RHO for r in ramp), 0.0]


def euler(
    x: Tensor, sigmas: list[float], denoise: Denoiser, on_step: Callable[[int], None]
) -> Tensor:
    """Euler steps along dx/dsigma = (x - denoised) / sigma."""
    for i, (sigma, following) in enumerate(itertools.pairwise(sigmas)):
        slope = (x - denoise(x, sigma)) / sigma
        x = x + slope * (following - sigma)
        on_step(i)
    return x


def dpmpp_2m(
    x: Tensor, sigmas: list[float], denoise: Denoiser, on_step: Callable[[int], None]
) -> Tensor:
    """DPM-Solver++ 2M, with lambda = -log(sigma) and the last step first-order."""
    before: Tensor | None = None
    for i, (sigma, following) in enumerate(itertools.pairwise(sigmas)):
        denoised = denoise(x, sigma)
        if following == 0:
            x = denoised
        else:
            h = math.log(sigma / following)
            target = denoised
            if before is not None:
                ratio = math.log(sigmas[i - 1] / sigma) / h
                target = (1 + 1 / (2 * ratio)) * denoised - before / (2 * ratio)
            x = (following / sigma) * x - math.expm1(-h) * target
        before = denoised
        on_step(i)
    return x


def sample(
    unet: UNetCall,
    conditioning: Conditioning,
    settings: SampleSettings,
    *,
    device: torch.device,
    dtype: torch.dtype,
    channels: int = 4,
    on_step: Callable[[int], None] = lambda step: None,
    cancel: CancelToken | None = None,
) -> Tensor:
    """Draw latents.

    Args:
        unet: called as ``unet(x, timesteps, context, y)`` in ``dtype``, timesteps in fp32.

    Returns:
        [batch, 4, height / 8, width / 8], fp32.

    Raises:
        CancelledError: between two steps.
    """
    schedule = Schedule()
    sigmas = schedule.sigmas(settings.steps, settings.schedule)
    generator = torch.Generator().manual_seed(settings.seed)
    size = (settings.batch, channels, settings.shape.height, settings.shape.width)
    x = torch.randn(size, generator=generator).to(device) * math.sqrt(1 + sigmas[0] ** 2)
    denoise = _denoiser(unet, conditioning, settings, schedule, device, dtype)
    method = {"euler": euler, "dpmpp_2m": dpmpp_2m}[settings.sampler]

    def step(index: int) -> None:
        if cancel is not None:
            cancel.raise_if_cancelled()
        on_step(index)

    return method(x, sigmas, denoise, step)


def _denoiser(
    unet: UNetCall,
    conditioning: Conditioning,
    settings: SampleSettings,
    schedule: Schedule,
    device: torch.device,
    dtype: torch.dtype,
) -> Denoiser:
    context, y = _stack(conditioning, settings, device, dtype)

    def denoise(x: Tensor, sigma: float) -> Tensor:
        scaled = (x / math.sqrt(sigma**2 + 1)).to(dtype)
        copies = context.shape[0] // x.shape[0]
        times = torch.full((context.shape[0],), schedule.timestep(sigma), device=device)
        out = unet(scaled.repeat(copies, 1, 1, 1), times, context, y).float()
        guided = out
        if copies == 2:
            negative, positive = out.chunk(2)
            guided = negative + settings.cfg * (positive - negative)
        if settings.prediction == "v":
            return x / (sigma**2 + 1) - guided * (sigma / math.sqrt(sigma**2 + 1))
        return x - sigma * guided

    return denoise


def _stack(
    conditioning: Conditioning, settings: SampleSettings, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Rows of the call: unconditional first, lengths made equal by exact repetition."""
    contexts, ys = [conditioning.positive], [conditioning.y_positive]
    if settings.cfg != 1:
        contexts.insert(0, conditioning.negative)
        ys.insert(0, conditioning.y_negative)
    rows = math.lcm(*(context.shape[1] for context in contexts))
    stacked = torch.cat([c.repeat(settings.batch, rows // c.shape[1], 1) for c in contexts])
    present = [y.repeat(settings.batch, 1) for y in ys if y is not None]
    y = torch.cat(present).to(device, dtype) if present else None
    return stacked.to(device, dtype), y
