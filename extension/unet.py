"""The LDM UNet, described once over a small ``ops`` interface.

The structure is that of ``UNetModel`` in the Latent Diffusion code (Rombach et al., 2022,
arXiv:2112.10752) as all Stable Diffusion hosts use it, with its parameter names. An interpreter
supplies the values and operations: torch tensors, ONNX tensor names, or plain shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from .architecture import Architecture

T = TypeVar("T")

EMITTER_VERSION = 3  # raise whenever a graph made from this description could change
RES_NORM_EPS = 1e-5
TRANSFORMER_NORM_EPS = 1e-6
FEED_FORWARD_MULT = 4


class Ops(Protocol[T]):
    """What an interpreter provides. Feature maps are [B, C, H, W], tokens [B, N, C]."""

    def timestep_embedding(self, timesteps: T, channels: int) -> T:
        """Sinusoids of fractional timesteps [B] in fp32, cast to the compute dtype: [B, C]."""

    def linear(self, x: T, name: str, shape: tuple[int, int], *, bias: bool = True) -> T:
        """Apply ``name.weight`` of ``shape`` [out, in] (and ``name.bias``) to the last axis."""

    def conv(self, x: T, name: str, shape: tuple[int, int, int], *, stride: int = 1) -> T:
        """Convolve with ``name`` of ``shape`` (out, in, kernel), padded by kernel // 2."""

    def group_norm(self, x: T, name: str, channels: int, eps: float) -> T:
        """Normalise a feature map in 32 groups."""

    def layer_norm(self, x: T, name: str, channels: int) -> T:
        """Normalise tokens over their channels, eps 1e-5."""

    def silu(self, x: T) -> T:
        """Return x * sigmoid(x)."""

    def geglu(self, x: T, name: str, channels: int, inner: int) -> T:
        """Project to 2 * ``inner`` channels and return value * gelu(gate) (exact gelu)."""

    def attention(self, q: T, k: T, v: T, heads: int, channels: int, *, fp32: bool) -> T:
        """Scaled dot-product attention over tokens of ``channels`` channels."""

    def add(self, a: T, b: T) -> T:
        """Add two values of one shape."""

    def add_embedding(self, x: T, embedding: T) -> T:
        """Add [B, C] to every position of [B, C, H, W]."""

    def concat(self, a: T, b: T) -> T:
        """Concatenate feature maps along the channels."""

    def to_tokens(self, x: T) -> T:
        """[B, C, H, W] to [B, H * W, C]."""

    def to_map(self, x: T, like: T) -> T:
        """[B, H * W, C] to [B, C, H, W] of ``like``'s height and width."""

    def double(self, x: T) -> T:
        """Twice the height and width, nearest."""

    def resize(self, x: T, like: T) -> T:
        """Resize to ``like``'s height and width, nearest (index = floor(i * in / out))."""


@dataclass(frozen=True, kw_only=True)
class Control(Generic[T]):
    """ControlNet residuals; a missing entry (None, or a short list) adds nothing.

    ``input[i]`` is added to the result of input block i, ``output[i]`` to skip i of the down
    path when the up path takes it, ``middle[0]`` to the middle block's result.
    """

    input: Sequence[T | None] = field(default=())
    middle: Sequence[T | None] = field(default=())
    output: Sequence[T | None] = field(default=())


@dataclass(frozen=True)
class Block:
    """One entry of ``input_blocks`` or ``output_blocks``.

    ``kind`` is ``conv``, ``res`` or ``down``; ``channels_in`` counts the skip in the up path.
    """

    name: str
    kind: str
    channels_in: int
    channels: int
    depth: int = 0
    upsample: bool = False


def input_blocks(arch: Architecture) -> Iterator[Block]:
    """The down path in order."""
    channels = arch.model_channels
    yield Block("input_blocks.0", "conv", arch.in_channels, channels)
    index, depths = 1, iter(arch.transformer_depth)
    for level, (mult, count) in enumerate(zip(arch.channel_mult, arch.num_res_blocks, strict=True)):
        width = mult * arch.model_channels
        for _ in range(count):
            yield Block(f"input_blocks.{index}", "res", channels, width, next(depths))
            channels = width
            index += 1
        if level < arch.levels - 1:
            yield Block(f"input_blocks.{index}", "down", channels, channels)
            index += 1


def output_blocks(arch: Architecture) -> Iterator[Block]:
    """The up path in order; block i takes the skip of the i-th last input block."""
    skips = [block.channels for block in input_blocks(arch)]
    channels = skips[-1]
    index, depths = 0, iter(arch.transformer_depth_output)
    for level in reversed(range(arch.levels)):
        width = arch.channel_mult[level] * arch.model_channels
        for i in range(arch.num_res_blocks[level] + 1):
            upsample = level > 0 and i == arch.num_res_blocks[level]
            name = f"output_blocks.{index}"
            yield Block(name, "res", channels + skips.pop(), width, next(depths), upsample)
            channels = width
            index += 1


def run(
    ops: Ops[T],
    arch: Architecture,
    x: T,
    timesteps: T,
    context: T,
    y: T | None = None,
    control: Control[T] | None = None,
) -> T:
    """Evaluate the UNet.

    Args:
        ops: the interpreter.
        arch: the configuration.
        x: [B, C, H, W], any H and W.
        timesteps: [B], fp32, fractional.
        context: [B, T, D].
        y: [B, A], exactly if the architecture has it.
        control: residuals, each of its block's shape.

    Returns:
        [B, C_out, H, W].
    """
    if (y is not None) != bool(arch.adm_channels):
        raise ValueError(f"y must be given exactly if adm_channels ({arch.adm_channels}) is set")
    net = _UNet(ops, arch, context, control or Control())
    return net.forward(x, timesteps, y)


def _entry(items: Sequence[T | None], index: int) -> T | None:
    return items[index] if index < len(items) else None


class _UNet(Generic[T]):
    """One evaluation: holds what every block needs."""

    def __init__(self, ops: Ops[T], arch: Architecture, context: T, control: Control[T]) -> None:
        self.ops = ops
        self.arch = arch
        self.context = context
        self.control = control

    def forward(self, x: T, timesteps: T, y: T | None) -> T:
        self.embedding = self._embedding(timesteps, y)
        h, skips = x, []
        for i, block in enumerate(input_blocks(self.arch)):
            h = self._add(self._input_block(h, block), _entry(self.control.input, i))
            skips.append(h)
        h = self._add(self._middle(h), _entry(self.control.middle, 0))
        for block in output_blocks(self.arch):
            h = self._output_block(h, block, skips)
        h = self._norm_silu(h, "out.0", self.arch.model_channels)
        return self.ops.conv(h, "out.2", (self.arch.out_channels, self.arch.model_channels, 3))

    def _embedding(self, timesteps: T, y: T | None) -> T:
        """The activated embedding that every ResBlock projects."""
        width = self.arch.model_channels
        emb = self.ops.timestep_embedding(timesteps, width)
        emb = self._mlp(emb, ("time_embed.0", "time_embed.2"), width)
        if y is not None:
            label = self._mlp(y, ("label_emb.0.0", "label_emb.0.2"), self.arch.adm_channels)
            emb = self.ops.add(emb, label)
        return self.ops.silu(emb)

    def _mlp(self, x: T, names: tuple[str, str], channels: int) -> T:
        wide = self.arch.embedding_channels
        x = self.ops.silu(self.ops.linear(x, names[0], (wide, channels)))
        return self.ops.linear(x, names[1], (wide, wide))

    def _input_block(self, h: T, block: Block) -> T:
        if block.kind == "conv":
            shape = (block.channels, block.channels_in, 3)
            return self.ops.conv(h, f"{block.name}.0", shape)
        if block.kind == "down":
            shape = (block.channels, block.channels_in, 3)
            return self.ops.conv(h, f"{block.name}.0.op", shape, stride=2)
        h = self._res(h, f"{block.name}.0", block.channels_in, block.channels)
        return self._transformer(h, f"{block.name}.1", block.channels, block.depth)

    def _middle(self, h: T) -> T:
        depth = self.arch.transformer_depth_middle
        if depth < -1:
            return h
        width = self.arch.channel_mult[-1] * self.arch.model_channels
        h = self._res(h, "middle_block.0", width, width)
        if depth < 0:
            return h
        h = self._transformer(h, "middle_block.1", width, depth)
        return self._res(h, "middle_block.2", width, width)

    def _output_block(self, h: T, block: Block, skips: list[T]) -> T:
        index = len(skips) - 1
        skip = self._add(skips.pop(), _entry(self.control.output, index))
        if self.arch.resize == "after":
            h = self.ops.resize(h, skip)
        h = self.ops.concat(h, skip)
        h = self._res(h, f"{block.name}.0", block.channels_in, block.channels)
        h = self._transformer(h, f"{block.name}.1", block.channels, block.depth)
        if not block.upsample:
            return h
        h = self.ops.resize(h, skips[-1]) if self.arch.resize == "before" else self.ops.double(h)
        layer = 2 if block.depth else 1
        shape = (block.channels, block.channels, 3)
        return self.ops.conv(h, f"{block.name}.{layer}.conv", shape)

    def _res(self, x: T, name: str, channels: int, out: int) -> T:
        ops = self.ops
        h = self._norm_silu(x, f"{name}.in_layers.0", channels)
        h = ops.conv(h, f"{name}.in_layers.2", (out, channels, 3))
        emb_shape = (out, self.arch.embedding_channels)
        h = ops.add_embedding(h, ops.linear(self.embedding, f"{name}.emb_layers.1", emb_shape))
        h = self._norm_silu(h, f"{name}.out_layers.0", out)
        h = ops.conv(h, f"{name}.out_layers.3", (out, out, 3))
        if channels != out:
            x = ops.conv(x, f"{name}.skip_connection", (out, channels, 1))
        return ops.add(h, x)

    def _transformer(self, x: T, name: str, channels: int, depth: int) -> T:
        if not depth:
            return x
        ops, linear = self.ops, self.arch.linear_projection
        h = ops.group_norm(x, f"{name}.norm", channels, TRANSFORMER_NORM_EPS)
        if linear:
            h = ops.linear(ops.to_tokens(h), f"{name}.proj_in", (channels, channels))
        else:
            h = ops.to_tokens(ops.conv(h, f"{name}.proj_in", (channels, channels, 1)))
        for i in range(depth):
            h = self._transformer_block(h, f"{name}.transformer_blocks.{i}", channels)
        if linear:
            h = ops.to_map(ops.linear(h, f"{name}.proj_out", (channels, channels)), x)
        else:
            h = ops.conv(ops.to_map(h, x), f"{name}.proj_out", (channels, channels, 1))
        return ops.add(h, x)

    def _transformer_block(self, x: T, name: str, channels: int) -> T:
        ops = self.ops
        h = ops.layer_norm(x, f"{name}.norm1", channels)
        x = ops.add(self._attention(h, h, f"{name}.attn1", channels, channels), x)
        h = ops.layer_norm(x, f"{name}.norm2", channels)
        context_dim = self.arch.context_dim
        h = self._attention(h, self.context, f"{name}.attn2", channels, context_dim)
        x = ops.add(h, x)
        inner = FEED_FORWARD_MULT * channels
        h = ops.layer_norm(x, f"{name}.norm3", channels)
        h = ops.geglu(h, f"{name}.ff.net.0.proj", channels, inner)
        return ops.add(ops.linear(h, f"{name}.ff.net.2", (channels, inner)), x)

    def _attention(self, x: T, source: T, name: str, channels: int, source_channels: int) -> T:
        ops = self.ops
        q = ops.linear(x, f"{name}.to_q", (channels, channels), bias=False)
        k = ops.linear(source, f"{name}.to_k", (channels, source_channels), bias=False)
        v = ops.linear(source, f"{name}.to_v", (channels, source_channels), bias=False)
        heads, fp32 = self.arch.heads(channels), self.arch.fp32_attention
        h = ops.attention(q, k, v, heads, channels, fp32=fp32)
        return ops.linear(h, f"{name}.to_out.0", (channels, channels))

    def _norm_silu(self, x: T, name: str, channels: int) -> T:
        return self.ops.silu(self.ops.group_norm(x, name, channels, RES_NORM_EPS))

    def _add(self, x: T, residual: T | None) -> T:
        return x if residual is None else self.ops.add(x, residual)
