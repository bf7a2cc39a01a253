"""Replay a sequence of launches as one CUDA graph, in a process whose other threads go on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache

import torch

_capturing = threading.Lock()


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
    current stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = None
        self._warm = False

    @property
    def captured(self) -> bool:
        """Whether the next call is a replay."""
        return self._graph is not None

    def invalidate(self) -> None:
        """Forget the graph: an address that it reads has changed."""
        self._graph, self._warm = None, False

    def run(self, enqueue: Callable[[], None]) -> None:
        """Run ``enqueue`` (launches on the current stream) plainly or as a graph."""
        if self._graph is None and not self._warm:
            enqueue()
            self._warm = True
            return
        if self._graph is None:
            self._graph = self._capture(enqueue)
        self._graph.replay()

    def _capture(self, enqueue: Callable[[], None]) -> torch.cuda.CUDAGraph:
        stream, graph = _capture_stream(self._device), torch.cuda.CUDAGraph()
        # The call before may still use the engine's scratch memory.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with _capturing, torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                enqueue()
            finally:
                graph.capture_end()
        return graph
