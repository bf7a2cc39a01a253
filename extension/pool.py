"""Engines in memory, shared by every model of the process; the least recently used go first."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

import torch

from .binding import Binding
from .engine.interface import Engine
from .engine.scratch import free_scratch, scratch_bytes
from .log import logger
from .pace import Pace
from .router import INSTANT, Candidate


@dataclass
class LoadedEngine:
    """An engine in memory, what the router knows of it, and its weights."""

    candidate: Candidate
    engine: Engine
    binding: Binding
    used: int = 0
    resident_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """Of copies of weights, and of what lies inside the engine."""
        own = 0
        if self.candidate.weights == INSTANT and self.candidate.ready:
            own = self.engine.activation_bytes
        return self.binding.staged_bytes + max(self.resident_bytes, own)

    def release(self) -> None:
        """Give all its memory back; it runs no more."""
        self.resident_bytes = 0
        self.binding.release()
        self.engine.close()


class EnginePool:
    """Loaded engines by stem.

    Hold ``lock`` from routing to the end of a call: an engine runs one call at a time.

    Args:
        most: engines kept in memory.

    Attributes:
        pace: how long steps take, by who serves them.
        lacking: stems that the GPU's memory was too small for.
    """

    def __init__(self, most: int = 6) -> None:
        self.lock = threading.RLock()
        self.most = most
        self.pace = Pace()
        self.lacking: set[str] = set()
        self._engines: dict[str, LoadedEngine] = {}
        self._clock = 0

    def add(
        self,
        candidate: Candidate,
        engine: Engine,
        *,
        staging_budget: int | None = None,
        resident_bytes: int = 0,
    ) -> None:
        """Offer an engine to the router; the least recently used one may have to go.

        Args:
            staging_budget: bytes of copies of weights allowed; None is no limit.
            resident_bytes: of weights inside the engine, or about of its own activations.
        """
        device = torch.device(candidate.device)
        binding = Binding(engine, device, staging_budget=staging_budget)
        with self.lock:
            self.remove(candidate.stem)
            self._clock += 1
            self._engines[candidate.stem] = LoadedEngine(
                candidate, engine, binding, self._clock, resident_bytes
            )
            while len(self._engines) > max(self.most, 1):
                oldest = min(self._engines.values(), key=lambda entry: entry.used)
                logger.info("Engine %s is unloaded: others are in use.", oldest.candidate.stem)
                self.remove(oldest.candidate.stem)

    def candidates(self) -> list[Candidate]:
        """What the router may choose from."""
        with self.lock:
            return [entry.candidate for entry in self._engines.values()]

    def holds(self, stem: str) -> bool:
        """Whether the engine is loaded."""
        with self.lock:
            return stem in self._engines

    def use(self, stem: str) -> LoadedEngine:
        """The engine, marked as just used; KeyError where it is not loaded."""
        with self.lock:
            entry = self._engines[stem]
            self._clock += 1
            entry.used = self._clock
            return entry

    def last_use(self, stem: str) -> int:
        """Larger for engines that were used later."""
        with self.lock:
            return self._engines[stem].used

    def set_aside(self, stem: str, why: str) -> bool:
        """Keep an engine out of service until it is added again; False where it was already.

        The host that serves in its place gets all the memory that it held.
        """
        with self.lock:
            entry = self._engines.get(stem)
            if entry is None or not entry.candidate.ready:
                return False
            entry.candidate = replace(entry.candidate, ready=False, problem=why)
            entry.release()
            return True

    def remove(self, stem: str) -> bool:
        """Release an engine; False where it was not loaded."""
        with self.lock:
            entry = self._engines.pop(stem, None)
            if entry is None:
                return False
            entry.release()
            return True

    @property
    def nbytes(self) -> int:
        """Bytes of weights in engines, of copies, of graphs, and of the scratch all share."""
        with self.lock:
            return sum(entry.nbytes for entry in self._engines.values()) + scratch_bytes()

    def release_weights(self) -> None:
        """Drop every copy of weights and the scratch memory; they come back when needed."""
        with self.lock:
            for entry in self._engines.values():
                entry.binding.release()
            free_scratch()

    def release_memory(self) -> None:
        """Also unload engines that hold memory of their own; the tiers make them again."""
        with self.lock:
            for stem, entry in list(self._engines.items()):
                if entry.resident_bytes:
                    self.remove(stem)
            self.release_weights()

    def close(self) -> None:
        """Release every engine."""
        with self.lock:
            for stem in list(self._engines):
                self.remove(stem)
