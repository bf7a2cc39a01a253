"""Which constants of a baked engine are computed wrongly on this GPU, and what a right form costs.

A variant is a set of kinds of parameters that stay network inputs while all others are constants,
and of switches of the emitter. Every variant is built and loaded in a process of its own, is
compared with fp32 torch, and then timed alone, one after the other, with its kernels.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from extension import onnx_graph, ops_onnx
from extension.accuracy import relative_l2
from extension.architecture import SD15, SDXL, Architecture
from extension.binding import Binding
from extension.dispatch import run_unet
from extension.engine import get_backend
from extension.engine.interface import BuildSpec
from extension.onnx_export import export_pair
from extension.onnx_graph import ExternalTensor, ExternalWeights, emit_graph
from extension.ops_onnx import Dim, OnnxOps, Value
from extension.ops_torch import TorchUNet
from extension.parity import cast_inputs, random_inputs
from extension.safetensors_file import read_header
from extension.shapes import Shape
from extension.synthetic import random_unet
from extension.worker_tasks import SAFETENSORS, UNET_PREFIX

from .forms import SMALL
from .profiling import kernels
from .timing import interleave
from .unet import half_weights

VARIANTS: tuple[str, ...] = (
    "inputs: all",
    "inputs: none",
    "inputs: none; early_bias",
    "inputs: linear_bias; early_bias",
    "inputs: all; groups=1",
    "inputs: all; groups=4",
    "inputs: all; long=1024",
)


CASES = {
    "sd15": (SD15, Shape(batch=2, height=64, width=64), "SD1.5 512x512"),
    "sdxl": (SDXL, Shape(batch=2, height=128, width=128), "SDXL 1024x1024"),
    "small": (SMALL, Shape(batch=2, height=64, width=64), "two levels of SD1.5 512x512"),
}


class Variant(OnnxOps):
    """The emitter with switches: ``early_bias``, ``groups=N`` and ``long=N``."""

    on: dict[str, str] = {}  # noqa: RUF012

    def geglu(self, x: Value, name: str, channels: int, inner: int) -> Value:
        if "early_bias" not in self.on:
            return super().geglu(x, name, channels, inner)
        both = self.linear(x, name, (2 * inner, channels))
        value, gate = self._split(both.name, -1, 2, name)
        gate = self._node("Gelu", [gate], f"{name}/gelu")
        return Value(self._node("Mul", [value, gate], f"{name}/geglu"), (*x.dims[:-1], inner))


def kind_of(name: str, shape: tuple[int, ...]) -> str:
    """One of ``VECTORS``, ``conv`` or ``linear``."""
    owner = name.rsplit(".", 1)[0]
    norms = (".norm", ".in_layers.0", ".out_layers.0")
    if owner.endswith(norms) or owner == "out.0":
        return "group_norm"
    if owner.endswith((".norm1", ".norm2", ".norm3")):
        return "layer_norm"
    linear = ("emb_layers", "transformer_blocks", "time_embed", "label_emb")
    if len(shape) == 1:
        for kind, part in BIASES.items():
            if part in name:
                return kind
    base = "linear" if any(part in name for part in linear) else "conv"
    return f"{base}_bias" if len(shape) == 1 else base


BIASES = {
    "geglu": ".ff.net.0.proj.",
    "feed_forward": ".ff.net.2.",
    "to_out": ".to_out.",
    "embedding": "emb",
}
VECTORS = ("group_norm", "layer_norm", "conv_bias", *BIASES)
GROUPS = {
    "all": (*VECTORS, "conv", "linear"),
    "vectors": VECTORS,
    "linear_bias": tuple(BIASES),
    "matrices": ("conv", "linear"),
    "none": (),
}


def parse(variant: str) -> tuple[frozenset[str], dict[str, str]]:
    """Kinds that stay inputs, and switches."""
    inputs, _, switches = variant.removeprefix("inputs: ").partition("; ")
    kinds = [kind for word in inputs.split() for kind in GROUPS.get(word, (word,))]
    pairs = [word.partition("=") for word in switches.split()]
    return frozenset(kinds), {name: value for name, _, value in pairs}


@contextmanager
def emitter(switches: dict[str, str]) -> Iterator[None]:
    Variant.on = switches
    rule, names = ops_onnx.attention_groups, ("OnnxOps", "attention_groups", "LONG_ATTENTION")
    before = [getattr(onnx_graph, names[0]), *(getattr(ops_onnx, name) for name in names[1:])]

    def groups(query: Sequence[Dim], key: Sequence[Dim], heads: int) -> int:
        found = rule(query, key, heads)
        return int(switches["groups"]) if found > 1 and "groups" in switches else found

    onnx_graph.OnnxOps = Variant  # type: ignore[misc]
    ops_onnx.attention_groups = groups
    ops_onnx.LONG_ATTENTION = int(switches.get("long", ops_onnx.LONG_ATTENTION))
    try:
        yield
    finally:
        onnx_graph.OnnxOps = before[0]  # type: ignore[misc]
        ops_onnx.attention_groups, ops_onnx.LONG_ATTENTION = before[1:]


def build(
    arch: Architecture, shape: Shape, variant: str, pair: Path, *, capability: str = "9.0"
) -> tuple[Any, float]:
    """The loaded engine and the seconds its build took."""
    kinds, switches = parse(variant)
    shapes = arch.parameters()
    inputs = {n for n, s in shapes.items() if kind_of(n, s) in kinds}
    header = read_header(pair / SAFETENSORS)
    tensors = {
        n.removeprefix(UNET_PREFIX): ExternalTensor(offset=t.offset, nbytes=t.nbytes)
        for n, t in header.tensors.items()
    }
    with emitter(switches):
        model = emit_graph(arch, shape, dtype="fp16")
    constants = {n: s for n, s in shapes.items() if n not in inputs}
    kept = [value for value in model.graph.input if value.name not in constants]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    external = ExternalWeights(location=SAFETENSORS, tensors=tensors)
    model.graph.initializer.extend(onnx_graph._external_initializers(constants, external, "fp16"))
    del model.metadata_props[:]
    with tempfile.TemporaryDirectory(dir=pair.parent) as folder:
        (Path(folder) / SAFETENSORS).hardlink_to(pair / SAFETENSORS)
        path, out = Path(folder) / "unet.onnx", Path(folder) / "unet.engine"
        path.write_bytes(model.SerializeToString())
        hwc8 = "conv" in kinds
        spec = BuildSpec(
            weights="shared",
            capabilities=(capability,),
            conv_format="hwc8" if hwc8 else "linear",
            weight_inputs=tuple(inputs),
        )
        backend = get_backend("tensorrt_rtx")
        started = time.perf_counter()
        backend.build(path, spec, out, lambda fraction, phase: None)
        seconds = time.perf_counter() - started
        return backend.load(out.read_bytes(), device="cuda:0"), seconds


def measure(variant: str, arch: Architecture, shape: Shape, pair: Path, pipe: Connection) -> None:
    """Build, compare, say so; time when told."""
    try:
        started = time.perf_counter()
        engine, seconds = build(arch, shape, variant, pair)
        device = torch.device("cuda:0")
        weights = half_weights(arch, device)
        binding = Binding(engine, device)  # holds the copies
        binding.refresh(weights, epoch=0)
        inputs = random_inputs(arch, shape, 500.5, seed=3, device=device)
        half = cast_inputs(inputs, torch.float16)
        expected = run_unet(TorchUNet(arch, weights), inputs)
        row: dict[str, Any] = {"error": relative_l2(engine.run(half), expected)}
        row |= {"build_seconds": round(seconds, 1), "weight_inputs": len(engine.weights)}
        row["seconds"] = round(time.perf_counter() - started, 1)
        pipe.send(row)
        if pipe.recv():
            timing = interleave({"": lambda: engine.run(half)}, rounds=3, calls=20)[""]
            pipe.send({"ms": timing.to_json(), "kernels": kernels(engine._enqueue)})
        binding.release()
    except BaseException as error:
        traceback.print_exc()
        pipe.send({"failed": f"{type(error).__name__}: {error}"[:300]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, default="sd15")
    parser.add_argument("--variant", action="append", help=f"default: {VARIANTS}")
    parser.add_argument("--at-once", type=int, default=12, help="processes")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    arch, shape, label = CASES[args.case]
    out: dict[str, Any] = {
        "date": date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "tensorrt_rtx": get_backend("tensorrt_rtx").version(),
        "case": f"{label}, batch 2, fp16",
        "variants": {},
    }
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / (f"baking-{args.case}.json")
    variants = args.variant or VARIANTS
    with tempfile.TemporaryDirectory() as folder:
        pair = Path(folder) / "pair"
        export_pair(random_unet(arch), arch, pair, dtype="fp16")
        for start in range(0, len(variants), args.at_once):
            group = variants[start : start + args.at_once]
            out["variants"] |= run(group, arch, shape, pair)
            path.write_text(json.dumps(out, indent=1))


def run(variants: Sequence[str], arch: Architecture, shape: Shape, pair: Path) -> dict[str, Any]:
    """Build and compare all ``variants`` at once, then time one after the other."""
    context = multiprocessing.get_context("spawn")
    rows: dict[str, Any] = {}
    children = {}
    for variant in variants:
        ours, theirs = context.Pipe()
        process = context.Process(target=measure, args=(variant, arch, shape, pair, theirs))
        process.start()
        children[variant] = (process, ours)
    for variant, (_, pipe) in children.items():
        rows[variant] = pipe.recv()
    for variant, (process, pipe) in children.items():
        if "failed" not in rows[variant]:
            pipe.send(True)
            rows[variant] |= pipe.recv()
        process.join()
        row = rows[variant]
        ms, found = row.get("ms", {}).get("median"), row.get("kernels", {})
        print(variant, row.get("error", row), ms, found.get("by_kind"), sep=" | ", flush=True)
    return rows


if __name__ == "__main__":
    main()
