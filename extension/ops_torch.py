"""The UNet in torch, functional over a state dict: the reference."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from .architecture import NORM_GROUPS, Architecture
from .unet import Control, run

MAX_PERIOD = 10000.0


class TorchOps:
    """Interpreter over torch tensors; weights are cast to ``dtype`` one at a time, as used."""

    def __init__(self, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self.weights = weights
        self.dtype = dtype
        self.device: torch.device | None = None

    def _weight(self, name: str) -> Tensor:
        return self.weights[name].to(device=self.device, dtype=self.dtype)

    def timestep_embedding(self, timesteps: Tensor, channels: int) -> Tensor:
        half = channels // 2
        steps = torch.arange(half, dtype=torch.float32, device=timesteps.device)
        frequencies = torch.exp(steps * (-math.log(MAX_PERIOD) / half))
        angles = timesteps.float()[:, None] * frequencies[None]
        embedding = torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1)
        return F.pad(embedding, (0, channels % 2)).to(self.dtype)

    def linear(self, x: Tensor, name: str, shape: tuple[int, int], *, bias: bool = True) -> Tensor:
        return F.linear(
            x, self._weight(f"{name}.weight"), self._weight(f"{name}.bias") if bias else None
        )

    def conv(self, x: Tensor, name: str, shape: tuple[int, int, int], *, stride: int = 1) -> Tensor:
        weight, bias = self._weight(f"{name}.weight"), self._weight(f"{name}.bias")
        return F.conv2d(x, weight, bias, stride=stride, padding=shape[2] // 2)

    def group_norm(self, x: Tensor, name: str, channels: int, eps: float) -> Tensor:
        weight, bias = self._weight(f"{name}.weight"), self._weight(f"{name}.bias")
        return F.group_norm(x, NORM_GROUPS, weight, bias, eps)

    def layer_norm(self, x: Tensor, name: str, channels: int) -> Tensor:
        weight, bias = self._weight(f"{name}.weight"), self._weight(f"{name}.bias")
        return F.layer_norm(x, (channels,), weight, bias)

    def silu(self, x: Tensor) -> Tensor:
        return F.silu(x)

    def geglu(self, x: Tensor, name: str, channels: int, inner: int) -> Tensor:
        value, gate = self.linear(x, name, (2 * inner, channels)).chunk(2, dim=-1)
        return value * F.gelu(gate)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, heads: int, channels: int, *, fp32: bool
    ) -> Tensor:
        q, k, v = (t.reshape(*t.shape[:2], heads, -1).transpose(1, 2) for t in (q, k, v))
        if fp32:
            q, k, v = q.float(), k.float(), v.float()
        out = F.scaled_dot_product_attention(q, k, v)
        return out.transpose(1, 2).flatten(2).to(self.dtype)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def add_embedding(self, x: Tensor, embedding: Tensor) -> Tensor:
        return x + embedding[:, :, None, None]

    def concat(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.cat([a, b], dim=1)

    def to_tokens(self, x: Tensor) -> Tensor:
        return x.flatten(2).transpose(1, 2)

    def to_map(self, x: Tensor, like: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(*x.shape[::2], *like.shape[-2:])

    def double(self, x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=2.0, mode="nearest")

    def resize(self, x: Tensor, like: Tensor) -> Tensor:
        if x.shape[-2:] == like.shape[-2:]:
            return x
        return F.interpolate(x, size=like.shape[-2:], mode="nearest")


class TorchUNet:
    """The reference UNet over a state dict.

    Args:
        arch: configuration of the weights.
        weights: LDM name to tensor, of any dtype.
        dtype: compute dtype; inputs and weights are cast to it.
    """

    def __init__(
        self,
        arch: Architecture,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.arch = arch
        self.weights = weights
        self.dtype = dtype

    @torch.no_grad()
    def __call__(
        self,
        x: Tensor,
        timesteps: Tensor,
        context: Tensor,
        y: Tensor | None = None,
        control: Control[Tensor] | None = None,
    ) -> Tensor:
        """Run one call; shapes as in ``unet.run``; returns the compute dtype."""
        ops = TorchOps(self.weights, self.dtype)
        ops.device = x.device
        cast = Control(
            **{
                part: tuple(self._cast(t) for t in getattr(control, part))
                for part in ("input", "middle", "output")
                if control is not None
            }
        )
        return run(
            ops,
            self.arch,
            x.to(self.dtype),
            timesteps,
            context.to(self.dtype),
            self._cast(y),
            cast,
        )

    def _cast(self, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(self.dtype)
