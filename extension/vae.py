"""Latents to pictures with the checkpoint's own VAE: the decoder of LDM's autoencoder."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import UnsupportedModelError

PREFIX = "first_stage_model."
SCALES = {"sdxl": 0.13025, "refiner": 0.13025}
DEFAULT_SCALE = 0.18215
GROUPS, EPS = 32, 1e-6


class VaeDecoder:
    """Decoder over raw tensors by their names in a checkpoint, in fp32.

    Args:
        tensors: full name to tensor; read as used.
        family: of the UNet: decides the latent scale (0.13025 for SDXL, else 0.18215).
    """

    def __init__(self, tensors: Mapping[str, Tensor], family: str) -> None:
        if f"{PREFIX}decoder.conv_in.weight" not in tensors:
            raise UnsupportedModelError("The file holds no VAE, so no picture can be decoded.")
        self._tensors = tensors
        self._scale = SCALES.get(family, DEFAULT_SCALE)

    @torch.no_grad()
    def __call__(self, latents: Tensor) -> Tensor:
        """[B, 4, h, w] to RGB in [0, 1]: [B, 3, 8h, 8w]."""
        h = self._conv(latents.float() / self._scale, "post_quant_conv")
        h = self._conv(h, "decoder.conv_in")
        h = self._res(h, "decoder.mid.block_1")
        h = self._attention(h, "decoder.mid.attn_1")
        h = self._res(h, "decoder.mid.block_2")
        for level in reversed(range(self._count("decoder.up.{}.block.0.norm1.weight"))):
            for block in range(self._count(f"decoder.up.{level}.block.{{}}.norm1.weight")):
                h = self._res(h, f"decoder.up.{level}.block.{block}")
            if level:
                h = F.interpolate(h, scale_factor=2.0, mode="nearest")
                h = self._conv(h, f"decoder.up.{level}.upsample.conv")
        h = F.silu(self._norm(h, "decoder.norm_out"))
        return (self._conv(h, "decoder.conv_out") / 2 + 0.5).clamp(0, 1)

    def _count(self, pattern: str) -> int:
        count = 0
        while PREFIX + pattern.format(count) in self._tensors:
            count += 1
        return count

    def _affine(self, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        weight, bias = (self._tensors[f"{PREFIX}{name}.{p}"] for p in ("weight", "bias"))
        return weight.to(x), bias.to(x)

    def _conv(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self._affine(name, x)
        return F.conv2d(x, weight, bias, padding=weight.shape[-1] // 2)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.group_norm(x, GROUPS, *self._affine(name, x), EPS)

    def _res(self, x: Tensor, name: str) -> Tensor:
        h = self._conv(F.silu(self._norm(x, f"{name}.norm1")), f"{name}.conv1")
        h = self._conv(F.silu(self._norm(h, f"{name}.norm2")), f"{name}.conv2")
        if f"{PREFIX}{name}.nin_shortcut.weight" in self._tensors:
            x = self._conv(x, f"{name}.nin_shortcut")
        return x + h

    def _attention(self, x: Tensor, name: str) -> Tensor:
        normed = self._norm(x, f"{name}.norm")
        q, k, v = (
            self._conv(normed, f"{name}.{part}").flatten(2).transpose(1, 2)[:, None]
            for part in "qkv"
        )
        out = F.scaled_dot_product_attention(q, k, v)[:, 0]
        return x + self._conv(out.transpose(1, 2).reshape(x.shape), f"{name}.proj_out")
