"""Self-attention alone: TensorRT's kernels for several ways to write it, beside torch's.

Shapes are those of SD1.5 at 512x512 and of SDXL at 1024x1024, batch 2. Every form is compared
with fp32 torch before it is timed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from onnx import TensorProto, helper, save
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from extension.accuracy import relative_l2
from extension.engine import get_backend
from extension.engine.interface import BuildSpec
from extension.errors import EngineRoomError

from .profiling import kernels
from .timing import interleave

SHAPES = {  # batch, tokens, heads, width of a head
    "SD1.5, 64x64": (2, 4096, 8, 40),
    "SD1.5, 32x32": (2, 1024, 8, 80),
    "SDXL, 64x64": (2, 4096, 10, 64),
    "SDXL, 32x32": (2, 1024, 20, 64),
}
FORMS = (
    "plain",
    "pad64",
    "pad128",
    "chunks 4",
    "heads 2",
    "heads 4",
    "heads 8",
    "heads 5",
    "heads 10",
    "batch 2",
    "bf16",
    "fp32 softmax",
    "op",
    "3d",
)
TORCH = {
    "torch flash": SDPBackend.FLASH_ATTENTION,
    "torch cudnn": SDPBackend.CUDNN_ATTENTION,
    "torch efficient": SDPBackend.EFFICIENT_ATTENTION,
}


class Graph:
    """A few nodes over [B, N, heads * width] inputs q, k and v."""

    def __init__(self, shape: tuple[int, int, int, int], form: str) -> None:
        self.batch, self.tokens, self.heads, self.width = shape
        self.form, self.nodes, self.constants = form, [], {}  # type: ignore[var-annotated]

    def node(self, kind: str, inputs: list[str], **attributes: Any) -> str:
        name = f"n{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], **attributes))
        return name

    def ints(self, *values: int) -> str:
        name = "i" + "_".join(map(str, values))
        self.constants[name] = helper.make_tensor(name, TensorProto.INT64, [len(values)], values)
        return name

    def split(self, name: str) -> str:
        shape = self.ints(self.batch, self.tokens, self.heads, self.width)
        return self.node("Reshape", [name, shape])

    def transpose(self, name: str, *order: int) -> str:
        return self.node("Transpose", [name], perm=list(order))

    def cast(self, name: str, kind: int) -> str:
        return self.node("Cast", [name], to=kind)

    def pad(self, name: str) -> str:
        wanted = {"pad64": 64, "pad128": 128}.get(self.form, 0)
        if wanted <= self.width:
            return name
        return self.node("Pad", [name, self.ints(0, 0, 0, 0, 0, 0, 0, wanted - self.width)])

    def core(self, q: str, k: str, v: str) -> str:
        scores = self.node("MatMul", [q, k])
        if self.form == "fp32 softmax":
            scores = self.cast(scores, TensorProto.FLOAT)
        weights = self.node("Softmax", [scores], axis=-1)
        if self.form == "fp32 softmax":
            weights = self.cast(weights, TensorProto.FLOAT16)
        return self.node("MatMul", [weights, v])

    def parts(self, name: str, axis: int, count: int) -> list[str]:
        outs = [f"{name}_part{i}" for i in range(count)]
        self.nodes.append(helper.make_node("Split", [name], outs, axis=axis, num_outputs=count))
        return outs

    def out(self) -> str:
        q, k, v = "q", "k", "v"
        scale = helper.make_tensor("scale", TensorProto.FLOAT16, [], [self.width**-0.5])
        self.constants["scale"] = scale
        if self.form == "op":
            counts = {"q_num_heads": self.heads, "kv_num_heads": self.heads}
            return self.node("Attention", [q, k, v], **counts)
        q = self.node("Mul", [q, "scale"])
        if self.form == "bf16":
            q, k, v = (self.cast(n, TensorProto.BFLOAT16) for n in (q, k, v))
        q, k, v = (self.pad(self.split(n)) for n in (q, k, v))
        q, k, v = (
            self.transpose(q, 0, 2, 1, 3),
            self.transpose(k, 0, 2, 3, 1),
            self.transpose(v, 0, 2, 1, 3),
        )
        out = self._shaped(q, k, v)
        if self.form == "bf16":
            out = self.cast(out, TensorProto.FLOAT16)
        out = self.transpose(out, 0, 2, 1, 3)
        if self.form.startswith("pad"):
            out = self.node("Slice", [out, self.ints(0), self.ints(self.width), self.ints(3)])
        return self.node("Reshape", [out, self.ints(0, 0, self.heads * self.width)])

    def _shaped(self, q: str, k: str, v: str) -> str:
        kind, _, count = self.form.partition(" ")
        if kind == "chunks":
            outs = [self.core(part, k, v) for part in self.parts(q, 2, int(count))]
            return self.node("Concat", outs, axis=2)
        if kind in ("heads", "batch"):
            axis = ("batch", "heads").index(kind)
            split = [self.parts(n, axis, int(count)) for n in (q, k, v)]
            outs = [self.core(*parts) for parts in zip(*split, strict=True)]
            return self.node("Concat", outs, axis=axis)
        if kind == "3d":
            rows, width = self.batch * self.heads, self.width
            q = self.node("Reshape", [q, self.ints(rows, self.tokens, width)])
            k = self.node("Reshape", [k, self.ints(rows, width, self.tokens)])
            v = self.node("Reshape", [v, self.ints(rows, self.tokens, width)])
            out = self.core(q, k, v)
            shape = self.ints(self.batch, self.heads, self.tokens, width)
            return self.node("Reshape", [out, shape])
        return self.core(q, k, v)

    def model(self) -> Any:
        channels = self.heads * self.width
        dims = [self.batch, self.tokens, channels]
        self.nodes.append(helper.make_node("Identity", [self.out()], ["out"]))
        half = TensorProto.FLOAT16
        values = [helper.make_tensor_value_info(n, half, dims) for n in "qkv"]
        result = helper.make_tensor_value_info("out", half, dims)
        constants = list(self.constants.values())
        graph = helper.make_graph(self.nodes, "attention", values, [result], constants)
        opset = helper.make_opsetid("", 23 if self.form == "op" else 22)
        return helper.make_model(graph, opset_imports=[opset], ir_version=10)


def build(shape: tuple[int, int, int, int], form: str, capability: str = "9.0") -> Any:
    backend = get_backend("tensorrt_rtx")
    with tempfile.TemporaryDirectory() as folder:
        model, out = Path(folder) / "unet.onnx", Path(folder) / "unet.engine"
        save(Graph(shape, form).model(), model)
        spec = BuildSpec(weights="shared", capabilities=(capability,))
        backend.build(model, spec, out, lambda fraction, phase: None)
        return backend.load(out.read_bytes(), device="cuda:0")


def run(shape: tuple[int, int, int, int], forms: Sequence[str]) -> dict[str, Any]:
    batch, tokens, heads, width = shape
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(batch, tokens, heads * width, generator=generator, device="cuda").half()
        for _ in range(3)
    )

    def split(x: Tensor) -> Tensor:
        return x.view(batch, tokens, heads, width).transpose(1, 2)

    def joined(x: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(batch, tokens, heads * width)

    exact = functional.scaled_dot_product_attention(*(split(x.float()) for x in (q, k, v)))
    expected = joined(exact)
    rows: dict[str, Any] = {}
    peers: dict[str, Callable[[], object]] = {}
    for name, backend in TORCH.items():

        def call(backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return joined(functional.scaled_dot_product_attention(*map(split, (q, k, v))))

        rows[name] = {"error": relative_l2(call(), expected), "kernels": kernels(call)}
        peers[name] = call
    for form in forms:
        kind, _, count = form.partition(" ")
        if kind == "heads" and heads % int(count):
            continue
        try:
            engine = build(shape, form)
        except EngineRoomError as error:
            rows[form] = {"failed": str(error)[:200]}
            continue
        inputs = {"q": q, "k": k, "v": v}
        rows[form] = {"error": relative_l2(engine.run(inputs), expected)}
        rows[form]["kernels"] = kernels(engine._enqueue)
        peers[form] = lambda engine=engine: engine._graph.run(engine._enqueue)
    for name, timing in interleave(peers, rounds=3, calls=20).items():
        rows[name]["ms"] = timing.to_json()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", action="append", choices=SHAPES)
    parser.add_argument("--form", action="append", choices=FORMS)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    results = {}
    for name in args.shape or SHAPES:
        results[name] = run(SHAPES[name], args.form or FORMS)
        for form, row in results[name].items():
            shown = row.get("kernels", {}).get("longest", [["", 0, 0]])[0]
            ms = row.get("ms", {}).get("median")
            print(name, form, row.get("error", row.get("failed")), ms, shown, sep=" | ", flush=True)
    out = {
        "date": date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "tensorrt_rtx": get_backend("tensorrt_rtx").version(),
        "shapes": results,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "attention.json").write_text(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
