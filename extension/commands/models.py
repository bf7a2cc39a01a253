"""inspect, make-checkpoint, make-lora, export."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from ..architecture import family
from ..engine.interface import DTYPES
from ..errors import EngineRoomError, SettingError, UnsupportedModelError
from ..files import ensure_folder
from ..jobs import run_job
from ..key import STEM
from ..library import Library
from ..lora import read_lora
from ..model import Model
from ..onnx_export import export_pair
from ..serving import facts
from ..synthetic import DTYPES as DTYPES_BY_NAME
from ..synthetic import FAMILIES, SIZES, make_checkpoint
from ..synthetic_lora import KINDS, NAMINGS, make_lora
from ..tensor_source import NAMES
from ..worker_tasks import ONNX
from . import common
from .common import ProgressLine, Report


def add(commands: Any) -> None:
    """Register the commands."""
    parser = commands.add_parser("inspect", help="say what a checkpoint, LoRA or engine file is")
    parser.add_argument("file", type=Path)
    parser.add_argument("--fingerprint", action="store_true", help="read all weights and hash them")
    parser.set_defaults(run=inspect)
    parser = commands.add_parser("make-checkpoint", help="write a synthetic checkpoint")
    parser.add_argument("--family", choices=FAMILIES, default="sd15")
    parser.add_argument("--model-size", "--size", choices=SIZES, default="tiny", dest="model_size")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=DTYPES, default="fp16")
    parser.add_argument("out", type=Path)
    parser.set_defaults(run=new_checkpoint)
    parser = commands.add_parser("make-lora", help="write a synthetic LoRA")
    parser.add_argument("--family", choices=FAMILIES, default="sd15")
    parser.add_argument("--model-size", "--size", choices=SIZES, default="tiny", dest="model_size")
    parser.add_argument("--for", dest="base", type=Path, help="a checkpoint that it is made for")
    parser.add_argument("--kind", choices=KINDS, default="lora")
    parser.add_argument("--names", choices=NAMINGS, default="kohya")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("out", type=Path)
    parser.set_defaults(run=new_lora)
    parser = commands.add_parser("export", help="export a checkpoint with LoRAs to an ONNX pair")
    parser.add_argument("checkpoint", type=Path)
    common.add_loras(parser)
    parser.add_argument("--dtype", choices=DTYPES, default=None, help="default: as the source")
    parser.add_argument(
        "--weightless", action="store_true", help="the graph alone, with weights as inputs"
    )
    parser.add_argument("--ema", action="store_true", help="use the averaged twins of the weights")
    parser.add_argument("out", type=Path, help="folder for unet.onnx and unet.safetensors")
    parser.set_defaults(run=export)


def inspect(args: argparse.Namespace) -> Report:
    """Say what a file is."""
    path: Path = args.file
    if path.suffix in (".engine", ".json") and STEM.fullmatch(path.name.split(".")[0]):
        entry = Library(path.parent).entry(path.name.split(".")[0], None)
        return Report(data={"kind": "engine", **facts(entry)}, lines=[f"An engine: {entry.text}."])
    try:
        return _inspect_checkpoint(path, fingerprint=args.fingerprint)
    except UnsupportedModelError as error:
        try:
            return _inspect_lora(path)
        except EngineRoomError:
            raise error from None


def _inspect_checkpoint(path: Path, *, fingerprint: bool) -> Report:
    with Model(path) as model:
        arch, checkpoint = model.architecture, model.checkpoint
        count = sum(math.prod(shape) for shape in checkpoint.shapes.values())
        data = {
            "kind": "checkpoint",
            "label": arch.label,
            "family": arch.family,
            "architecture": arch.to_json(),
            "architecture_id": arch.id,
            "parameters": count,
            "dtype": NAMES[checkpoint.dtype],
            "prediction": checkpoint.prediction_type(),
            "metadata": dict(checkpoint.source.metadata),
        }
        if fingerprint:
            data["fingerprint"] = checkpoint.fingerprint()
    lines = [
        f"{path.name}: {arch.label}, {count / 1e6:.0f} million UNet weights in {data['dtype']}",
        f"architecture {arch.id[:16]}",
    ]
    if fingerprint:
        lines.append(f"fingerprint {data['fingerprint']}")
    return Report(data=data, lines=lines)


def _inspect_lora(path: Path) -> Report:
    lora = read_lora(path)
    base = lora.base()
    data = {"kind": "lora", "base": base, "modules": len(lora.modules), "unknown": lora.unknown}
    lora.close()
    made_for = f"for {base}" if base else "for a base that its names do not tell"
    return Report(data=data, lines=[f"{path.name}: a LoRA {made_for}, {data['modules']} modules"])


def new_checkpoint(args: argparse.Namespace) -> Report:
    """Write a synthetic checkpoint."""
    path = make_checkpoint(
        args.out, family=args.family, size=args.model_size, seed=args.seed, dtype=args.dtype
    )
    size = path.stat().st_size
    line = f"{path}: {args.family} {args.model_size}, random weights, {common.megabytes(size)}"
    return Report(data={"path": str(path), "bytes": size}, lines=[line])


def new_lora(args: argparse.Namespace) -> Report:
    """Write a synthetic LoRA."""
    arch = family(args.family, args.model_size)
    if args.base:
        with Model(args.base) as model:
            arch = model.architecture
    path = make_lora(
        args.out,
        architecture=arch,
        kind=args.kind,
        names=args.names,
        rank=args.rank,
        seed=args.seed,
    )
    size = path.stat().st_size
    line = f"{path}: {args.kind} for {arch.label}, random weights, {common.megabytes(size)}"
    return Report(data={"path": str(path), "bytes": size}, lines=[line])


def _export_graph(model: Model, folder: Path, dtype: str) -> Report:
    path = ensure_folder(folder) / ONNX
    arch = model.architecture
    job = {"kind": "emit", "architecture": arch.to_json(), "dtype": dtype, "out": str(path)}
    result = run_job(job)
    line = f"{path}: {arch.label} in {dtype}, weights as inputs, {result['nodes']} nodes"
    return Report(data={"path": str(path), "dtype": dtype, **result}, lines=[line])


def export(args: argparse.Namespace) -> Report:
    """Export a checkpoint with its LoRAs."""
    loras = common.loras_of(args)
    with Model(args.checkpoint, ema=args.ema) as model:
        stored = {"F16": "fp16", "BF16": "bf16", "F32": "fp32"}
        dtype = args.dtype or stored.get(NAMES[model.checkpoint.dtype], "fp16")
        if args.weightless:
            return _export_graph(model, args.out, dtype)
        if args.out.resolve() == args.checkpoint.resolve().parent and (
            args.checkpoint.name == "unet.safetensors"
        ):
            raise SettingError(
                f"The export would replace its own source, '{args.checkpoint}'.",
                hint="Choose another folder.",
            )
        result = export_pair(
            model.merged(loras, DTYPES_BY_NAME[dtype]),
            model.architecture,
            args.out,
            dtype=dtype,
            origin=model.origin(loras),
            on_progress=ProgressLine("export"),
        )
        reports = model.reports(loras)
        label = model.architecture.label
    data = {
        "folder": str(result.folder),
        "fingerprint": result.fingerprint,
        "bytes": result.nbytes,
        "dtype": dtype,
        "loras": [report.to_json() for report in reports],
    }
    lines = [
        *(report.sentence for report in reports),
        f"{result.folder}: unet.onnx and unet.safetensors, {label} in {dtype}, "
        f"{common.megabytes(result.nbytes)}",
    ]
    return Report(data=data, lines=lines)
