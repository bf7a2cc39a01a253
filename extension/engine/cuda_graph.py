"""Replay a sequence of launches as one CUDA graph, in a process whose other threads go on."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from ..accuracy import relative_l2
from ..errors import EngineError
from ..log import logger
from .turns import turns

# A replay launches the kernels of the plain call, so that nearly every bit is the same.
REPLAY_LIMIT = 1e-3


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all: cuBLAS keeps a workspace for every stream that it has seen."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class CallGraph:
    """A CUDA graph of one call whose buffers stay where they are.

    The first call after ``invalidate`` runs plainly, which also warms up; the second captures,
    so weights that change on every call never pay for a capture. Hosts run on the legacy
    default stream, which cannot be captured: the capture happens on a stream of its own, in
    thread-local mode because other threads may allocate meanwhile; a replay runs on the
    current stream. Captures are put off while others of ours work on the device; after one that
    failed, calls stay plain. The first replay is compared with a plain call.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = None
        self._warm = self._proved = self._failed = False

    @property
    def captured(self) -> bool:
        """Whether the next call is a replay."""
        return self._graph is not None

    def invalidate(self) -> None:
        """Forget the graph: an address that it reads has changed."""
        self._graph, self._warm = None, False

    def run(self, enqueue: Callable[[], None], out: Tensor) -> None:
        """Run ``enqueue`` (launches on the current stream that fill ``out``), or its graph.

        Raises:
            EngineError: the graph computes something else.
        """
        if self._graph is None and self._warm and not self._failed:
            self._graph = self._capture(enqueue)
            if self._graph is not None and not self._proved:
                self._prove(self._graph, enqueue, out)
                return
        if self._graph is not None:
            self._graph.replay()
            return
        enqueue()
        self._warm = True

    def _capture(self, enqueue: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """The graph; None where its turn has not come, or where it failed."""
        with turns.capture() as free:
            if not free:
                return None
            stream, graph = _capture_stream(self._device), torch.cuda.CUDAGraph()
            # The call before may still use the engine's scratch memory.
            stream.wait_stream(torch.cuda.current_stream(self._device))
            try:
                with torch.cuda.stream(stream):
                    graph.capture_begin(capture_error_mode="thread_local")
                    try:
                        enqueue()
                    finally:
                        graph.capture_end()
            except torch.cuda.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self._failed = True
                logger.warning("No CUDA graph, calls stay plain: %s", str(error).split("\n")[0])
                return None
            return graph

    def _prove(self, graph: torch.cuda.CUDAGraph, enqueue: Callable[[], None], out: Tensor) -> None:
        enqueue()
        expected = out.clone()
        out.zero_()
        graph.replay()
        error = relative_l2(out, expected)
        # A plain call that is not finite is for the watch over outputs.
        if error > REPLAY_LIMIT and bool(expected.isfinite().all()):
            raise EngineError(
                "The engine's CUDA graph computes something else than its plain call "
                f"(relative error {error:.1e})."
            )
        self._proved = True
