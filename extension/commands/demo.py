"""demo: the whole main job on a small synthetic model, end to end, with a table at the end."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..comparing import Comparison, compare
from ..errors import EngineRoomError
from ..files import ensure_folder
from ..library import Library
from ..machine import backend_versions, default_device
from ..model import LoraChoice, Model
from ..onnx_export import export_pair
from ..parity import MOST_LIMIT
from ..picture import save_png, side_by_side
from ..routed import RoutedUNet
from ..sampler import Conditioning, SampleSettings
from ..serving import Target, build_shared, host_unet, serve_with
from ..synthetic import make_checkpoint
from ..synthetic_lora import make_lora
from . import common
from .common import ProgressLine, Report

PROMPT = "a lighthouse at dusk, oil painting"
SETTINGS = SampleSettings(width=256, height=256, steps=10, cfg=4.0, seed=7, sampler="dpmpp_2m")
RTX_CAPABILITIES = ("8.9", "12.0")


def add(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "demo", help="checkpoint + LoRA to a running engine, on a small synthetic model"
    )
    parser.add_argument("--folder", type=Path, default=Path("demo"), help="where files go")
    parser.set_defaults(run=demo)


@dataclass(frozen=True, kw_only=True)
class _Scene:
    """What every step of the demo needs."""

    folder: Path
    library: Library
    model: Model
    target: Target
    conditioning: Conditioning
    loras: tuple[LoraChoice, LoraChoice]


def demo(args: argparse.Namespace) -> Report:
    """Run the main job; every figure in the table was measured in this run."""
    folder = ensure_folder(args.folder)
    checkpoint = make_checkpoint(folder / "tiny-sd15.safetensors", family="sd15", size="tiny")
    with Model(checkpoint) as model:
        names = ("ink", "neon")
        loras = [
            LoraChoice(
                path=make_lora(
                    folder / f"lora-{name}.safetensors", architecture=model.architecture, seed=seed
                ),
                strength=0.8,
            )
            for seed, name in enumerate(names, 1)
        ]
        target = Target(device=default_device())
        conditioning = model.conditioning(PROMPT, "", SETTINGS)
        scene = _Scene(
            folder=folder,
            library=Library(folder / "engines"),
            model=model,
            target=target,
            conditioning=conditioning,
            loras=(loras[0], loras[1]),
        )
        return _run(scene)


def _run(scene: _Scene) -> Report:
    model, first, second = scene.model, *scene.loras
    pair = export_pair(
        model.merged([first], torch.float16),
        model.architecture,
        scene.folder / "export",
        dtype="fp16",
        origin=model.origin([first]),
        on_progress=ProgressLine("export"),
    )
    shape = replace(SETTINGS.shape, tokens=scene.conditioning.positive.shape[1])
    entry = build_shared(
        scene.library,
        model.architecture,
        shape,
        scene.target,
        on_progress=ProgressLine("build"),
    )
    unet = _serve(scene, entry, first)
    engines = len(scene.library.entries())
    runs = [_compare(scene, unet, first), _change_lora(scene, unet, second)]
    builds = len(scene.library.entries()) - engines
    rtx = _ahead_of_time(scene, shape)
    served = unet.counters.totals
    unet.close()
    pictures = _save(scene, runs)
    data = {
        "export": {"folder": str(pair.folder), "bytes": pair.nbytes},
        "engine": entry.stem,
        "engine_bytes": entry.bytes_on_disk,
        "build_seconds": entry.manifest.build_seconds if entry.manifest else 0.0,
        "backend": scene.target.backend,
        "runs": [run.to_json() for run, _ in runs],
        "lora_change_seconds": runs[1][1],
        "builds_for_lora_change": builds,
        "served": served[0],
        "host": served[1],
        "tensorrt_rtx": rtx,
        "pictures": str(pictures),
    }
    return Report(data=data, lines=_lines(scene, data, runs), exit_code=0 if _good(data) else 1)


def _serve(scene: _Scene, entry: Any, lora: LoraChoice) -> RoutedUNet:
    weights = scene.model.weights([lora], scene.target.torch_dtype, scene.target.device)
    arch = scene.model.architecture
    return serve_with(scene.library, entry, arch, weights, scene.target)


def _compare(scene: _Scene, unet: RoutedUNet, lora: LoraChoice) -> tuple[Comparison, float]:
    weights = dict(unet.weights)
    host = host_unet(scene.model.architecture, weights, scene.target)
    settings, target = SETTINGS, scene.target
    return compare(scene.model, host, unet, weights, scene.conditioning, settings, target), 0.0


def _change_lora(scene: _Scene, unet: RoutedUNet, lora: LoraChoice) -> tuple[Comparison, float]:
    started = time.perf_counter()
    weights = scene.model.weights([lora], scene.target.torch_dtype, scene.target.device)
    unet.set_weights(weights, epoch=str(lora.path))
    seconds = time.perf_counter() - started
    return _compare(scene, unet, lora)[0], seconds


def _ahead_of_time(scene: _Scene, shape: Any) -> dict[str, Any] | None:
    """The real TensorRT-RTX engine for two generations of RTX cards; needs no GPU."""
    if "tensorrt_rtx" not in backend_versions():
        return None
    target = Target(
        device=scene.target.device,
        backend="tensorrt_rtx",
        dtype="fp16",
        capabilities=RTX_CAPABILITIES,
    )
    arch, progress = scene.model.architecture, ProgressLine("tensorrt-rtx")
    try:
        entry = build_shared(scene.library, arch, shape, target, on_progress=progress)
    except EngineRoomError as error:
        return {"error": str(error)}
    seconds = entry.manifest.build_seconds if entry.manifest else 0.0
    return {"id": entry.stem, "bytes": entry.bytes_on_disk, "build_seconds": seconds}


def _save(scene: _Scene, runs: list[tuple[Comparison, float]]) -> Path:
    pictures, labels = [], []
    for (run, _), lora in zip(runs, scene.loras, strict=True):
        pictures += [run.host_picture, run.engine_picture]
        labels += [f"torch, {lora.path.stem}", f"engine, {lora.path.stem}"]
    return save_png(scene.folder / "demo.png", side_by_side(pictures, labels))


def _good(data: dict[str, Any]) -> bool:
    worst = max(run["worst_call_error"] for run in data["runs"])
    rtx = data["tensorrt_rtx"]
    built = rtx is None or "error" not in rtx
    return (
        worst <= MOST_LIMIT and data["host"] == 0 and not data["builds_for_lora_change"] and built
    )


def _lines(scene: _Scene, data: dict[str, Any], runs: list[tuple[Comparison, float]]) -> list[str]:
    rows = [["LoRA", "error per call", "PSNR", "torch call", "engine call", "engine was built"]]
    for i, ((run, _), lora) in enumerate(zip(runs, scene.loras, strict=True)):
        built = f"in {data['build_seconds']:.1f} s" if i == 0 else "not again"
        rows.append(
            [
                lora.path.stem,
                f"{max(run.errors):.1e}",
                f"{run.psnr:.1f} dB",
                f"{run.host_ms:.0f} ms",
                f"{run.engine_ms:.0f} ms",
                built,
            ]
        )
    lines = ["", *common.table(rows), ""]
    lines.append(
        f"The weights are synthetic. Engine {data['engine']} ({data['backend']}, "
        f"{common.megabytes(data['engine_bytes'])}, without weights) served {data['served']} of "
        f"{data['served'] + data['host']} calls."
    )
    lines.append(f"LoRA change: {data['lora_change_seconds']:.2f} s to merge, no build.")
    rtx = data["tensorrt_rtx"]
    if rtx and "error" not in rtx:
        capabilities = " and ".join(RTX_CAPABILITIES)
        lines.append(
            f"TensorRT-RTX engine for compute capability {capabilities}, built without a GPU: "
            f"{common.megabytes(rtx['bytes'])} in {rtx['build_seconds']:.1f} s."
        )
    elif rtx:
        lines.append(f"TensorRT-RTX: {rtx['error']}")
    lines.append(f"ONNX pair: {data['export']['folder']}. Pictures: {data['pictures']}")
    return lines
