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
from ...architecture import Architecture
from ...errors import CancelledError, SettingError
from ...files import child_folder
from ...onnx_export import ExportResult, export_pair
from ...routed import DTYPE_NAMES
from ...serving import Target
from ...shapes import Shape
from ...wanted import Job
from .loading import model_facts, place_of
from .messages import say
from .room import room
from .routing import WaitProgress, served_model, unroute, waiting
from .weights import PatchedWeights

MODEL_FILES = (".safetensors", ".sft", ".ckpt", ".pt", ".pth", ".bin", ".gguf")


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


def build(model: Any, shape: Shape, *, precision: str = "") -> tuple[str, str]:
    """Build, verify and load the engine for ``shape``.

    Returns:
        The engine's stem, and a report.

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
    report = (
        f"{job.arch.label}, {shape.label}: engine {key.stem} {_done(present, started)}, "
        f"{entry.bytes_on_disk / 1e6:.0f} MB; {entry.text}. "
        "It serves every checkpoint and LoRA of this kind."
    )
    return key.stem, report


def bake(model: Any, shape: Shape, *, precision: str = "") -> tuple[str, str]:
    """Freeze the MODEL, every patch merged, into an engine for ``shape``.

    Returns:
        The engine's stem, and a report.

    Raises:
        EngineRoomError: it cannot be built; says why.
    """
    job, library = job_of(model, shape, precision), room().library
    progress, started = WaitProgress(), time.monotonic()
    with _interruptible(), torch.inference_mode(False), baking.pair_folder(library) as folder:
        pair = _export(model, job.arch, folder, job.target.dtype, progress)
        key = job.target.key(job.arch, shape, fingerprint=pair.fingerprint)
        present = library.find(key, job.target.machine) is not None
        entry = baking.bake_pair(
            library,
            pair,
            job.arch,
            shape,
            job.target,
            label=f"{model_name(model) or 'weights'} {pair.fingerprint[:8]}",
            source={"host": "ComfyUI"},
            model=model_facts(model),
            on_progress=progress,
            cancel=progress.cancel,
        )
    report = (
        f"{job.arch.label}, {shape.label}: baked engine {entry.stem} {_done(present, started)}, "
        f"{entry.bytes_on_disk / 1e6:.0f} MB. It serves whenever these very weights are loaded, "
        "and by the node Load TRT engine without a checkpoint."
    )
    return entry.stem, report


def _done(present: bool, started: float) -> str:
    return "was there already" if present else f"built in {time.monotonic() - started:.0f} s"


def model_name(model: Any) -> str:
    """The file that a MODEL was loaded from; empty where the host does not keep it."""
    left: list[Any] = [getattr(model, "cached_patcher_init", None)]
    while left:
        value = left.pop(0)
        if isinstance(value, list | tuple):
            left += value
        elif isinstance(value, str) and value.endswith(MODEL_FILES):
            return Path(value).name
    return ""


def _export(
    model: Any, arch: Architecture, folder: Path, dtype: str, progress: WaitProgress
) -> ExportResult:
    return export_pair(
        PatchedWeights(model),
        arch,
        folder,
        dtype=dtype,
        origin={"host": "ComfyUI"},
        on_progress=lambda moment: say(f"exporting the weights, {moment.fraction:.0%}"),
        cancel=progress.cancel,
    )


def export(model: Any, name: str, precision: str = "fp16") -> str:
    """Write the MODEL with every patch merged as an ONNX pair under the output folder.

    Raises:
        EngineRoomError: as ``export_pair``; also for a name that is none.
    """
    arch = served_model(model).require()
    folder = child_folder(Path(folder_paths.get_output_directory()), name)
    with _interruptible(), torch.inference_mode(False):
        _export(model, arch, folder, precision, WaitProgress())
    return str(folder)


def compare(
    model: Any, positive: Any, negative: Any, latent: Any, *, seed: int, steps: int, cfg: float
) -> tuple[Any, Any, str]:
    """Sample with the host and with engines: both latents, and a report."""
    samples = comfy.sample.fix_empty_latent_channels(model, latent["samples"])
    noise = comfy.sample.prepare_noise(samples, seed)
    served, results, seconds = served_model(model), [], []
    for runner in (unroute(model), waiting(model)):
        before = served.counters.copy()
        started = time.perf_counter()
        results.append(
            comfy.sample.sample(
                runner, noise, steps, cfg, "euler", "normal", positive, negative, samples, seed=seed
            )
        )
        seconds.append(time.perf_counter() - started)
    error = relative_l2(results[1], results[0])
    report = (
        f"{served.counters.since(before).sentence}. Latents differ by {error:.2g} (relative L2). "
        f"Host {seconds[0]:.2f} s, with engines {seconds[1]:.2f} s (the first run of an engine "
        f"includes making it ready). Engines hold {room().pool.nbytes / 1e6:.0f} MB."
    )
    return {**latent, "samples": results[0]}, {**latent, "samples": results[1]}, report
