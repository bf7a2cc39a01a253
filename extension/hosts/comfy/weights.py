"""A MODEL's weights with every patch merged, without loading or changing it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import comfy.lora
import comfy.model_management
import torch
from torch import Tensor

PREFIX = "diffusion_model."


def merge_dtype(device: torch.device) -> torch.dtype:
    """What the host adds LoRAs in; newer ones choose by device."""
    chosen = getattr(comfy.model_management, "lora_compute_dtype", None)
    found: torch.dtype = chosen(device) if chosen else torch.float32
    return found


class PatchedWeights(Mapping[str, Tensor]):
    """LDM name to merged tensor, computed when asked for.

    The host's own merge, as it loads a model (``ModelPatcher.patch_weight_to_device``): on the
    same device, in the same precision and rounded in the same way, so that the results are the
    live weights bit by bit. Weights in fp8 become fp32.
    """

    def __init__(self, patcher: Any) -> None:
        self._device = patcher.load_device
        self._entries = {
            name.removeprefix(PREFIX): entry
            for name, entry in patcher.get_key_patches(PREFIX).items()
        }

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        (weight, convert), *patches = self._entries[name]
        plain = type(weight) in (Tensor, torch.nn.Parameter) and weight.dtype.itemsize > 1
        merged: Tensor = weight.detach()
        if patches:
            merged = merged.to(self._device, merge_dtype(self._device), copy=True)
            merged = convert(merged, inplace=True)
            merged = comfy.lora.calculate_weight(patches, merged, PREFIX + name)
            return merged.to(weight.dtype) if plain else merged
        return merged if plain else convert(merged.to(torch.float32, copy=True), inplace=True)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
