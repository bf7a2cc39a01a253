"""How much GPU memory is free, and what copies of weights would take."""

from __future__ import annotations

import re

import torch

from .architecture import Architecture
from .errors import MemoryShortError
from .shapes import Shape

# Measured on an H200, fp16, batch 2: 46 (SD1.5 at 512x512) and 30 (SDXL at 1024x1024).
INSTANT_MAPS = 48
# 19 and 15 there with an engine
ENGINE_MAPS = 20
HEADROOM = 1.1  # what must be free, times what is to be allocated
_TRIED = re.compile(r"[Tt]ried to allocate ([\d.]+ [KMGT]?i?B)")
_FREE = re.compile(r"([\d.]+ [KMGT]?i?B) (?:is )?free")


def free_bytes(device: str) -> int:
    """Bytes free on a torch device: of the driver, and unused in torch's own cache."""
    if device == "cpu":
        return 1 << 60
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + cached)


def require_free(device: str, needed: int) -> None:
    """Raise MemoryShortError unless ``needed`` bytes, and some headroom, are free on ``device``.

    Asked first, because Windows spills into main memory where Linux fails.
    """
    free = free_bytes(device)
    if free < HEADROOM * needed:
        raise MemoryShortError(
            f"Not enough GPU memory: the engine needs {needed / 1e9:.2f} GB, "
            f"{free / 1e9:.2f} GB are free.",
            hint="Close other programs that use the GPU, or draw at a smaller size.",
        )


def shortfall(error: torch.cuda.OutOfMemoryError) -> str:
    """How much GPU memory was missing, as far as torch's message tells it."""
    text = str(error)
    tried, free = _TRIED.search(text), _FREE.search(text)
    if tried is None:
        return "not enough GPU memory"
    there = f", {free[1]} were free" if free else ""
    return f"not enough GPU memory: {tried[1]} more were needed{there}"


def free_ram() -> int | None:
    """Bytes of main memory that can be had without swapping; None where nothing tells (psutil,
    which every host has)."""
    try:
        import psutil
    except ImportError:
        return None
    return int(psutil.virtual_memory().available)


def hwc8_bytes(arch: Architecture) -> int:
    """Bytes of copies of all 3x3 convolution weights in a 16-bit precision."""
    shapes = arch.parameters().values()
    return sum(2 * torch.Size(s).numel() for s in shapes if len(s) == 4 and s[2] == 3)


def parameter_bytes(arch: Architecture, dtype: str) -> int:
    """Bytes of all parameters in a precision."""
    count = sum(torch.Size(shape).numel() for shape in arch.parameters().values())
    return count * (4 if dtype == "fp32" else 2)


def instant_bytes(arch: Architecture, shape: Shape, dtype: str) -> int:
    """About what the torch UNet holds at once in a call: so many of its widest feature maps."""
    return INSTANT_MAPS * _map_bytes(arch, shape, dtype)


def engine_bytes(arch: Architecture, shape: Shape, dtype: str) -> int:
    """About what an engine's own activations take, in such maps; its manifest knows exactly."""
    return ENGINE_MAPS * _map_bytes(arch, shape, dtype)


def _map_bytes(arch: Architecture, shape: Shape, dtype: str) -> int:
    values = shape.batch * shape.height * shape.width * arch.model_channels
    return values * (4 if dtype == "fp32" else 2)
