"""Checkpoints in the real file layout with random weights, for demos, tests and benchmarks.

Everything but the weights is as in a released checkpoint. Weights are scaled so that
activations stay near 1 and every input moves the result; a trained model's zero-initialised
layers get weights too.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from .architecture import FULL, Architecture, family
from .checkpoint import tensor_bytes
from .engine.interface import check_choice
from .files import ensure_folder
from .model_layout import TEXT, VAE, text_shapes, vae_shapes
from .safetensors_file import Entry, write_safetensors
from .tensor_source import NAMES

UNET_PREFIX = "model.diffusion_model."
DTYPES = {"fp16": torch.float16, "fp32": torch.float32, "bf16": torch.bfloat16}
BIAS_SPREAD, SCALE_SPREAD, SHARP_GAIN = 0.2, 0.2, 2.0
EMBEDDING_SPREAD = 0.05
SIZES = ("tiny", "full")
FAMILIES = tuple(FULL)


def layout(family_name: str, size: str) -> dict[str, tuple[int, ...]]:
    """Every tensor of such a checkpoint: UNet, text encoders and VAE."""
    arch = family(family_name, size)
    shapes = {UNET_PREFIX + name: shape for name, shape in arch.parameters().items()}
    for text in TEXT[family_name, size]:
        shapes |= dict(text_shapes(text))
    return shapes | dict(vae_shapes(VAE[size]))


def random_tensor(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """The fp32 tensor that a name and a seed stand for; other tensors do not influence it."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    values = torch.randn(shape, generator=generator)
    if ("embedding" in name and "position" in name) or name.endswith("token_embedding.weight"):
        return values * EMBEDDING_SPREAD
    if len(shape) == 1:
        if name.endswith("bias"):
            return values * BIAS_SPREAD
        return 1 + values * SCALE_SPREAD
    sharp = name.endswith(("attn2.to_q.weight", "attn2.to_k.weight"))
    return values * ((SHARP_GAIN if sharp else 1.0) / math.sqrt(math.prod(shape[1:])))


def make_checkpoint(
    out: str | Path, *, family: str, size: str, seed: int = 0, dtype: str = "fp16"
) -> Path:
    """Write a synthetic checkpoint, one tensor in memory at a time; deterministic in ``seed``.

    Args:
        family: ``sd15``, ``sd21`` or ``sdxl``.
        size: ``tiny`` (some 30 MB) or ``full`` (real widths).
        dtype: ``fp16``, ``fp32`` or ``bf16``.

    Raises:
        SettingError: an unknown family, size or dtype.
        OutputError: no space, or the folder cannot be written.
    """
    check_choice("model family", family, FAMILIES)
    check_choice("model size", size, SIZES)
    check_choice("precision", dtype, tuple(DTYPES))
    out = Path(out)
    ensure_folder(out.parent)
    shapes = layout(family, size)
    kind = NAMES[DTYPES[dtype]]
    entries = [Entry(name, kind, shape) for name, shape in shapes.items()]
    metadata = {
        "engine_room.synthetic": f"random weights, family {family}, size {size}, seed {seed}"
    }
    write_safetensors(out, entries, _data(shapes, seed, DTYPES[dtype]), metadata)
    return out


def _data(
    shapes: dict[str, tuple[int, ...]], seed: int, dtype: torch.dtype
) -> Iterator[memoryview]:
    for name, shape in shapes.items():
        yield tensor_bytes(random_tensor(name, shape, seed).to(dtype))


def random_unet(arch: Architecture, seed: int = 0) -> dict[str, Tensor]:
    """The UNet weights of a synthetic checkpoint of any architecture, fp32."""
    return {
        name: random_tensor(UNET_PREFIX + name, shape, seed)
        for name, shape in arch.parameters().items()
    }
