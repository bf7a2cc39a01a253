"""The UNet as an ONNX graph: no torch, no host, and never a weight in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .architecture import NORM_GROUPS

OPSET = 22  # the first in which convolutions take bf16
IR_VERSION = 10
MAX_PERIOD = 10000.0
LAYER_NORM_EPS = 1e-5
# TensorRT-RTX 1.6 on an H200 computes fused attention over more than this many pairs of row and
# head with a slower and less exact kernel: 0.75 ms instead of 0.26 for SD1.5's widest
# (benchmarks/results/attention.json). Short ones are not worth a split, and every part is a
# kernel of its own: more parts than these cost more disk and build time than they save.
ATTENTION_ROWS, LONG_ATTENTION, MOST_GROUPS = 10, 2048, 4

Dim = int | str


@dataclass(frozen=True)
class Value:
    """A tensor of the graph: its name, and its dimensions (a string is a symbol)."""

    name: str
    dims: tuple[Dim, ...]


def element_type(dtype: str) -> int:
    """ONNX element type of ``fp16``, ``fp32`` or ``bf16``."""
    from onnx import TensorProto

    return int(
        {"fp16": TensorProto.FLOAT16, "fp32": TensorProto.FLOAT, "bf16": TensorProto.BFLOAT16}[
            dtype
        ]
    )


class OnnxOps:
    """Interpreter that writes nodes; a value is a tensor's name and dimensions.

    Attributes:
        nodes: the graph's nodes in order.
        initializers: small constants (shapes, scales, frequencies), each stored once.
        parameters: LDM name to shape of every parameter used, in order.
    """

    def __init__(self, dtype: str) -> None:
        from onnx import helper

        self._helper = helper
        self.dtype = dtype
        self.nodes: list[Any] = []
        self.initializers: dict[str, Any] = {}
        self.parameters: dict[str, tuple[int, ...]] = {}
        self._used: dict[str, int] = {}

    # Values and constants

    def _node(self, kind: str, inputs: Sequence[str], label: str, **attributes: Any) -> str:
        number = self._used[label] = self._used.get(label, -1) + 1
        name = f"/{label}" + (f"_{number}" if number else "")
        node = self._helper.make_node(kind, list(inputs), [name], name=name, **attributes)
        self.nodes.append(node)
        return name

    def _constant(self, values: Sequence[float], dims: Sequence[int], dtype: str) -> str:
        """A constant of ``dtype`` (``int64`` or a float type), shared by equal uses."""
        from onnx import TensorProto

        kind = TensorProto.INT64 if dtype == "int64" else element_type(dtype)
        digest = "_".join(map(repr, values)) if len(values) <= 4 else f"table{len(values)}"
        name = f"const/{dtype}/{'x'.join(map(str, dims))}/{digest}"
        if name not in self.initializers:
            tensor = self._helper.make_tensor(name, kind, list(dims), list(values))
            self.initializers[name] = tensor
        return name

    def _shape(self, values: Sequence[int]) -> str:
        return self._constant(values, [len(values)], "int64")

    def _parameter(self, name: str, shape: tuple[int, ...]) -> str:
        self.parameters[name] = shape
        return name

    def _cast(self, name: str, dtype: str, label: str) -> str:
        return self._node("Cast", [name], label, to=element_type(dtype))

    # Layers

    def timestep_embedding(self, timesteps: Value, channels: int) -> Value:
        half = channels // 2
        table = [math.exp(-math.log(MAX_PERIOD) * i / half) for i in range(half)]
        frequencies = self._constant(table, [1, half], "fp32")
        column = self._node("Reshape", [timesteps.name, self._shape([-1, 1])], "time/column")
        angles = self._node("Mul", [column, frequencies], "time/angles")
        parts = [self._node(op, [angles], f"time/{op.lower()}") for op in ("Cos", "Sin")]
        out = self._node("Concat", parts, "time/embedding", axis=1)
        if self.dtype != "fp32":
            out = self._cast(out, self.dtype, "time/cast")
        return Value(out, (timesteps.dims[0], channels))

    def linear(self, x: Value, name: str, shape: tuple[int, int], *, bias: bool = True) -> Value:
        weight = self._parameter(f"{name}.weight", shape)
        inputs = [self._parameter(f"{name}.bias", shape[:1])] if bias else []
        dims = (*x.dims[:-1], shape[0])
        if len(x.dims) == 2:
            return Value(self._node("Gemm", [x.name, weight, *inputs], name, transB=1), dims)
        return Value(self._product(x.name, weight, inputs, name), dims)

    def _product(self, x: str, weight: str, bias: Sequence[str], name: str) -> str:
        transposed = self._node("Transpose", [weight], f"{name}/transposed", perm=[1, 0])
        out = self._node("MatMul", [x, transposed], name)
        return self._node("Add", [out, *bias], f"{name}/bias") if bias else out

    def _pointwise(self, x: Value, name: str, out: int, channels: int) -> Value:
        """A 1x1 convolution as a product over tokens: 4 % of a call faster on SD1.5."""
        weight = self._parameter(f"{name}.weight", (out, channels, 1, 1))
        bias = self._parameter(f"{name}.bias", (out,))
        flat = self._node("Reshape", [weight, self._shape([out, channels])], f"{name}/flat")
        result = self._product(self.to_tokens(x).name, flat, [bias], name)
        return self.to_map(Value(result, (x.dims[0], _tokens(x.dims[2:]), out)), x)

    def conv(self, x: Value, name: str, shape: tuple[int, int, int], *, stride: int = 1) -> Value:
        out, channels, kernel = shape
        if kernel == 1 and stride == 1:
            return self._pointwise(x, name, out, channels)
        weight = self._parameter(f"{name}.weight", (out, channels, kernel, kernel))
        bias = self._parameter(f"{name}.bias", (out,))
        attributes = {
            "kernel_shape": [kernel] * 2,
            "pads": [kernel // 2] * 4,
            "strides": [stride] * 2,
        }
        result = self._node("Conv", [x.name, weight, bias], name, **attributes)
        size = x.dims[2:] if stride == 1 else tuple(_half(d) for d in x.dims[2:])
        return Value(result, (x.dims[0], out, *size))

    def group_norm(self, x: Value, name: str, channels: int, eps: float) -> Value:
        affine = self._affine(name, channels)
        attributes = {"num_groups": NORM_GROUPS, "epsilon": eps}
        return Value(
            self._node("GroupNormalization", [x.name, *affine], name, **attributes), x.dims
        )

    def layer_norm(self, x: Value, name: str, channels: int) -> Value:
        affine = self._affine(name, channels)
        attributes = {"axis": -1, "epsilon": LAYER_NORM_EPS}
        return Value(
            self._node("LayerNormalization", [x.name, *affine], name, **attributes), x.dims
        )

    def _affine(self, name: str, channels: int) -> list[str]:
        return [self._parameter(f"{name}.{part}", (channels,)) for part in ("weight", "bias")]

    def silu(self, x: Value) -> Value:
        gate = self._node("Sigmoid", [x.name], f"{x.name[1:]}/sigmoid")
        return Value(self._node("Mul", [x.name, gate], f"{x.name[1:]}/silu"), x.dims)

    def geglu(self, x: Value, name: str, channels: int, inner: int) -> Value:
        """The bias is added to the halves: TensorRT-RTX 1.6 miscompiles a constant one added
        before the split (relative error 0.1 on an H200, benchmarks/results/baking-sd15.json)."""
        both = self.linear(x, name, (2 * inner, channels), bias=False)
        bias = self._parameter(f"{name}.bias", (2 * inner,))
        halves, biases = (
            self._split(both.name, -1, 2, name),
            self._split(bias, -1, 2, f"{name}/bias"),
        )
        value = self._node("Add", [halves[0], biases[0]], f"{name}/value")
        gate = self._node("Add", [halves[1], biases[1]], f"{name}/gate")
        gate = self._node("Gelu", [gate], f"{name}/gelu")
        return Value(self._node("Mul", [value, gate], f"{name}/geglu"), (*x.dims[:-1], inner))

    def _split(self, name: str, axis: int, count: int, label: str) -> list[str]:
        """Equal parts of a tensor along ``axis``."""
        if count == 1:
            return [name]
        parts = [f"/{label}/part_{i}" for i in range(count)]
        node = self._helper.make_node(
            "Split", [name], parts, name=f"/{label}/split", axis=axis, num_outputs=count
        )
        self.nodes.append(node)
        return parts

    def attention(
        self, q: Value, k: Value, v: Value, heads: int, channels: int, *, fp32: bool
    ) -> Value:
        label = q.name[1:].removesuffix(".to_q")
        parts = [self._split_heads(t, heads, channels) for t in (q, k, v)]
        dtype = "fp32" if fp32 else self.dtype
        if dtype != self.dtype:
            parts = [self._cast(name, dtype, f"{name[1:]}/fp32") for name in parts]
        query = self._scaled(parts[0], channels // heads, dtype, label)
        key = self._node("Transpose", [parts[1]], f"{label}/key", perm=[0, 2, 3, 1])
        query = self._node("Transpose", [query], f"{label}/query", perm=[0, 2, 1, 3])
        value = self._node("Transpose", [parts[2]], f"{label}/value", perm=[0, 2, 1, 3])
        groups = attention_groups(q.dims, k.dims, heads)
        out = self._attended([query, key, value], groups, label)
        if dtype != self.dtype:
            out = self._cast(out, self.dtype, f"{label}/cast")
        out = self._node("Transpose", [out], f"{label}/joined", perm=[0, 2, 1, 3])
        out = self._node("Reshape", [out, self._shape([0, 0, channels])], f"{label}/attended")
        return Value(out, q.dims)

    def _attended(self, parts: Sequence[str], groups: int, label: str) -> str:
        """Softmax-weighted values of all heads [B, H, N, d], by ``groups`` of heads."""
        split = [self._split(name, 1, groups, name[1:]) for name in parts]
        found = []
        for query, key, value in zip(*split, strict=True):
            scores = self._node("MatMul", [query, key], f"{label}/scores")
            weights = self._node("Softmax", [scores], f"{label}/softmax", axis=-1)
            found.append(self._node("MatMul", [weights, value], f"{label}/weighted"))
        return found[0] if groups == 1 else self._node("Concat", found, f"{label}/groups", axis=1)

    def _split_heads(self, x: Value, heads: int, channels: int) -> str:
        shape = self._shape([0, 0, heads, channels // heads])
        return self._node("Reshape", [x.name, shape], f"{x.name[1:]}/heads")

    def _scaled(self, query: str, width: int, dtype: str, label: str) -> str:
        """Scale by 1/sqrt(width); in fp32 where the compute dtype cannot hold that exactly."""
        scale = 1 / math.sqrt(width)
        exact = dtype == "fp32" or math.log2(scale).is_integer()
        if not exact:
            query = self._cast(query, "fp32", f"{label}/to_fp32")
        factor = self._constant([scale], [], dtype if exact else "fp32")
        query = self._node("Mul", [query, factor], f"{label}/scaled")
        return query if exact else self._cast(query, dtype, f"{label}/from_fp32")

    def add(self, a: Value, b: Value) -> Value:
        return Value(self._node("Add", [a.name, b.name], f"{a.name[1:]}/sum"), a.dims)

    def add_embedding(self, x: Value, embedding: Value) -> Value:
        shape = self._shape([0, 0, 1, 1])
        wide = self._node("Reshape", [embedding.name, shape], f"{embedding.name[1:]}/map")
        return Value(self._node("Add", [x.name, wide], f"{x.name[1:]}/embedded"), x.dims)

    def concat(self, a: Value, b: Value) -> Value:
        name = self._node("Concat", [a.name, b.name], f"{a.name[1:]}/skip", axis=1)
        channels = a.dims[1] + b.dims[1]  # type: ignore[operator]
        return Value(name, (a.dims[0], channels, *a.dims[2:]))

    def to_tokens(self, x: Value) -> Value:
        last = self._node("Transpose", [x.name], f"{x.name[1:]}/last", perm=[0, 2, 3, 1])
        shape = self._shape([0, -1, x.dims[1]])  # type: ignore[list-item]
        name = self._node("Reshape", [last, shape], f"{x.name[1:]}/tokens")
        return Value(name, (x.dims[0], _tokens(x.dims[2:]), x.dims[1]))

    def to_map(self, x: Value, like: Value) -> Value:
        size = like.dims[2:]
        if _known(size):
            shape = self._shape([0, *size, x.dims[2]])  # type: ignore[list-item]
        else:
            channels = self._shape([x.dims[2]])  # type: ignore[list-item]
            shape = self._join_shape(self._shape([0]), like, channels)
        rows = self._node("Reshape", [x.name, shape], f"{x.name[1:]}/rows")
        name = self._node("Transpose", [rows], f"{x.name[1:]}/map", perm=[0, 3, 1, 2])
        return Value(name, (x.dims[0], x.dims[2], *size))

    def double(self, x: Value) -> Value:
        scales = self._constant([1.0, 1.0, 2.0, 2.0], [4], "fp32")
        name = self._resize([x.name, "", scales], x)
        return Value(name, (*x.dims[:2], *(_double(d) for d in x.dims[2:])))

    def resize(self, x: Value, like: Value) -> Value:
        target = like.dims[2:]
        if _known(target):
            if target == x.dims[2:]:
                return x
            if target == tuple(_double(d) for d in x.dims[2:]):
                return self.double(x)
        if _known((*x.dims, *target)):
            sizes = self._shape([*x.dims[:2], *target])  # type: ignore[list-item]
        else:
            head = self._node("Shape", [x.name], f"{x.name[1:]}/head", start=0, end=2)
            sizes = self._join_shape(head, like)
        return Value(self._resize([x.name, "", "", sizes], x), (*x.dims[:2], *target))

    def _resize(self, inputs: Sequence[str], x: Value) -> str:
        return self._node(
            "Resize",
            inputs,
            f"{x.name[1:]}/resized",
            mode="nearest",
            coordinate_transformation_mode="asymmetric",
            nearest_mode="floor",
        )

    def _join_shape(self, head: str, like: Value, *tail: str) -> str:
        size = self._node("Shape", [like.name], f"{like.name[1:]}/size", start=2, end=4)
        return self._node("Concat", [head, size, *tail], f"{like.name[1:]}/target", axis=0)


def attention_groups(query: Sequence[Dim], key: Sequence[Dim], heads: int) -> int:
    """How many groups of heads an attention is split into: 1 for short ones and unknown sizes.

    Args:
        query, key: dimensions [B, N, C] of both.
    """
    batch, rows = query[0], key[1]
    if not isinstance(batch, int) or not isinstance(rows, int) or rows < LONG_ATTENTION:
        return 1
    divisors = [n for n in range(1, MOST_GROUPS + 1) if heads % n == 0]
    return next((n for n in divisors if batch * heads // n <= ATTENTION_ROWS), divisors[-1])


def _tokens(size: Sequence[Dim]) -> Dim:
    height, width = size
    return height * width if isinstance(height, int) and isinstance(width, int) else "tokens"


def _known(dims: Sequence[Dim]) -> bool:
    return all(isinstance(dim, int) for dim in dims)


def _half(dim: Dim) -> Dim:
    return -(-dim // 2) if isinstance(dim, int) else f"half_{dim}"


def _double(dim: Dim) -> Dim:
    return 2 * dim if isinstance(dim, int) else f"double_{dim}"
