"""bench: this checkpoint, this size, this GPU: the torch UNet against each tier of engines."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..accuracy import relative_l2
from ..baking import bake_model
from ..dispatch import run_unet
from ..errors import EngineRoomError, SettingError
from ..full_precision import reference_math
from ..library import Library
from ..model import Model
from ..ops_torch import TorchUNet
from ..parity import cast_inputs, limit_for, random_inputs
from ..serving import Target, build_shared, host_unet, serve_with
from ..shapes import Shape
from ..speed import Speed, record
from . import common
from .common import ProgressLine, Report

ROUNDS, LEAST_SECONDS, WARM_UP = 5, 0.4, 2
TORCH = "torch"


def add(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("bench", help="is an engine faster than torch on this machine?")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--baked", action="store_true", help="also an engine with weights inside")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"(default {ROUNDS})")
    common.add_loras(parser)
    common.add_shape(parser)
    common.add_target(parser)
    common.add_library(parser)
    parser.set_defaults(run=bench)


@dataclass
class Contender:
    """One way to compute a UNet call.

    Attributes:
        error: relative L2 against fp32 torch on the call that is timed.
        problem: why it takes no part, in words.
        times: milliseconds of each timed call.
    """

    name: str
    call: Callable[[], Tensor] | None = None
    stem: str = ""
    error: float = 0.0
    problem: str = ""
    times: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Milliseconds."""
        return statistics.median(self.times)


def bench(args: argparse.Namespace) -> Report:
    """Check every contender, time them in turns, and say which to use."""
    if not 1 <= args.rounds <= 100:
        raise SettingError("Rounds must be from 1 to 100.")
    library, target, shape = common.library_of(args), common.target_of(args), common.shape_of(args)
    with Model(args.checkpoint) as model:
        contenders = _contenders(args, library, model, target, shape)
        timed = [contender for contender in contenders if contender.call is not None]
        for _ in range(args.rounds):
            for contender in timed:
                contender.times += _round(contender.call, target.device)
        label = model.architecture.label
    best = _record(library, timed, target)
    lines = [
        f"{label}, {shape.label}, {target.dtype} on {target.machine.gpu}",
        *common.table([["", "ms a call", "times torch", "error"], *map(_row(timed), contenders)]),
        best,
    ]
    return Report(data=_facts(contenders, label, shape, target), lines=lines)


def _contenders(
    args: argparse.Namespace, library: Library, model: Model, target: Target, shape: Shape
) -> list[Contender]:
    loras, arch = common.loras_of(args), model.architecture
    weights = model.weights(loras, target.torch_dtype, target.device)
    place = torch.device(target.device)
    inputs = random_inputs(arch.for_shape(shape), shape, 500.0, seed=0, device=place)
    with reference_math(place):
        expected = run_unet(TorchUNet(arch, weights), inputs)
    cast = cast_inputs(inputs, target.torch_dtype)
    plain = Contender(TORCH, lambda: run_unet(host_unet(arch, weights, target), cast))
    found = [plain]
    builds: dict[str, Callable[[], Any]] = {
        "shared engine": lambda: build_shared(
            library, arch, shape, target, on_progress=ProgressLine("build")
        )
    }
    if args.baked:
        builds["baked engine"] = lambda: bake_model(
            library, model, loras, shape, target, on_progress=ProgressLine("bake")
        )
    for name, build in builds.items():
        found.append(_engine(name, build, library, model, weights, target, cast))
    _check(found, expected)
    return found


def _engine(
    name: str,
    build: Callable[[], Any],
    library: Library,
    model: Model,
    weights: Mapping[str, Tensor],
    target: Target,
    inputs: Mapping[str, Tensor],
) -> Contender:
    """An engine, built and verified; one that cannot be takes no part, and says why."""
    try:
        entry = build()
        unet = serve_with(
            library,
            entry,
            model.architecture,
            weights,
            target,
            fingerprint=entry.key.fingerprint or None,
        )
    except EngineRoomError as error:
        return Contender(name, problem=error.message)
    return Contender(name, lambda: run_unet(unet, dict(inputs)), stem=entry.stem)


def _check(contenders: list[Contender], expected: Tensor) -> None:
    """Nothing is timed that is not right."""
    for contender in contenders:
        if contender.call is None:
            continue
        with torch.no_grad():
            contender.error = relative_l2(contender.call(), expected)
    limit = limit_for(contenders[0].error)
    for contender in contenders[1:]:
        if contender.call is not None and contender.error > limit:
            contender.problem = f"wrong: error {contender.error:.2g}, allowed {limit:.2g}"
            contender.call = None


@torch.no_grad()
def _round(call: Callable[[], Tensor] | None, device: str) -> list[float]:
    """Milliseconds of calls for at least ``LEAST_SECONDS``, each waited for."""
    assert call is not None
    for _ in range(WARM_UP):
        call()
    _wait(device)
    times: list[float] = []
    started = time.perf_counter()
    while time.perf_counter() - started < LEAST_SECONDS or len(times) < WARM_UP:
        before = time.perf_counter()
        call()
        _wait(device)
        times.append(1e3 * (time.perf_counter() - before))
    return times


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def _row(timed: list[Contender]) -> Callable[[Contender], list[str]]:
    def row(contender: Contender) -> list[str]:
        if contender.call is None:
            return [contender.name, "-", "-", contender.problem]
        ratio = timed[0].median / contender.median
        return [contender.name, f"{contender.median:.2f}", f"{ratio:.2f}", f"{contender.error:.2g}"]

    return row


def _record(library: Library, timed: list[Contender], target: Target) -> str:
    """Keep each engine's speed with it; one sentence of advice."""
    plain = timed[0]
    for contender in timed[1:]:
        speed = Speed(host_ms=plain.median, engine_ms=contender.median)
        record(library, contender.stem, target.device, speed)
    best = min(timed, key=lambda contender: contender.median)
    if best is plain:
        return "torch is the fastest here: engines are not recommended at this size."
    return f"Use the {best.name}: {plain.median / best.median:.2f} times as fast as torch."


def _facts(contenders: list[Contender], label: str, shape: Shape, target: Target) -> dict[str, Any]:
    return {
        "model": label,
        "shape": shape.to_json(),
        "dtype": target.dtype,
        "gpu": target.machine.gpu,
        "contenders": {
            contender.name: {
                "id": contender.stem,
                "ms": contender.median if contender.times else None,
                "calls": len(contender.times),
                "error": contender.error,
                "problem": contender.problem,
            }
            for contender in contenders
        },
    }
