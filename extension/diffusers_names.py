"""LDM parameter names and those of the diffusers library, from the block structure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from .architecture import Architecture
from .errors import UnsupportedModelError
from .unet import input_blocks, output_blocks

TOP = {
    "time_embed.0": "time_embedding.linear_1",
    "time_embed.2": "time_embedding.linear_2",
    "label_emb.0.0": "add_embedding.linear_1",
    "label_emb.0.2": "add_embedding.linear_2",
    "input_blocks.0.0": "conv_in",
    "out.0": "conv_norm_out",
    "out.2": "conv_out",
}
RESNET = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
}
DIFFUSERS_PATTERN = re.compile(r"(down_blocks|up_blocks|mid_block)\.")


def module_prefixes(arch: Architecture) -> dict[str, str]:
    """LDM module prefix (``input_blocks.1.0``) to diffusers prefix, without trailing dots."""
    prefixes = dict(TOP)
    level = index = 0
    for block in list(input_blocks(arch))[1:]:
        if block.kind == "down":
            prefixes[f"{block.name}.0.op"] = f"down_blocks.{level}.downsamplers.0.conv"
            level, index = level + 1, 0
            continue
        prefixes[f"{block.name}.0"] = f"down_blocks.{level}.resnets.{index}"
        prefixes[f"{block.name}.1"] = f"down_blocks.{level}.attentions.{index}"
        index += 1
    level = index = 0
    for block in output_blocks(arch):
        prefixes[f"{block.name}.0"] = f"up_blocks.{level}.resnets.{index}"
        if block.depth:
            prefixes[f"{block.name}.1"] = f"up_blocks.{level}.attentions.{index}"
        index += 1
        if block.upsample:
            layer = 2 if block.depth else 1
            upsampler = f"up_blocks.{level}.upsamplers.0.conv"
            prefixes[f"{block.name}.{layer}.conv"] = upsampler
            level, index = level + 1, 0
    prefixes |= {
        "middle_block.0": "mid_block.resnets.0",
        "middle_block.1": "mid_block.attentions.0",
        "middle_block.2": "mid_block.resnets.1",
    }
    return prefixes


def ldm_to_diffusers(arch: Architecture) -> dict[str, str]:
    """Every LDM parameter name of ``arch`` to its diffusers name."""
    prefixes = module_prefixes(arch)
    return {name: _translate(name, prefixes) for name in arch.parameters()}


def _translate(name: str, prefixes: Mapping[str, str]) -> str:
    parts = name.split(".")
    for length in (4, 3, 2):
        prefix, rest = ".".join(parts[:length]), ".".join(parts[length:])
        if prefix in prefixes:
            layer, _, leaf = rest.rpartition(".")
            layer = RESNET.get(layer, layer)
            return ".".join(part for part in (prefixes[prefix], layer, leaf) if part)
    raise KeyError(name)


def looks_like_diffusers(names: Iterable[str]) -> bool:
    """Whether these are a diffusers UNet's parameter names."""
    names = set(names)
    return "conv_in.weight" in names and any(DIFFUSERS_PATTERN.match(name) for name in names)


def _block_names(
    shapes: Mapping[str, Sequence[int]],
) -> dict[str, str]:
    """LDM name for every diffusers name of a UNet, from the names alone.

    Raises:
        UnsupportedModelError: a name fits no block of an LDM UNet.
    """
    counts = _res_blocks(shapes)
    found: dict[str, str] = {}
    for name in shapes:
        found[name] = _to_ldm(name, counts)
    return found


def _res_blocks(shapes: Mapping[str, Sequence[int]]) -> list[int]:
    """ResBlocks of the down path, per level."""
    counts: list[int] = []
    while True:
        level = len(counts)
        count = 0
        while f"down_blocks.{level}.resnets.{count}.conv1.weight" in shapes:
            count += 1
        if not count:
            return counts
        counts.append(count)


def _to_ldm(name: str, counts: Sequence[int]) -> str:
    for ldm, theirs in TOP.items():
        if name.startswith(f"{theirs}."):
            return ldm + name.removeprefix(theirs)
    match = re.match(r"(down|up)_blocks\.(\d+)\.(\w+)\.(\d+)\.(.+)$", name)
    if match:
        return _block_name(match, counts)
    match = re.match(r"mid_block\.(resnets|attentions)\.(\d+)\.(.+)$", name)
    if match:
        kind, index, rest = match[1], int(match[2]), match[3]
        layer = 1 if kind == "attentions" else 2 * index
        return f"middle_block.{layer}.{_rest(kind, rest)}"
    raise UnsupportedModelError(f"'{name}' is no part of a supported diffusers UNet.")


def _block_name(match: re.Match[str], counts: Sequence[int]) -> str:
    path, level, kind, index, rest = match[1], int(match[2]), match[3], int(match[4]), match[5]
    if path == "down":
        first = 1 + sum(counts[:level]) + level
        if kind == "downsamplers":
            return f"input_blocks.{first + counts[level]}.0.op.{rest.removeprefix('conv.')}"
        block = f"input_blocks.{first + index}"
    else:
        blocks = [count + 1 for count in reversed(counts)]
        first = sum(blocks[:level])
        if kind == "upsamplers":
            return f"output_blocks.{first + blocks[level] - 1}.UP.{rest}"
        block = f"output_blocks.{first + index}"
    return f"{block}.{1 if kind == 'attentions' else 0}.{_rest(kind, rest)}"


def _rest(kind: str, rest: str) -> str:
    if kind != "resnets":
        return rest
    layer, _, leaf = rest.rpartition(".")
    inverse = {theirs: ldm for ldm, theirs in RESNET.items()}
    return f"{inverse.get(layer, layer)}.{leaf}"


def ldm_names(shapes: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Diffusers name to LDM name for every parameter in ``shapes``.

    The up-sampling convolution is layer 2 of its block where that has attention, else layer 1.
    """
    names = _block_names(shapes)
    attention = re.compile(r"(output_blocks\.\d+)\.1\.")
    with_attention = {match[1] for ldm in names.values() if (match := attention.match(ldm))}
    for theirs, ldm in names.items():
        if ".UP." in ldm:
            block = ldm.split(".UP.")[0]
            names[theirs] = ldm.replace(".UP.", ".2." if block in with_attention else ".1.")
    return names
