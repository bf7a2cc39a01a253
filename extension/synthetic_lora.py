"""LoRA files in the real layouts with random weights, for demos, tests and benchmarks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from .architecture import Architecture
from .checkpoint import tensor_bytes
from .diffusers_names import ldm_to_diffusers
from .engine.interface import check_choice
from .errors import SettingError
from .files import ensure_folder
from .safetensors_file import Entry, write_safetensors

KINDS = ("lora", "locon", "loha", "lokr", "dora", "full")
NAMINGS = ("kohya", "kohya-ldm", "diffusers", "peft")
RELATIVE_CHANGE = 0.25  # spread of a delta at strength 1, relative to a synthetic weight's
LOKR_FACTOR = 4
ROLES = {"kohya": ("lora_up", "lora_down"), "peft": ("lora_B", "lora_A")}


def targets(arch: Architecture, kind: str) -> dict[str, tuple[int, ...]]:
    """LDM modules that such a file changes: attention projections, or convolutions too."""
    found = {}
    for name, shape in arch.parameters().items():
        module = name.removesuffix(".weight")
        if module == name or len(shape) < 2:
            continue
        attention = ".attn" in name or ".ff.net" in name
        convolution = len(shape) == 4 and name.startswith(("input_blocks", "output_blocks"))
        if attention or (kind in ("locon", "full") and convolution):
            found[module] = shape
    return found


def make_lora(
    out: str | Path,
    *,
    architecture: Architecture,
    kind: str = "lora",
    names: str = "kohya",
    rank: int = 8,
    seed: int = 0,
) -> Path:
    """Write a LoRA file that visibly changes a synthetic checkpoint of ``architecture``.

    Args:
        kind: ``lora``, ``locon``, ``loha``, ``lokr``, ``dora`` or ``full``.
        names: ``kohya`` (diffusers block names), ``kohya-ldm``, ``diffusers`` or ``peft``.

    Raises:
        SettingError: an unknown kind or naming, or an impossible rank.
    """
    check_choice("LoRA kind", kind, KINDS)
    check_choice("naming", names, NAMINGS)
    if not 1 <= rank <= 256:
        raise SettingError(f"The rank {rank} is not between 1 and 256.")
    out = Path(out)
    ensure_folder(out.parent)
    tensors = dict(_tensors(architecture, kind, names, rank, seed))
    entries = [Entry(name, "F16", tuple(t.shape)) for name, t in tensors.items()]
    data = (tensor_bytes(t.half()) for t in tensors.values())
    metadata = {"engine_room.synthetic": f"random {kind}, rank {rank}, seed {seed}"}
    write_safetensors(out, entries, data, metadata)
    return out


def _tensors(
    arch: Architecture, kind: str, names: str, rank: int, seed: int
) -> Iterator[tuple[str, Tensor]]:
    theirs = {
        ldm.removesuffix(".weight"): name.removesuffix(".weight")
        for ldm, name in ldm_to_diffusers(arch).items()
    }
    for module, shape in targets(arch, kind).items():
        digest = hashlib.sha256(f"{seed} {module}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        prefix = _prefix(module, theirs[module], names)
        for suffix, tensor in _parts(kind, names, shape, rank, generator):
            yield f"{prefix}.{suffix}", tensor


def _prefix(module: str, theirs: str, names: str) -> str:
    if names == "kohya":
        return "lora_unet_" + theirs.replace(".", "_")
    if names == "kohya-ldm":
        return "lora_unet_" + module.replace(".", "_")
    return f"unet.{theirs}" if names == "diffusers" else f"base_model.model.{theirs}"


def _parts(
    kind: str, names: str, shape: tuple[int, ...], rank: int, generator: torch.Generator
) -> Iterator[tuple[str, Tensor]]:
    out, inputs = shape[0], math.prod(shape[1:])
    spread = RELATIVE_CHANGE / math.sqrt(inputs)

    def normal(*dims: int, std: float) -> Tensor:
        return torch.randn(dims, generator=generator) * std

    if kind == "full":
        yield "diff", normal(*shape, std=spread)
    elif kind == "loha":
        # The product of two products of rank r has a spread of r times that of its factors^4.
        each = math.sqrt(math.sqrt(spread / rank))
        for part in ("hada_w1_a", "hada_w2_a"):
            yield part, normal(out, rank, std=each)
        for part in ("hada_w1_b", "hada_w2_b"):
            yield part, normal(rank, inputs, std=each)
        yield "alpha", torch.tensor(float(rank))
    elif kind == "lokr":
        yield "lokr_w1", normal(LOKR_FACTOR, LOKR_FACTOR, std=1.0)
        yield "lokr_w2", normal(out // LOKR_FACTOR, inputs // LOKR_FACTOR, std=spread)
    else:
        up, down = ROLES.get(names, ROLES["kohya"])
        kernel = shape[2:]
        ones = [1] * len(kernel)
        yield f"{up}.weight", normal(out, rank, *ones, std=spread / math.sqrt(rank))
        yield f"{down}.weight", normal(rank, shape[1], *kernel, std=1.0)
        yield "alpha", torch.tensor(float(rank))
        if kind == "dora":
            magnitude = 1 + normal(out, *[1] * (len(shape) - 1), std=0.3)
            yield "dora_scale", magnitude.abs()
