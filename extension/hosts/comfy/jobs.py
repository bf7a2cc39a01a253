"""What the nodes do besides routing: build, export, compare; with progress and cancel."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.sample
import comfy.utils
import folder_paths
import torch

from ... import baking
from ...accuracy import relative_l2
from ...errors import CancelledError, SettingError
from ...files import child_folder
from ...onnx_export import export_pair
from ...routed import DTYPE_NAMES
from ...serving import Target
from ...shapes import Shape
from ...wanted import Job
from .loading import model_facts, place_of
from .room import room
from .routing import WaitProgress, route, served_model, unroute
from .weights import PatchedWeights


def job_of(model: Any, shape: Shape, precision: str = "") -> Job:
    """The engine job for a MODEL as its calls will arrive.

    Args:
        precision: of the engine; empty for the host's.

    Raises:
        UnsupportedModelError: it is no UNet that engines can serve.
        MissingPackageError: no backend is installed for its device.
    """
    arch = served_model(model).require()
    base = model.model
    dtype = getattr(base, "manual_cast_dtype", None) or base.get_dtype()
    if not precision and dtype not in DTYPE_NAMES:
        raise SettingError(f"The model computes in {dtype}, which no engine does.")
    target = Target(device=place_of(model.load_device), dtype=precision or DTYPE_NAMES[dtype])
    return Job(arch=arch, shape=shape, target=target)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """A cancelled job ends as the host's own interrupt where that is what cancelled it."""
    try:
        yield
    except CancelledError:
        comfy.model_management.throw_exception_if_processing_interrupted()
        raise


def build(model: Any, shape: Shape, *, precision: str = "") -> str:
    """Build, verify and load the engine for ``shape``; returns a report.

    Raises:
        EngineRoomError: it cannot be built; says why.
    """
    job = job_of(model, shape, precision)
    tiers = room().tiers
    key = tiers.key(job)
    tiers.failed.pop(key.stem, None)
    present = room().library.find(key) is not None
    progress, started = WaitProgress(), time.monotonic()
    with _interruptible():
        ready = tiers.provide(job, on_progress=progress, cancel=progress.cancel)
    if not ready:
        raise SettingError(f"No engine: {tiers.failed[key.stem]}")
    entry = room().library.entry(key.stem, job.target.machine)
    done = "was there already" if present else f"built in {time.monotonic() - started:.0f} s"
    return (
        f"{job.arch.label}, {shape.label}: engine {key.stem} {done}, "
        f"{entry.bytes_on_disk / 1e6:.0f} MB; {entry.text}. "
        "It serves every checkpoint and LoRA of this kind."
    )


def bake(model: Any, shape: Shape, *, precision: str = "") -> str:
    """Freeze the MODEL, every patch merged, into an engine for ``shape``; returns a report.

    Raises:
        EngineRoomError: it cannot be built; says why.
    """
    job = job_of(model, shape, precision)
    progress, started = WaitProgress(), time.monotonic()
    with _interruptible(), torch.inference_mode(False):
        entry = baking.bake(
            room().library,
            job.arch,
            PatchedWeights(model),
            shape,
            job.target,
            label=", ".join(["model", *_patch_words(model)]),
            source={"host": "ComfyUI"},
            model=model_facts(model),
            on_progress=progress,
            cancel=progress.cancel,
        )
    seconds = time.monotonic() - started
    return (
        f"{job.arch.label}, {shape.label}: baked engine {entry.stem}, {seconds:.0f} s, "
        f"{entry.bytes_on_disk / 1e6:.0f} MB. It serves whenever these very weights are loaded, "
        "and by the node Load TRT engine without a checkpoint."
    )


def _patch_words(model: Any) -> list[str]:
    count = len(getattr(model, "patches", {}))
    return [f"{count} patched weights"] if count else []


def export(model: Any, name: str) -> str:
    """Write the MODEL with every patch merged as an ONNX pair under the output folder.

    Raises:
        EngineRoomError: as ``export_pair``; also for a name that is none.
    """
    arch = served_model(model).require()
    folder = child_folder(Path(folder_paths.get_output_directory()), name)
    progress = WaitProgress()
    with _interruptible(), torch.inference_mode(False):
        export_pair(
            PatchedWeights(model),
            arch,
            folder,
            dtype="fp16",
            origin={"host": "ComfyUI"},
            on_progress=progress,
            cancel=progress.cancel,
        )
    return str(folder)


def compare(
    model: Any, positive: Any, negative: Any, latent: Any, *, seed: int, steps: int, cfg: float
) -> tuple[Any, Any, str]:
    """Sample with the host and with engines: both latents, and a report."""
    samples = comfy.sample.fix_empty_latent_channels(model, latent["samples"])
    noise = comfy.sample.prepare_noise(samples, seed)
    served = served_model(model)
    results, seconds = [], []
    for runner in (unroute(model), route(model, policy="wait")):
        if served.arch is not None:
            served.routed.counters.reset()
        started = time.perf_counter()
        results.append(
            comfy.sample.sample(
                runner, noise, steps, cfg, "euler", "normal", positive, negative, samples, seed=seed
            )
        )
        seconds.append(time.perf_counter() - started)
    error = relative_l2(results[1], results[0])
    report = (
        f"{served.sentence}. Latents differ by {error:.2g} (relative L2). "
        f"Host {seconds[0]:.2f} s, with engines {seconds[1]:.2f} s (the first run of an engine "
        f"includes making it ready). Engines hold {room().pool.nbytes / 1e6:.0f} MB."
    )
    return {**latent, "samples": results[0]}, {**latent, "samples": results[1]}, report
