"""A MODEL's weights with every patch merged, without loading or changing it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import comfy.lora
import torch
from torch import Tensor

PREFIX = "diffusion_model."


class PatchedWeights(Mapping[str, Tensor]):
    """LDM name to merged tensor (fp32 where patched), computed when asked for.

    The host's own merge: its dequantisation, then its LoRA code, over the unpatched weights.
    """

    def __init__(self, patcher: Any) -> None:
        self._entries = {
            name.removeprefix(PREFIX): entry
            for name, entry in patcher.get_key_patches(PREFIX).items()
        }

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        (weight, convert), *patches = self._entries[name]
        plain = type(weight) in (Tensor, torch.nn.Parameter) and weight.dtype.itemsize > 1
        merged: Tensor = weight.detach()
        if patches or not plain:
            merged = convert(merged.to(torch.float32, copy=True), inplace=True)
        if patches:
            merged = comfy.lora.calculate_weight(patches, merged, PREFIX + name)
        return merged

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
