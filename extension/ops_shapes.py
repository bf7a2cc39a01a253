"""The UNet over plain shapes: which parameters it has, and the size of every residual."""

from __future__ import annotations

from .architecture import NORM_GROUPS, Architecture
from .shapes import Shape
from .unet import input_blocks, run

Dims = tuple[int, ...]


class ShapeOps:
    """Interpreter whose values are shapes; collects the parameters it meets."""

    def __init__(self) -> None:
        self.parameters: dict[str, Dims] = {}

    def _affine(self, name: str, weight: Dims, *, bias: bool = True) -> None:
        self.parameters[f"{name}.weight"] = weight
        if bias:
            self.parameters[f"{name}.bias"] = weight[:1]

    def timestep_embedding(self, timesteps: Dims, channels: int) -> Dims:
        return (timesteps[0], channels)

    def linear(self, x: Dims, name: str, shape: tuple[int, int], *, bias: bool = True) -> Dims:
        self._affine(name, shape, bias=bias)
        return (*x[:-1], shape[0])

    def conv(self, x: Dims, name: str, shape: tuple[int, int, int], *, stride: int = 1) -> Dims:
        out, channels, kernel = shape
        self._affine(name, (out, channels, kernel, kernel))
        # kernel // 2 padding: a stride of 1 keeps the size, 2 halves it, rounding up.
        return (x[0], out, -(-x[2] // stride), -(-x[3] // stride))

    def group_norm(self, x: Dims, name: str, channels: int, eps: float) -> Dims:
        assert channels % NORM_GROUPS == 0
        self._affine(name, (channels,))
        return x

    def layer_norm(self, x: Dims, name: str, channels: int) -> Dims:
        self._affine(name, (channels,))
        return x

    def silu(self, x: Dims) -> Dims:
        return x

    def geglu(self, x: Dims, name: str, channels: int, inner: int) -> Dims:
        self._affine(name, (2 * inner, channels))
        return (*x[:-1], inner)

    def attention(
        self, q: Dims, k: Dims, v: Dims, heads: int, channels: int, *, fp32: bool
    ) -> Dims:
        return q

    def add(self, a: Dims, b: Dims) -> Dims:
        return a

    def add_embedding(self, x: Dims, embedding: Dims) -> Dims:
        return x

    def concat(self, a: Dims, b: Dims) -> Dims:
        return (a[0], a[1] + b[1], *a[2:])

    def to_tokens(self, x: Dims) -> Dims:
        return (x[0], x[2] * x[3], x[1])

    def to_map(self, x: Dims, like: Dims) -> Dims:
        return (x[0], x[2], *like[2:])

    def double(self, x: Dims) -> Dims:
        return (*x[:2], 2 * x[2], 2 * x[3])

    def resize(self, x: Dims, like: Dims) -> Dims:
        return (*x[:2], *like[2:])


def parameter_shapes(arch: Architecture) -> dict[str, Dims]:
    """Every LDM parameter name and shape of ``arch``."""
    ops = ShapeOps()
    y = (1, arch.adm_channels) if arch.adm_channels else None
    side = 2**arch.levels
    run(ops, arch, (1, arch.in_channels, side, side), (1,), (1, 1, arch.context_dim), y)
    return ops.parameters


def skip_shapes(arch: Architecture, shape: Shape) -> list[Dims]:
    """[B, C, H, W] of each skip of the down path: also the shapes of its control residuals."""
    found: list[Dims] = []
    height, width = shape.height, shape.width
    for block in input_blocks(arch):
        if block.kind == "down":
            height, width = -(-height // 2), -(-width // 2)
        found.append((shape.batch, block.channels, height, width))
    return found
