"""Interleaved timing with CUDA events, medians and bootstrap intervals."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

ROUNDS, CALLS, WARMUP = 5, 30, 3
RESAMPLES = 500


@dataclass(frozen=True)
class Timing:
    """A time: median, 95 % bootstrap interval of it, 99th percentile."""

    median: float
    low: float
    high: float
    p99: float

    def to_json(self) -> dict[str, float]:
        return {k: round(v, 4) for k, v in self.__dict__.items()}


def summarise(times: list[float]) -> Timing:
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(times, k=len(times))) for _ in range(RESAMPLES))
    ordered = sorted(times)
    return Timing(
        median=statistics.median(times),
        low=medians[int(0.025 * RESAMPLES)],
        high=medians[int(0.975 * RESAMPLES)],
        p99=ordered[int(0.99 * (len(ordered) - 1))],
    )


def interleave(
    peers: dict[str, Callable[[], object]], rounds: int = ROUNDS, calls: int = CALLS
) -> dict[str, Timing]:
    """Time every peer in turn, ``rounds`` times; each call lies between two events."""
    times: dict[str, list[float]] = {name: [] for name in peers}
    for _ in range(rounds):
        for name, call in peers.items():
            for _ in range(WARMUP):
                call()
            torch.cuda.synchronize()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
            events[0].record()
            for event in events[1:]:
                call()
                event.record()
            torch.cuda.synchronize()
            times[name] += [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    return {name: summarise(values) for name, values in times.items()}
