"""sample and compare."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..baking import bake_model
from ..comparing import compare, draw
from ..errors import SettingError
from ..model import LoraChoice, Model
from ..picture import save_png, side_by_side, tile, to_image
from ..routed import RoutedUNet
from ..sampler import PREDICTIONS, SAMPLERS, SCHEDULES, Conditioning, SampleSettings
from ..serving import Target, build_shared, host_unet, serve_with
from ..shapes import parse_pixels
from . import common
from .common import ProgressLine, Report

TIERS = ("torch", "shared", "baked")


def add(commands: Any) -> None:
    """Register the commands."""
    parser = commands.add_parser("sample", help="draw a picture with a checkpoint")
    _add_arguments(parser)
    parser.add_argument("--tier", choices=TIERS, default="shared", help="what runs the UNet")
    parser.set_defaults(run=sample_picture)
    parser = commands.add_parser("compare", help="the same seed through torch and an engine")
    _add_arguments(parser)
    parser.add_argument("--tier", choices=TIERS[1:], default="shared")
    parser.set_defaults(run=compare_pictures)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--out", type=Path, default=Path("picture.png"), help="PNG to write")
    parser.add_argument("--prompt", default="a photograph of a lighthouse at dusk")
    parser.add_argument("--negative", default="", help="what the picture should not show")
    parser.add_argument("--size", default="512", metavar="WxH", help="in pixels (default 512)")
    parser.add_argument("--pictures", type=int, default=1, help="drawn together (default 1)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--cfg", type=float, default=7.0, help="guidance scale; 1 is without")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sampler", choices=SAMPLERS, default="euler")
    parser.add_argument("--schedule", choices=SCHEDULES, default="normal")
    parser.add_argument("--prediction", choices=PREDICTIONS, default=None)
    common.add_loras(parser)
    common.add_target(parser)
    common.add_library(parser)


def settings_of(args: argparse.Namespace, model: Model) -> SampleSettings:
    """The job that the arguments describe; the prediction type is the file's, if it says so."""
    width, height = parse_pixels(args.size)
    return SampleSettings(
        width=width,
        height=height,
        batch=args.pictures,
        steps=args.steps,
        cfg=args.cfg,
        seed=args.seed,
        sampler=args.sampler,
        schedule=args.schedule,
        prediction=args.prediction or model.checkpoint.prediction_type() or "eps",
    )


def tokens_of(conditioning: Conditioning, settings: SampleSettings) -> int:
    """Context rows of a call: both prompts are repeated to one length."""
    rows = conditioning.positive.shape[1]
    return rows if settings.cfg == 1 else math.lcm(rows, conditioning.negative.shape[1])


def check_drawable(model: Model) -> None:
    """Raise SettingError for models that need more than a prompt."""
    arch = model.architecture
    if arch.in_channels != arch.out_channels:
        raise SettingError(
            f"{arch.label} needs a picture to work on; this command draws from a prompt alone.",
            hint="Use it in a host UI.",
        )


def routed(
    args: argparse.Namespace,
    model: Model,
    loras: list[LoraChoice],
    settings: SampleSettings,
    target: Target,
    tokens: int,
) -> RoutedUNet:
    """The UNet through the tier that was asked for; a missing engine is built."""
    library, progress = common.library_of(args), ProgressLine("build")
    shape = replace(settings.shape, tokens=tokens)
    weights = model.weights(loras, target.torch_dtype, target.device)
    if args.tier == "torch":
        arch = model.architecture
        return RoutedUNet(arch, weights, host_unet(arch, weights, target))
    fingerprint = None
    if args.tier == "baked":
        entry = bake_model(library, model, loras, shape, target, on_progress=progress)
        fingerprint = entry.key.fingerprint
    else:
        entry = build_shared(library, model.architecture, shape, target, on_progress=progress)
    arch = model.architecture
    return serve_with(library, entry, arch, weights, target, fingerprint=fingerprint)


def sample_picture(args: argparse.Namespace) -> Report:
    """Draw one job and write the PNG."""
    target, loras = common.target_of(args), common.loras_of(args)
    with Model(args.checkpoint) as model:
        check_drawable(model)
        settings = settings_of(args, model)
        conditioning = model.conditioning(args.prompt, args.negative, settings)
        unet = routed(args, model, loras, settings, target, tokens_of(conditioning, settings))
        latents = draw(model, unet, conditioning, settings, target, on_step=_step(settings.steps))
        facts = {
            "prompt": args.prompt,
            "negative": args.negative,
            "seed": settings.seed,
            "steps": settings.steps,
            "cfg": settings.cfg,
            "sampler": settings.sampler,
            "checkpoint": args.checkpoint.name,
            "loras": [f"{lora.path.name}:{lora.strength:g}" for lora in loras],
            "served": unet.counters.to_json(),
        }
        picture = to_image(tile(model.decode(latents)))
        sentence = unet.counters.sentence
        unet.close()
    path = save_png(args.out, picture, {"engine_room": json.dumps(facts)})
    return Report(data={"path": str(path), **facts}, lines=[f"{path}: {sentence}"])


def _step(total: int) -> Any:
    def show(index: int) -> None:
        if sys.stderr.isatty():
            end = "\n" if index + 1 == total else ""
            sys.stderr.write(f"\rstep {index + 1} of {total}{end}")

    return show


def compare_pictures(args: argparse.Namespace) -> Report:
    """Draw one job twice and write both pictures side by side."""
    target, loras = common.target_of(args), common.loras_of(args)
    with Model(args.checkpoint) as model:
        check_drawable(model)
        settings = settings_of(args, model)
        conditioning = model.conditioning(args.prompt, args.negative, settings)
        unet = routed(args, model, loras, settings, target, tokens_of(conditioning, settings))
        weights = dict(unet.weights)
        result = compare(model, unet.host, unet, weights, conditioning, settings, target)
        counters = unet.counters
        unet.close()
    sheet = side_by_side(
        [result.host_picture, result.engine_picture], ["torch", f"{args.tier} engine"]
    )
    path = save_png(args.out, sheet)
    data = {"path": str(path), **result.to_json(), "served": counters.to_json()}
    lines = common.table(
        [
            ["error per call", "PSNR", "torch", "engine", "peak memory"],
            [
                f"{max(result.errors):.2g}",
                f"{result.psnr:.1f} dB",
                f"{result.host_ms:.1f} ms",
                f"{result.engine_ms:.1f} ms",
                common.megabytes(result.peak_memory),
            ],
        ]
    )
    return Report(data=data, lines=[*lines, f"{path}: {counters.sentence}"])
