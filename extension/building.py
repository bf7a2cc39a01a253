"""Build an engine into the library: lock, space, worker, publish."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .architecture import Architecture
from .build_history import BuildHistory
from .files import (
    TEMPORARY_SUFFIX,
    check_free_space,
    ensure_folder,
    free_disk,
    sweep,
    temporary_folder,
    write_failure,
)
from .jobs import Limits, WorkerSetup, run_job
from .key import EngineKey
from .library import Entry, Library
from .machine import needs_no_gpu
from .manifest import Manifest
from .memory import free_ram
from .packages import worker_folders
from .progress import CancelToken, ProgressSink
from .worker_tasks import SAFETENSORS

WORK_PREFIX, PAIR_PREFIX = ".build-", ".pair-"
SHARED_SPACE = 200_000_000
DISK_FLOOR = 1_000_000_000
WORKER_RAM = 1_100_000_000  # measured at its peak: SDXL, batch 2; SD1.5 takes half
RAM_FLOOR = 500_000_000
BAKED_SPACE_FACTOR = 2.2  # the linked or copied weights, and the engine


@dataclass(frozen=True, kw_only=True)
class BuildRequest:
    """An engine to build.

    Attributes:
        architecture: of the model, as read from it.
        pair: folder with ``unet.safetensors`` in the engine's precision (baked only).
        source, model: for the manifest (baked only).
    """

    key: EngineKey
    architecture: Architecture
    label: str
    pair: Path | None = None
    source: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)


def build_engine(
    library: Library,
    request: BuildRequest,
    *,
    on_progress: ProgressSink = lambda progress: None,
    cancel: CancelToken | None = None,
    limits: Limits | None = None,
    setup: WorkerSetup | None = None,
) -> Entry:
    """Build unless the library has it; a second process that wants it waits, then finds it.

    Raises:
        EngineRoomError: as ``run_job``; also OutputError where space is short.
    """
    key, cancel = request.key, cancel or CancelToken()
    present = library.find(key)  # before the lock: a library may be read-only
    if present is not None:
        return present
    ensure_folder(library.folder)
    with library.lock(key.stem, pause=cancel.raise_if_cancelled):
        present = library.find(key)
        if present is not None:
            return present
        _remove_stale(library, key.stem)
        sweep(library.folder, f"{WORK_PREFIX}*", f"{PAIR_PREFIX}*", f".*{TEMPORARY_SUFFIX}")
        _check_space(library, request)
        work = temporary_folder(library.folder, f"{WORK_PREFIX}{key.stem}-")
        try:
            return _build(library, request, work, on_progress, cancel, limits, setup)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _build(
    library: Library,
    request: BuildRequest,
    work: Path,
    on_progress: ProgressSink,
    cancel: CancelToken,
    limits: Limits | None,
    setup: WorkerSetup | None,
) -> Entry:
    key, history = request.key, BuildHistory(library.folder)
    parameters = len(request.architecture.parameters())
    facts = (key.backend, key.weights, parameters, len(key.capabilities))
    if request.pair is not None:
        link_or_copy(request.pair / SAFETENSORS, work / SAFETENSORS)
    out = work / "unet.engine"
    job = {
        "kind": "build",
        "key": key.to_json(),
        "architecture": request.architecture.to_json(),
        "folder": str(work),
        "out": str(out),
        "expected_seconds": history.expect(*facts),
    }
    setup = setup or WorkerSetup(
        packages=worker_folders(key.backend), hide_gpu=needs_no_gpu(key.backend, key.capabilities)
    )
    result = run_job(job, on_progress=on_progress, cancel=cancel, limits=limits, setup=setup)
    cancel.raise_if_cancelled()
    manifest = Manifest(
        key=key,
        engine_bytes=result["engine_bytes"],
        engine_sha256=result["engine_sha256"],
        build_seconds=result["build_seconds"],
        activation_bytes=result["activation_bytes"],
        label=request.label,
        source=request.source,
        model=request.model,
    )
    entry = library.publish(out, manifest)
    history.record(*facts, result["build_seconds"])
    return entry


def link_or_copy(source: Path, target: Path) -> None:
    """Give ``source`` a second name, or copy it where the file system cannot."""
    try:
        os.link(source, target)
    except OSError:
        try:
            shutil.copyfile(source, target)
        except OSError as error:
            raise write_failure(target, error) from error


def _remove_stale(library: Library, stem: str) -> None:
    """Remove what a killed build left; the stem's lock is held, so nobody is using it."""
    for path in library.folder.glob(f"{WORK_PREFIX}{stem}-*"):
        shutil.rmtree(path, ignore_errors=True)


def shortage(folder: Path) -> str:
    """What is too short for a build that nobody asked for; empty where nothing is."""
    disk, memory = free_disk(folder), free_ram()
    if disk is not None and disk < SHARED_SPACE + DISK_FLOOR:
        return f"'{folder}' has only {disk / 1e9:.2f} GB free"
    if memory is not None and memory < WORKER_RAM + RAM_FLOOR:
        return f"only {memory / 1e9:.1f} GB of memory are free"
    return ""


def _check_space(library: Library, request: BuildRequest) -> None:
    needed = SHARED_SPACE
    if request.pair is not None:
        needed += int(BAKED_SPACE_FACTOR * (request.pair / SAFETENSORS).stat().st_size)
    check_free_space(library.folder, needed)
