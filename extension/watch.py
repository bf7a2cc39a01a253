"""Whether the outputs of engines are finite, asked without waiting for the GPU in every step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from .router import Plan

Result = TypeVar("Result")


class NotFiniteError(Exception):
    """An output of this job was not finite: the job has to be done again without its engines."""


def total(out: Tensor) -> Tensor:
    """A scalar that is finite exactly where all of ``out`` is: their sum, too wide to overflow."""
    wide = torch.float64 if out.dtype == torch.float32 else torch.float32
    return out.sum(dtype=wide)


def is_finite(out: Tensor) -> bool:
    """Whether every value is; waits for the GPU."""
    return math.isfinite(float(total(out)))


class OutputWatch:
    """The outputs of one job. What is wrong with them shows a call later, or at the end.

    Attributes:
        plans: those that served, in order.
    """

    def __init__(self) -> None:
        self.plans: list[Plan] = []
        self._total: Tensor | None = None
        self._seen: Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def note(self, plan: Plan, out: Tensor) -> None:
        """One more output; raises NotFiniteError where an earlier one is known to be wrong."""
        self._raise_if_known()
        self.plans.append(plan)
        found = total(out)
        self._total = found if self._total is None else self._total + found.to(self._total)
        if out.device.type == "cuda":
            self._copy()

    def _copy(self) -> None:
        assert self._total is not None
        if self._seen is None or self._copied is None:
            self._seen = torch.zeros((), dtype=self._total.dtype, pin_memory=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._seen.copy_(self._total, non_blocking=True)
        self._copied.record()

    def _raise_if_known(self) -> None:
        """Samplers with adaptive steps never end on a NaN: they must not get to the end."""
        known = self._total
        if self._copied is not None:
            known = self._seen if self._copied.query() else None  # type: ignore[no-untyped-call]
        if known is not None:
            self._check(known)

    def settle(self) -> None:
        """Wait for the last output; raises NotFiniteError where any was wrong."""
        if self._total is not None:
            self._check(self._total)

    @staticmethod
    def _check(known: Tensor) -> None:
        if not math.isfinite(float(known)):
            raise NotFiniteError


def repeatable(job: Callable[[], Result], device: torch.device | None) -> Callable[[], Result]:
    """``job`` that starts from the same random state each time it is called.

    Args:
        device: whose generator is kept beside the CPU's.
    """
    cuda = device if device is not None and device.type == "cuda" else None
    state = torch.get_rng_state()
    cuda_state = None if cuda is None else torch.cuda.get_rng_state(cuda)

    def again() -> Result:
        torch.set_rng_state(state)
        if cuda_state is not None and cuda is not None:
            torch.cuda.set_rng_state(cuda_state, cuda)
        return job()

    return again
