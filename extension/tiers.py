"""The best ready tier for each call: engines are found, built, verified and loaded on demand.

While an engine is missing the host serves. A missing one is built by the worker in the background
(or at once, where the user would rather wait), then verified on this device with strong random
weights, in a thread of its own, and only then offered to the router.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from . import threads
from .architecture import Architecture
from .build_history import BuildHistory
from .building import BuildRequest, build_engine, shortage
from .contest import HOST, host_is_timed, kind_of_engine
from .errors import (
    CancelledError,
    EngineRoomError,
    LibraryError,
    MemoryShortError,
    WeightsChangedError,
)
from .failure_record import FailureRecord, lasts
from .instant import InstantTier, stem_of
from .key import EngineKey
from .library import Entry, Library
from .log import logger
from .memory import HEADROOM, free_bytes, require_free, shortfall
from .pool import EnginePool
from .progress import CancelToken, Progress
from .router import INSTANT, Call
from .serving import candidate_of, load_verified, needed_bytes
from .tier_settings import TierSettings
from .wanted import Event, Job, target_of
from .weight_format import FormatChoice
from .wishes import Wishes

CLOSE_SECONDS = 20.0
POLL_SECONDS = 0.1


class TierManager:
    """Answers misses with engines; one worker and one loader at a time.

    Args:
        on_event: called from any thread with building, ready, failed and cancelled engines.
    """

    def __init__(
        self,
        library: Library,
        pool: EnginePool,
        settings: TierSettings | None = None,
        *,
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self.library = library
        self.pool = pool
        self.settings = settings or TierSettings()
        self.on_event = on_event
        self.failed: dict[str, str] = {}
        self.instant = InstantTier(pool)
        self.unable = self.short = ""
        self._record = FailureRecord(library.folder)
        self._wishes: Wishes[Job] = Wishes()
        self._jobs: dict[Hashable, tuple[Job, EngineKey] | None] = {}
        self._formats = FormatChoice(pool)
        self._thread: threading.Thread | None = None
        self._working = threading.Lock()

    def miss(
        self,
        arch: Architecture,
        call: Call,
        *,
        policy: str = "",
        on_progress: Callable[[Progress], None] = lambda progress: None,
        cancel: CancelToken | None = None,
    ) -> bool:
        """A call that no engine serves, or an instant one: get one according to the policy.

        Args:
            policy: in place of the one in the settings.
            on_progress, cancel: of a build that is waited for.

        Returns:
            Whether an engine was loaded meanwhile, so that routing is worth another try.
        """
        policy = policy or self.settings.policy
        timed = host_is_timed(self.pool, call)
        found = self._job_of(arch, call) if "shared" in call.modes else None
        waits = policy == "wait" and found is not None and not self._given_up(found[1].stem)
        if timed and self.settings.instant and not waits and INSTANT in call.modes:
            self.instant.miss(arch, call)
        if found is None:
            return False
        job, key = found
        stem = key.stem
        calls = self._wishes.miss(stem)
        if self.knows(stem):
            return False
        if policy == "wait":
            return self.provide(job, on_progress=on_progress, cancel=cancel)
        present = self.library.find(key, job.target.machine) is not None
        enough = timed and policy != "never" and calls >= self.settings.after_calls
        if present or (enough and self._has_room()):
            self.want(job, asked=False)
        return False

    def explain(self, arch: Architecture, call: Call) -> str:
        """Why a call that misses an engine has none yet; empty where nothing more is known."""
        if "shared" not in call.modes:
            return ""
        found = self._job_of(arch, call)
        if found is None:
            return self.unable
        stem = found[1].stem
        if stem in self.failed:
            return self.failed[stem]
        return "it is being made ready" if stem in self._wishes else self.short

    def _has_room(self) -> bool:
        """Whether a build that nobody asked for may start now; where not, it is said once."""
        short = shortage(self.library.folder)
        text = f"No engine is built by itself for now: {short}." if short else ""
        if text and text != self.short:
            logger.warning("%s", text)
        self.short = text
        return not short

    def _job_of(self, arch: Architecture, call: Call) -> tuple[Job, EngineKey] | None:
        """The job for a call, remembered; None where no backend can serve it (said once)."""
        name = (call.architecture, call.shape, call.dtype, call.device)
        if name not in self._jobs or self._lacks_copies(self._jobs[name]):
            try:
                job = Job(arch=arch, shape=call.shape, target=target_of(call))
                key = self.key(job)
                past = self._record.recall(key.stem, job.target.machine)
                if past:
                    self.failed.setdefault(key.stem, f"{past} (As before.)")
                self._jobs[name] = (job, key)
            except EngineRoomError as error:
                self.unable = str(error)
                logger.warning("No engines: %s", error)
                self._jobs[name] = None
        return self._jobs[name]

    def _lacks_copies(self, found: tuple[Job, EngineKey] | None) -> bool:
        """Whether the memory is too small for the copies of an engine: it has another key then."""
        if found is None or found[1].conv3x3_format == "linear":
            return False
        return found[1].stem in self.pool.lacking

    def key(self, job: Job) -> EngineKey:
        """Key of the engine for a job: with copies of 3x3 weights only where memory allows."""
        if job.fingerprint:
            return job.target.key(job.arch, job.shape, fingerprint=job.fingerprint)
        copied = job.target.key(job.arch, job.shape)
        if copied.conv3x3_format == "linear":
            return copied
        bound = replace(copied, conv3x3_format="linear")
        if not self.settings.staging:
            return bound
        return self._formats.choose(copied, bound, job.arch, job.target.device)

    def expected_seconds(self, job: Job, *, baked: bool = False) -> float:
        """What a build will take, by past builds on this machine."""
        target = job.target
        count = len(job.arch.parameters())
        history, mode = BuildHistory(self.library.folder), "baked" if baked else "shared"
        return history.expect(target.backend, mode, count, len(target.capabilities))

    def want(self, job: Job, *, asked: bool = True) -> str:
        """Get an engine in the background; returns its stem.

        Args:
            asked: by a person, who comes before what calls have missed.
        """
        stem = self.key(job).stem
        with self._wishes.changed:
            self._wishes.add(stem, job, asked=asked)
            if self._thread is None:
                self._thread = threads.start(self._work, name="tiers", stop=self.cancel)
        return stem

    def promote(self, job: Job) -> None:
        """Bake an engine in the background, unless it is there, on its way, or has failed."""
        if self.knows(self.key(job).stem) or self.settings.policy == "never":
            return
        if self._has_room():
            self.want(job, asked=False)

    def _given_up(self, stem: str) -> bool:
        """Whether an engine has failed or is loaded: where it misses calls, it was set aside."""
        return stem in self.failed or self.pool.holds(stem)

    def knows(self, stem: str) -> bool:
        """Whether an engine is loaded, on its way, or has failed."""
        return stem in self._wishes or self._given_up(stem)

    def provide(
        self,
        job: Job,
        *,
        on_progress: Callable[[Progress], None] = lambda progress: None,
        cancel: CancelToken | None = None,
    ) -> bool:
        """Get an engine now: build, verify, load; False where that failed (and why is kept).

        Raises:
            CancelledError: ``cancel`` was set.
        """
        key = self.key(job)
        label = f"{job.arch.label}, {job.shape.label}"

        def tell(kind: str, text: str = "", progress: Progress | None = None) -> None:
            self.on_event(
                Event(stem=key.stem, label=label, kind=kind, text=text, progress=progress)
            )

        def show(progress: Progress) -> None:
            on_progress(progress)
            tell("building", progress=progress)

        with self._turn(cancel), self.pool.pace.disturbed():
            if self.pool.holds(key.stem):
                return True
            try:
                entry = self._entry(key, job, show, cancel)
                tell("loading")
                self._load(job, entry, cancel or CancelToken())
            except CancelledError:
                tell("cancelled")
                raise
            except WeightsChangedError as error:
                tell("cancelled", error.message)
                return False
            except MemoryShortError as error:
                self._lack(key.stem, label, error.message, tell)
                return False
            except EngineRoomError as error:
                self.failed[key.stem] = error.message
                if lasts(error):
                    self._record.keep(key.stem, error.message, job.target.machine)
                logger.warning("No engine for %s: %s The host serves.", label, error)
                tell("failed", error.message)
                return False
            except torch.cuda.OutOfMemoryError as error:
                self._lack(key.stem, label, shortfall(error), tell)
                return False
        tell("ready")
        self._record.forget(key.stem)
        self._drop_instant(key, job.target.device)
        self._trim(key.stem)
        return True

    @contextmanager
    def _turn(self, cancel: CancelToken | None) -> Iterator[None]:
        """One engine is made at a time; who waits for that may give up."""
        while not self._working.acquire(timeout=POLL_SECONDS):
            if cancel is not None:
                cancel.raise_if_cancelled()
        try:
            yield
        finally:
            self._working.release()

    def _lack(self, stem: str, label: str, text: str, tell: Callable[[str, str], None]) -> None:
        """Too little GPU memory for an engine: one without copies may still fit."""
        self.failed[stem] = text
        self.pool.lacking.add(stem)
        logger.warning("No engine for %s: %s. The host serves.", label, text.rstrip("."))
        tell("failed", text)

    def _drop_instant(self, key: EngineKey, device: str) -> None:
        """Free its memory, unless such steps can be measured: then the faster of both serves."""
        if self.pool.pace.milliseconds(kind_of_engine(key, device), HOST) is None:
            self.instant.drop(stem_of(key.architecture, key.shape, key.io_dtype, device))

    def _trim(self, newest: str) -> None:
        """Keep the disk budget; engines that are loaded or wanted stay."""
        if not self.settings.disk_budget:
            return
        loaded = (candidate.stem for candidate in self.pool.candidates())
        keep = {newest, *loaded, *self.wanted}
        for stem in self.library.trim(self.settings.disk_budget, keep):
            logger.info("Engine %s is deleted: the disk budget is used up.", stem)

    def _entry(
        self,
        key: EngineKey,
        job: Job,
        show: Callable[[Progress], None],
        cancel: CancelToken | None,
    ) -> Entry:
        """The engine on disk; a shared one is built where it is missing."""
        if job.fingerprint:
            present = self.library.find(key, job.target.machine)
            if present is None and job.make is not None:
                return job.make(show, cancel or CancelToken())
            if present is None:
                raise LibraryError("The engine with these weights baked in is gone.")
            return present
        label = f"{job.arch.label}, {job.shape.label}, {job.target.dtype}, shared"
        request = BuildRequest(key=key, architecture=job.arch, label=label)
        return build_engine(self.library, request, on_progress=show, cancel=cancel)

    def _load(self, job: Job, entry: Entry, cancel: CancelToken) -> None:
        target = job.target
        pause = cancel.raise_if_cancelled
        require_free(target.device, needed_bytes(entry))
        engine = load_verified(self.library, entry, job.arch, target, pause=pause)
        budget = None if target.device == "cpu" else int(free_bytes(target.device) / HEADROOM)
        self.pool.add(
            candidate_of(entry, target, ready=True),
            engine,
            staging_budget=budget,
            resident_bytes=entry.bytes_on_disk if job.fingerprint else 0,
        )
        self.library.update_state(entry.stem, last_used=time.time())

    def _work(self) -> None:
        while True:
            with self._wishes.changed:
                wish = self._wishes.take()
                if wish is None:
                    self._thread = None
                    return
            try:
                self.provide(wish.job, cancel=wish.cancel)
            except CancelledError:
                self.failed[wish.stem] = "cancelled"
            except Exception as error:
                self.failed[wish.stem] = str(error)
                logger.exception("Engine %s was not made ready.", wish.stem)
            self._wishes.done()

    @property
    def wanted(self) -> list[str]:
        """Stems that are being made ready (first) and that wait."""
        return self._wishes.stems

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is wanted; False if ``timeout`` seconds were not enough."""
        return self._wishes.wait(timeout)

    def cancel(self) -> None:
        """Cancel what is being built and drop what waits; nothing is tried again by itself."""
        self.failed.update(dict.fromkeys(self._wishes.cancel(), "cancelled"))

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Cancel everything and wait at most ``timeout`` seconds for the thread to end."""
        with self._wishes.changed:
            self.cancel()
            thread = self._thread
        if thread is not None:
            thread.join(timeout)
        self.instant.close(timeout)

    def retry(self) -> None:
        """Forget failures that may have passed, so that engines are tried again."""
        self.failed.clear()
        self.pool.lacking.clear()
        self.instant.retry()
        self._jobs.clear()
        self._formats.forget()
        self.unable = ""
