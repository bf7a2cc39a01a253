"""The instant tier: while an engine is missing, the torch UNet serves as a CUDA graph."""

from __future__ import annotations

import threading
from collections import Counter

import torch

from . import threads
from .architecture import Architecture
from .binding import TORCH_DTYPES
from .engine.torch_graph import TorchGraphEngine
from .errors import EngineRoomError
from .log import logger
from .memory import free_bytes, instant_bytes
from .parity import TIMESTEPS, ParityResult, check
from .pool import EnginePool
from .router import INSTANT, Call, Candidate
from .shapes import Shape

DEVICES = ("cuda",)
HEADROOM = 1.5
MOST = 2


def stem_of(architecture: str, shape: Shape, dtype: str, device: str) -> str:
    """Name of the instant engine for such calls."""
    width, height = shape.pixels
    words = [f"{width}x{height}", f"b{shape.batch}", f"t{shape.tokens}"]
    words += ["control"] if shape.control else []
    return "-".join([INSTANT, architecture[:8], *words, dtype, device])


def _name(call: Call) -> str:
    return stem_of(call.architecture, call.shape, call.dtype, call.device)


class InstantTier:
    """Makes instant engines, verifies them in the background, and offers them to the router.

    They are for shapes that come up again: the second call of a shape asks for one. At most
    ``MOST`` are kept, because each holds the activations of its shape.
    """

    def __init__(self, pool: EnginePool) -> None:
        self.pool = pool
        self.failed: dict[str, str] = {}
        self._calls: Counter[str] = Counter()
        self._verified: set[str] = set()
        self._making = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def miss(self, arch: Architecture, call: Call) -> None:
        """No engine serves ``call``: get an instant one, if this is not the first such call."""
        if call.device.split(":")[0] not in DEVICES or call.dtype not in TORCH_DTYPES:
            return
        stem = _name(call)
        if stem in self.failed or self.pool.holds(stem):
            return
        self._calls[stem] += 1
        if self._calls[stem] > 1 and self._making.acquire(blocking=False):
            self._stopped.clear()
            self._thread = threads.start(
                self._make, stem, arch, call, name=INSTANT, stop=self._stopped.set
            )

    def _make(self, stem: str, arch: Architecture, call: Call) -> None:
        try:
            with self.pool.pace.disturbed():
                self.provide(stem, arch, call)
        except (EngineRoomError, torch.cuda.OutOfMemoryError) as error:
            self.failed[stem] = str(error).split("\n", 1)[0]
            logger.info("%s is not used: %s", stem, self.failed[stem])
        except InterruptedError:
            logger.debug("%s was not finished: the process ends.", stem)
        except Exception as error:
            self.failed[stem] = str(error)
            logger.exception("%s was not made ready.", stem)
        finally:
            self._making.release()

    def provide(self, stem: str, arch: Architecture, call: Call) -> None:
        """Make, verify and offer the instant engine for ``call`` now.

        Raises:
            EngineRoomError: it computes something else, or there is too little memory for it.
            torch.cuda.OutOfMemoryError: there was too little memory all the same.
        """
        needed, free = instant_bytes(arch, call.shape, call.dtype), free_bytes(call.device)
        if free < HEADROOM * needed:
            raise EngineRoomError(
                f"An instant engine needs {needed / 1e6:.0f} MB of GPU memory, and some room "
                f"beside it; {free / 1e6:.0f} MB are free."
            )
        engine = TorchGraphEngine(arch, call.shape, dtype=call.dtype, device=call.device)
        if stem not in self._verified:
            try:
                self._verify(engine, arch, call).require(stem)
            except BaseException:
                engine.close()
                raise
            self._verified.add(stem)
        self._offer(stem, call, engine, needed)

    def _verify(self, engine: TorchGraphEngine, arch: Architecture, call: Call) -> ParityResult:
        return check(
            engine,
            arch,
            call.shape,
            None,
            dtype=call.dtype,
            device=call.device,
            timesteps=TIMESTEPS[1:3],
            pause=self._pause,
        )

    def _pause(self) -> None:
        if self._stopped.is_set():
            raise InterruptedError

    def _offer(self, stem: str, call: Call, engine: TorchGraphEngine, nbytes: int) -> None:
        candidate = Candidate(
            stem=stem,
            architecture=call.architecture,
            shape=call.shape,
            dtype=call.dtype,
            device=call.device,
            weights=INSTANT,
        )
        budget = None if call.device == "cpu" else int(free_bytes(call.device) / HEADROOM)
        with self.pool.lock:
            held = [c.stem for c in self.pool.candidates() if c.weights == INSTANT]
            for oldest in sorted(held, key=self.pool.last_use)[: max(0, len(held) - MOST + 1)]:
                self.pool.remove(oldest)
            self.pool.add(
                candidate,
                engine,
                staging_budget=budget,
                resident_bytes=nbytes,
            )

    def drop(self, stem: str) -> None:
        """A better engine serves its calls: free the memory."""
        self.pool.remove(stem)

    def wait(self, timeout: float) -> None:
        """Wait for the engine that is being made, if one is."""
        if self._thread is not None:
            self._thread.join(timeout)

    def close(self, timeout: float) -> None:
        """Stop making one."""
        self._stopped.set()
        self.wait(timeout)

    def retry(self) -> None:
        """Forget failures."""
        self.failed.clear()
