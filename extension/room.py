"""What one process has of Engine Room: a library, engines in memory, tiers, models served."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import packages
from .architecture import Architecture
from .backend_choice import choose, surroundings
from .baking import LiveFingerprint
from .binding import TORCH_DTYPES
from .engine_state import State
from .errors import (
    CancelledError,
    EngineRoomError,
    UnsupportedMachineError,
    UnsupportedModelError,
)
from .library import Entry, Library
from .live import LiveWeights, live_architecture
from .log import logger
from .machine import backend_versions, machine_of
from .pool import EnginePool
from .progress import CancelToken, Progress
from .promotion import Promotions
from .routed import DTYPE_NAMES, RoutedUNet
from .router import INSTANT, Call, Counters, Host, Reason
from .serving import Target
from .tier_settings import TierSettings
from .tiers import TierManager
from .wanted import Event, Job
from .watch import NotFiniteError

LOG_LINES = 300
MODES = {
    "auto": ("shared", "baked", INSTANT),
    "shared": ("shared",),
    "baked": ("baked",),
    INSTANT: (INSTANT,),
}


class ServedModel:
    """A live UNet module of the host whose calls may go through engines.

    Attributes:
        refusal: why no engine can ever serve it, in words; empty where one can.
        tier: engines that may serve it: ``auto``, ``shared``, ``baked`` or ``instant``.
        precision: of the engines; empty for the host's own.
    """

    def __init__(self, room: Room, unet: nn.Module, resize: str) -> None:
        self._room = room
        self.refusal = ""
        self.counters = Counters(parent=room.counters)
        self.policy = ""
        self.tier = "auto"
        self.precision = ""
        self.on_progress: Callable[[Progress], None] = lambda progress: None
        self.cancel: CancelToken | None = None
        self._checked: Hashable = object()
        self._problem: str | None = None
        self.arch: Architecture | None = None
        try:
            self.arch = live_architecture(unet, resize=resize)
        except EngineRoomError as error:
            self.refusal = error.message
            logger.info("No engine for this model: %s", error)
            return
        self.weights = LiveWeights(unet, self.arch)
        self._fingerprint = LiveFingerprint(self.weights)
        self._baked: list[Entry] = []
        self.routed = RoutedUNet(
            self.arch,
            self.weights,
            _no_host,
            pool=room.pool,
            counters=room.counters,
            on_miss=self._miss,
            explain=self._explain,
            on_served=self._served,
        )
        self.counters = self.routed.counters

    def serve(self, x: Tensor, *args: Any, epoch: Hashable, features: list[str]) -> Tensor | None:
        """One call (x, timesteps, context, y, control); None where the host must serve.

        Args:
            epoch: the weights epoch; the module is examined again when it changes.
        """
        if self.refusal:
            self.count_refusal()
            return None
        precision = self.precision or DTYPE_NAMES.get(x.dtype, "")
        if (epoch, precision) != self._checked:
            self.weights.refresh()
            self._problem = _unsupported(x.device) or self.weights.problem(x.device)
            self._checked = (epoch, precision)
            self._baked = []
            if not self._problem:
                self._baked = self._room.baked(self.require(), str(x.device), precision)
        if self._problem:
            self.routed.count_host(Reason.WEIGHTS, self._problem)
            return None
        fingerprint, promotes = None, self._room.tiers.settings.promote_after > 0
        if (self._baked or promotes) and "baked" in MODES[self.tier]:
            fingerprint = self._find_baked(str(x.device), precision, epoch)
        self.routed.modes, self.routed.precision = MODES[self.tier], precision
        self.routed.set_weights(self.weights, epoch=epoch, fingerprint=fingerprint)
        return self.routed.serve(x, *args, features=features)

    def count_refusal(self) -> None:
        """Count a call of a model that no engine can ever serve."""
        self.counters.count(Host(reason=Reason.MODEL, text=self.refusal))

    def whole_job(self, job: Callable[[], Tensor], device: torch.device | None = None) -> Tensor:
        """A sampling run, checked at its end; see ``RoutedUNet.whole_job``."""
        return job() if self.refusal else self.routed.whole_job(job, device)

    def require(self) -> Architecture:
        """The architecture; raises UnsupportedModelError where no engine can ever serve it."""
        if self.arch is None:
            raise UnsupportedModelError(self.refusal)
        return self.arch

    def _find_baked(self, device: str, precision: str, epoch: Hashable) -> str | None:
        """The fingerprint of the weights, once it is known; an engine that has it is loaded."""
        found = self._fingerprint.get((epoch, precision), TORCH_DTYPES[precision])
        for entry in self._baked:
            if entry.key.fingerprint == found:
                self._room.want_baked(self.require(), entry, device)
        return found

    def _miss(self, call: Call, answer: Host) -> bool:
        assert self.arch is not None
        return self._room.tiers.miss(
            self.arch, call, policy=self.policy, on_progress=self.on_progress, cancel=self.cancel
        )

    def _explain(self, call: Call) -> str:
        return self._room.tiers.explain(self.require(), call)

    def _served(self, call: Call) -> None:
        self._room.promotions.note(self.require(), call, self.weights)

    @property
    def sentence(self) -> str:
        """What happened to its calls, for people."""
        return self.refusal or self.counters.sentence


class Room:
    """Engine Room in one process.

    Args:
        folder: of the library; the private packages lie in ``packages`` inside it.

    Attributes:
        events: the last thing that happened to each wanted engine, by stem.
        lines: a log for people.
        installing, installed: how far an installation is, and how the last one ended.
    """

    def __init__(self, folder: Path, settings: TierSettings | None = None) -> None:
        packages.use_root(folder / "packages")
        self.library = Library(folder)
        self.pool = EnginePool()
        self.counters = Counters()
        self.events: dict[str, Event] = {}
        self.lines: deque[str] = deque(maxlen=LOG_LINES)
        self.installing = self.installed = ""
        self._baked: tuple[Hashable, list[Entry]] = (None, [])
        self.tiers = TierManager(self.library, self.pool, settings, on_event=self._note)
        self.promotions = Promotions(self.tiers)
        self._models: weakref.WeakKeyDictionary[nn.Module, ServedModel] = (
            weakref.WeakKeyDictionary()
        )
        self._lock = threading.Lock()

    def model(self, unet: nn.Module, *, resize: str = "before") -> ServedModel:
        """The served model of a live module, made at its first call."""
        with self._lock:
            found = self._models.get(unet)
            if found is None:
                found = self._models[unet] = ServedModel(self, unet, resize)
            return found

    def models(self) -> list[ServedModel]:
        """Every model that is alive."""
        with self._lock:
            return list(self._models.values())

    def baked(self, arch: Architecture, device: str, precision: str) -> list[Entry]:
        """Baked engines that may hold the weights of a model of this architecture."""
        return [
            entry
            for entry in self._usable_baked(device)
            if entry.key.io_dtype == precision
            and entry.key.architecture == arch.for_shape(entry.key.shape).id
        ]

    def _usable_baked(self, device: str) -> list[Entry]:
        """Every baked engine for ``device``; the folder is read again only when it has changed."""
        try:
            stamp = (device, self.library.folder.stat().st_mtime_ns)
        except OSError:
            return []
        if stamp != self._baked[0]:
            found = [
                entry
                for entry in self.library.entries(machine_of(device))
                if entry.state in (State.READY, State.UNVERIFIED) and entry.key.weights == "baked"
            ]
            self._baked = (stamp, found)
        return self._baked[1]

    def want_baked(self, arch: Architecture, entry: Entry, device: str) -> None:
        """Load a baked engine in the background, unless it is there, on its way, or failed."""
        if not self.tiers.knows(entry.stem):
            self.tiers.want(baked_job(arch, entry, device), asked=False)

    def remove(self, stem: str) -> int:
        """Delete an engine; if it had failed, it may be built again. Returns the bytes freed.

        Raises:
            LibraryError: there is no such engine, or a file of it cannot be deleted.
        """
        self.pool.remove(stem)
        freed = self.library.remove(stem)
        self.tiers.failed.pop(stem, None)
        return freed

    def install(self) -> None:
        """Fill the private folder in the background; ``installing`` tells how it goes."""
        folder = packages.root()
        if self.installing or folder is None:
            return
        self.installing = "Looking at this machine ..."

        def work() -> None:
            try:
                choice = choose(surroundings())
                packages.install(choice.backend, folder, cuda=choice.cuda, say=self._say)
                backend_versions.cache_clear()
                self.tiers.retry()
                self.installed = f"{choice.backend} is installed."
            except EngineRoomError as error:
                self.installed = str(error)
            except Exception as error:
                logger.exception("The installation failed.")
                self.installed = f"The installation failed: {error}"
            finally:
                self.installing = ""

        threading.Thread(target=work, name="engine-room-install", daemon=True).start()

    def _say(self, text: str) -> None:
        self.installing = text
        self.tell(text)

    def _note(self, event: Event) -> None:
        last = self.events.get(event.stem)
        self.events[event.stem] = event
        phase = event.progress.phase if event.progress else ""
        if last is None or (last.kind, last.progress and last.progress.phase) != (
            event.kind,
            event.progress and phase,
        ):
            self.tell(": ".join(filter(None, (event.label, event.kind, phase or event.text))))

    def tell(self, text: str) -> None:
        """Add a line to the log that user interfaces show."""
        self.lines.append(f"{time.strftime('%H:%M:%S')} {text}")

    def close(self) -> None:
        """Release every engine and stop building."""
        self.tiers.close()
        self.pool.close()


def baked_job(arch: Architecture, entry: Entry, device: str) -> Job:
    """The job that loads a baked engine on ``device``."""
    key = entry.key
    target = Target.of_key(key, device)
    return Job(arch=arch, shape=key.shape, target=target, fingerprint=key.fingerprint)


def attempt(serve: Callable[[], Tensor | None]) -> Tensor | None:
    """Result of ``serve``; None, with a log entry, where it fails: the host then serves.

    Raises:
        CancelledError: the user cancelled a build that the call was waiting for.
        NotFiniteError: the job has to begin again; see ``RoutedUNet.whole_job``.
    """
    try:
        return serve()
    except (CancelledError, NotFiniteError):
        raise
    except Exception:
        logger.exception("A call went to the host: Engine Room failed.")
        return None


def _unsupported(device: torch.device) -> str:
    """Why engines cannot run on ``device`` at all; empty where they can."""
    try:
        machine_of(str(device))
    except UnsupportedMachineError as error:
        return error.message
    return ""


def _no_host(*args: Any) -> Tensor:
    raise AssertionError("the host serves its own calls")
