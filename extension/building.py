"""Build an engine into the library: lock, space, worker, publish; one at a time."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .architecture import Architecture
from .build_history import BuildHistory
from .errors import CancelledError, EngineRoomError
from .files import check_free_space, ensure_folder
from .jobs import Limits, WorkerSetup, run_job
from .key import EngineKey
from .library import Entry, Library
from .log import logger
from .machine import can_build_ahead
from .manifest import Manifest
from .packages import worker_folders
from .progress import CancelToken, ProgressSink
from .worker_tasks import SAFETENSORS

WORK_PREFIX = ".build-"
SHARED_SPACE = 200_000_000
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
    ensure_folder(library.folder)
    with library.lock(key.stem):
        present = library.find(key)
        if present is not None:
            return present
        _remove_stale(library, key.stem)
        _check_space(library, request)
        work = Path(tempfile.mkdtemp(dir=library.folder, prefix=f"{WORK_PREFIX}{key.stem}-"))
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
        packages=worker_folders(key.backend), hide_gpu=can_build_ahead(key.capabilities)
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
        shutil.copyfile(source, target)


def _remove_stale(library: Library, stem: str) -> None:
    """Remove what a killed build left; the stem's lock is held, so nobody is using it."""
    for path in library.folder.glob(f"{WORK_PREFIX}{stem}-*"):
        shutil.rmtree(path, ignore_errors=True)


def _check_space(library: Library, request: BuildRequest) -> None:
    needed = SHARED_SPACE
    if request.pair is not None:
        needed += int(BAKED_SPACE_FACTOR * (request.pair / SAFETENSORS).stat().st_size)
    check_free_space(library.folder, needed)


@dataclass
class _Pending:
    request: BuildRequest
    cancel: CancelToken = field(default_factory=CancelToken)


class BuildQueue:
    """Builds in the background, one at a time, in order; thread-safe.

    Args:
        on_progress: called with the stem and progress, from the queue's thread.
        on_end: called with the stem and the entry, or the error that ended the build.
    """

    def __init__(
        self,
        library: Library,
        *,
        on_progress: Callable[[str, Any], None] = lambda stem, progress: None,
        on_end: Callable[[str, Entry | EngineRoomError], None] = lambda stem, outcome: None,
    ) -> None:
        self._library = library
        self._on_progress = on_progress
        self._on_end = on_end
        self._pending: dict[str, _Pending] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def stems(self) -> list[str]:
        """What is being built (first) and what waits."""
        with self._changed:
            return list(self._pending)

    def add(self, request: BuildRequest) -> str:
        """Queue a build unless it is queued already; returns its stem."""
        stem = request.key.stem
        with self._changed:
            self._pending.setdefault(stem, _Pending(request))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, daemon=True)
                self._thread.start()
        return stem

    def cancel(self, stem: str | None = None) -> None:
        """Cancel one build, or all; the running one ends within a second."""
        with self._changed:
            for name, item in self._pending.items():
                if stem in (None, name):
                    item.cancel.cancel()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is queued; False if ``timeout`` seconds were not enough."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout)

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._pending:
                    self._thread = None
                    self._changed.notify_all()
                    return
                stem, item = next(iter(self._pending.items()))
            outcome = self._build(stem, item)
            with self._changed:
                self._pending.pop(stem, None)
                self._changed.notify_all()
            self._on_end(stem, outcome)

    def _build(self, stem: str, item: _Pending) -> Entry | EngineRoomError:
        try:
            item.cancel.raise_if_cancelled()
            return build_engine(
                self._library,
                item.request,
                on_progress=lambda progress: self._on_progress(stem, progress),
                cancel=item.cancel,
            )
        except CancelledError as error:
            return error
        except EngineRoomError as error:
            logger.warning("Engine %s was not built: %s", stem, error)
            return error
