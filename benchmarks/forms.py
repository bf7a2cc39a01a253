"""Forms of the same graph on one GPU: what each costs in time and in rounding error.

A form is a set of switches: operations kept in fp32, or written another way. For every form:
the error of the shared engine against fp32 torch, with synthetic and with strong random weights,
beside the error of fp16 torch; milliseconds a call; and its kernels.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import torch

from extension import onnx_graph
from extension.accuracy import relative_l2
from extension.architecture import SD15, Architecture
from extension.binding import Binding
from extension.dispatch import run_unet
from extension.engine import get_backend
from extension.engine.interface import BuildSpec
from extension.errors import EngineRoomError
from extension.ops_onnx import OnnxOps, Value
from extension.ops_torch import TorchUNet
from extension.parity import cast_inputs, random_inputs, strong_weights
from extension.shapes import Shape

from .profiling import kernels
from .timing import interleave
from .unet import half_weights

SMALL = replace(
    SD15,
    channel_mult=(1, 2),
    num_res_blocks=(1, 1),
    transformer_depth=(1, 1),
    transformer_depth_output=(1, 1, 1, 1),
)


class Forms(OnnxOps):
    """The emitter with switches."""

    on: frozenset[str] = frozenset()

    def _island(self, names: list[str], kind: str, label: str, **attributes: Any) -> str:
        inputs = [self._cast(name, "fp32", f"{name.strip('/')}/{label}/up") for name in names]
        out = self._node(kind, inputs, label, **attributes)
        return self._cast(out, self.dtype, f"{label}/down")

    def group_norm(self, x: Value, name: str, channels: int, eps: float) -> Value:
        if "group_norm" not in self.on:
            return super().group_norm(x, name, channels, eps)
        names = [x.name, *self._affine(name, channels)]
        attributes = {"num_groups": 32, "epsilon": eps}
        return Value(self._island(names, "GroupNormalization", name, **attributes), x.dims)

    def layer_norm(self, x: Value, name: str, channels: int) -> Value:
        if "layer_norm" not in self.on:
            return super().layer_norm(x, name, channels)
        names = [x.name, *self._affine(name, channels)]
        attributes = {"axis": -1, "epsilon": 1e-5}
        return Value(self._island(names, "LayerNormalization", name, **attributes), x.dims)

    def silu(self, x: Value) -> Value:
        if "silu" not in self.on:
            return super().silu(x)
        up = self._cast(x.name, "fp32", f"{x.name[1:]}/silu_up")
        gate = self._node("Sigmoid", [up], f"{x.name[1:]}/sigmoid")
        out = self._node("Mul", [up, gate], f"{x.name[1:]}/silu")
        return Value(self._cast(out, self.dtype, f"{x.name[1:]}/silu_down"), x.dims)

    def attention(self, q, k, v, heads, channels, *, fp32):  # type: ignore[no-untyped-def]
        if not self.on & {"scores", "split", "pad64", "op"}:
            return super().attention(q, k, v, heads, channels, fp32=fp32 or "attention" in self.on)
        label = q.name[1:].removesuffix(".to_q")
        width = channels // heads
        if "op" in self.on:
            return Value(self._fused([t.name for t in (q, k, v)], heads, width, label), q.dims)
        parts = [self._padded(self._split_heads(t, heads, channels), width) for t in (q, k, v)]
        orders = ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3])
        query, key, value = (
            self._node("Transpose", [part], f"{label}/{role}", perm=order)
            for part, order, role in zip(parts, orders, ("query", "key", "value"), strict=True)
        )
        if "split" in self.on:
            query = self._times(query, width**-0.25, f"{label}/scaled")
            key = self._times(key, width**-0.25, f"{label}/scaled_key")
        scores = self._node("MatMul", [query, key], f"{label}/scores")
        if "split" not in self.on:
            scores = self._times(scores, width**-0.5, f"{label}/scaled")
        weights = self._node("Softmax", [scores], f"{label}/softmax", axis=-1)
        out = self._node("MatMul", [weights, value], f"{label}/weighted")
        out = self._node("Transpose", [out], f"{label}/joined", perm=[0, 2, 1, 3])
        ends = [self._shape([n]) for n in (0, width, 3)]
        out = self._node("Slice", [out, *ends], f"{label}/cut") if "pad64" in self.on else out
        out = self._node("Reshape", [out, self._shape([0, 0, channels])], f"{label}/attended")
        return Value(out, q.dims)

    def _fused(self, names: list[str], heads: int, width: int, label: str) -> str:
        """The Attention operator of opset 23."""
        counts = {"q_num_heads": heads, "kv_num_heads": heads, "scale": width**-0.5}
        return self._node("Attention", names, f"{label}/attended", **counts)

    def _padded(self, name: str, width: int) -> str:
        if "pad64" not in self.on or width >= 64:
            return name
        pads = self._shape([0, 0, 0, 0, 0, 0, 0, 64 - width])
        return self._node("Pad", [name, pads], f"{name[1:]}/pad")

    def _times(self, name: str, factor: float, label: str) -> str:
        return self._node("Mul", [name, self._constant([factor], [], self.dtype)], label)

    def linear(self, x: Value, name: str, shape: tuple[int, int], *, bias: bool = True) -> Value:
        if "gemm" not in self.on or len(x.dims) == 2:
            return super().linear(x, name, shape, bias=bias)
        flat = self._node("Reshape", [x.name, self._shape([-1, shape[1]])], f"{name}/rows")
        out = super().linear(Value(flat, ("rows", shape[1])), name, shape, bias=bias)
        back = self._shape([x.dims[0], -1, shape[0]])
        return Value(
            self._node("Reshape", [out.name, back], f"{name}/back"), (*x.dims[:2], shape[0])
        )

    def _node(self, kind: str, inputs: Any, label: str, **attributes: Any) -> str:
        if kind == "Softmax" and "softmax" in self.on and self.dtype != "fp32":
            up = super()._node("Cast", inputs, f"{label}/up", to=1)
            out = super()._node(kind, [up], label, **attributes)
            return super()._node("Cast", [out], f"{label}/down", to=10)
        if kind == "Gelu" and "erf" in self.on:
            part = super()._node(
                "Mul", [*inputs, self._constant([0.5**0.5], [], self.dtype)], label
            )
            part = super()._node("Erf", [part], label)
            part = super()._node("Add", [part, self._constant([1.0], [], self.dtype)], label)
            part = super()._node("Mul", [*inputs, part], label)
            return super()._node("Mul", [part, self._constant([0.5], [], self.dtype)], label)
        if kind == "Transpose" and label.endswith("/key") and "kt" in self.on:
            inputs = [super()._node("Transpose", inputs, label, perm=[0, 2, 1, 3])]
            attributes = {"perm": [0, 1, 3, 2]}
        return super()._node(kind, inputs, label, **attributes)

    def _scaled(self, query: str, width: int, dtype: str, label: str) -> str:
        if "rounded_scale" not in self.on:
            return super()._scaled(query, width, dtype, label)
        factor = self._constant([width**-0.5], [], dtype)
        return self._node("Mul", [query, factor], f"{label}/scaled")


@contextmanager
def form(names: frozenset[str]) -> Iterator[None]:
    Forms.on, before = names, onnx_graph.OnnxOps
    onnx_graph.OnnxOps = Forms  # type: ignore[misc]
    try:
        yield
    finally:
        onnx_graph.OnnxOps = before  # type: ignore[misc]


def build(arch: Architecture, shape: Shape, names: frozenset[str], **spec: Any) -> Any:
    backend = get_backend("tensorrt_rtx")
    with tempfile.TemporaryDirectory() as folder, form(names):
        model, out = Path(folder) / "unet.onnx", Path(folder) / "unet.engine"
        graph = onnx_graph.emit_graph(arch, shape, dtype="fp16")
        if "op" in names:
            graph.opset_import[0].version = 23
        onnx.save(graph, model)
        fields = {"weight_inputs": tuple(arch.parameters()), "conv_format": "hwc8", **spec}
        build_spec = BuildSpec(weights="shared", capabilities=("9.0",), **fields)
        backend.build(model, build_spec, out, lambda fraction, phase: None)
        return backend.load(out.read_bytes(), device="cuda:0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="the whole SD1.5 UNet")
    parser.add_argument("--form", action="append", help="comma-separated switches")
    parser.add_argument("--show", action="store_true", help="print the longest kernels")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    arch, shape = (SD15 if args.full else SMALL), Shape(batch=2, height=64, width=64)
    device = torch.device("cuda:0")
    sources = {
        "synthetic": half_weights(arch, device),
        "strong": strong_weights(arch, torch.float16, device),
    }
    inputs = random_inputs(arch, shape, 500.5, seed=3, device=device)
    half = cast_inputs(inputs, torch.float16)
    expected = {k: run_unet(TorchUNet(arch, w), inputs) for k, w in sources.items()}
    rows, peers = {}, {}
    rows["torch fp16"] = {
        k: relative_l2(run_unet(TorchUNet(arch, w, torch.float16), inputs), expected[k])
        for k, w in sources.items()
    }
    print("torch fp16", rows["torch fp16"], flush=True)
    for text in args.form or [""]:
        names = frozenset(text.split(",")) - {""}
        try:
            engine = build(arch, shape, names)
        except EngineRoomError as error:
            print(text, error, flush=True)
            continue
        errors = {}
        for key, weights in sources.items():
            binding = Binding(engine, device)  # holds the copies until the call is over
            binding.refresh(weights, epoch=key)
            errors[key] = relative_l2(engine.run(half), expected[key])
        rows[text or "as emitted"] = {**errors, "kernels": kernels(engine._enqueue)}
        peers[text or "as emitted"] = lambda engine=engine: engine.run(half)
        shown = rows[text or "as emitted"]["kernels"]
        print(text or "as emitted", errors, shown["launches"], shown["microseconds"], flush=True)
        if args.show:
            print(*shown["longest"], sep="\n", flush=True)
    timings = interleave(peers, rounds=3, calls=20)
    for name, timing in timings.items():
        rows[name]["ms"] = timing.median
        print(f"{name}: {timing.median:.3f} ms", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    name = "forms-full.json" if args.full else "forms.json"
    (args.out / name).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
