"""Run jobs in the worker: progress out, cancel in, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from .errors import CancelledError, EngineRoomError, WorkerError, all_error_types
from .log import logger
from .progress import CancelToken, Progress, ProgressSink

WORKER = Path(__file__).with_name("worker.py")
FORMAT = 1
POLL_SECONDS = 0.1
LINE_LIMIT = 1 << 20
STDERR_LINES = 40


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When a worker is given up.

    Attributes:
        seconds: for the whole job.
        silence: without any event; the worker sends one every quarter of a second.
    """

    seconds: float = 4 * 3600.0
    silence: float = 120.0


@dataclass(frozen=True, kw_only=True)
class WorkerSetup:
    """How the worker is started.

    Attributes:
        packages: private folders to put on its path; with any, the environment's own packages
            are left out.
        hide_gpu: builds for a named compute capability take no GPU and no VRAM.
        nice: lowered priority, as POSIX counts it.
    """

    packages: Sequence[Path] = ()
    hide_gpu: bool = True
    nice: int = 10


def run_job(
    job: Mapping[str, Any],
    *,
    on_progress: ProgressSink = lambda progress: None,
    cancel: CancelToken | None = None,
    limits: Limits | None = None,
    setup: WorkerSetup | None = None,
) -> dict[str, Any]:
    """Run ``job`` (kind and fields) in a worker and return its result.

    Raises:
        CancelledError: ``cancel`` was set; the worker is dead within a second.
        WorkerError: it crashed, was killed, hung, or broke the protocol.
        EngineRoomError: what the worker reported, as the same type.
    """
    cancel, limits = cancel or CancelToken(), limits or Limits()
    setup = setup or WorkerSetup()
    cancel.raise_if_cancelled()
    with tempfile.TemporaryDirectory(prefix="engine-room-") as folder:
        path = Path(folder) / "job.json"
        packages = [str(package) for package in setup.packages]
        fields = {**job, "format": FORMAT, "packages": packages, "nice": setup.nice}
        path.write_text(json.dumps(fields), encoding="utf-8")
        with _Worker(path, setup) as worker:
            return worker.follow(on_progress, cancel, limits)


def _windows_flags(setup: WorkerSetup) -> int:
    """No console window, and a priority below that of the host; 0 elsewhere, where nice is."""
    lower = getattr(subprocess, "BELOW_NORMAL_PRIORITY_CLASS", 0) if setup.nice > 0 else 0
    return int(getattr(subprocess, "CREATE_NO_WINDOW", 0)) | int(lower)


class _Worker:
    """One worker process and the threads that read from it."""

    def __init__(self, job: Path, setup: WorkerSetup) -> None:
        isolation = ["-I", "-S"] if setup.packages else ["-I"]
        environment = dict(os.environ)
        if setup.hide_gpu:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        self._process = subprocess.Popen(
            [sys.executable, *isolation, str(WORKER), str(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            creationflags=_windows_flags(setup),
        )
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._stderr: deque[str] = deque(maxlen=STDERR_LINES)
        self._readers = [
            threading.Thread(target=reader, args=(stream,), daemon=True)
            for reader, stream in (
                (self._read_events, self._process.stdout),
                (self._read_stderr, self._process.stderr),
            )
        ]
        for thread in self._readers:
            thread.start()

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for thread in self._readers:
            thread.join(timeout=5)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def kill(self) -> None:
        """End the process; it holds nothing that needs a farewell."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def follow(
        self, on_progress: ProgressSink, cancel: CancelToken, limits: Limits
    ) -> dict[str, Any]:
        started = heard = time.monotonic()
        while True:
            if cancel.cancelled:
                self.kill()
                raise CancelledError("Cancelled; nothing was left behind.")
            now = time.monotonic()
            self._check_limits(now - started, now - heard, limits)
            try:
                event = self._events.get(timeout=POLL_SECONDS)
            except queue.Empty:
                continue
            if event is None:
                raise self._died()
            heard = time.monotonic()
            result = self._handle(event, on_progress)
            if result is not None:
                return result

    def _handle(self, event: dict[str, Any], on_progress: ProgressSink) -> dict[str, Any] | None:
        kind = event.get("event")
        if kind == "progress":
            on_progress(_progress(event))
        elif kind == "error":
            raise _rebuild(event, list(self._stderr))
        elif kind == "done" and isinstance(event.get("result"), dict):
            self._process.wait(timeout=10)
            return dict(event["result"])
        else:
            logger.info("Worker: %s", event.get("text", event))
        return None

    def _check_limits(self, total: float, silent: float, limits: Limits) -> None:
        if total <= limits.seconds and silent <= limits.silence:
            return
        what = (
            f"took more than {limits.seconds:.0f} s"
            if total > limits.seconds
            else f"gave no sign of life for {silent:.0f} s"
        )
        self.kill()
        raise WorkerError(
            f"The build {what} and was ended.",
            hint="Try again; a smaller size needs less time and memory.",
            details={"stderr": list(self._stderr)},
        )

    def _died(self) -> WorkerError:
        code = self._process.wait()
        text = f"exit code {code}"
        if code < 0:
            with contextlib.suppress(ValueError):
                text = f"signal {signal.Signals(-code).name}"
        return WorkerError(
            f"The worker ended without a result ({text}).",
            hint="Often memory was short: close other programs and try again.",
            details={"exit_code": code, "stderr": list(self._stderr)},
        )

    def _read_events(self, stream: IO[bytes]) -> None:
        while line := stream.readline(LINE_LIMIT):
            text = line.decode("utf-8", "replace").rstrip()
            try:
                event = json.loads(text)
            except (ValueError, RecursionError):
                event = None
            if not isinstance(event, dict):
                event = {"event": "log", "level": "info", "text": text}
            self._events.put(event)
        self._events.put(None)

    def _read_stderr(self, stream: IO[bytes]) -> None:
        while line := stream.readline(LINE_LIMIT):
            text = line.decode("utf-8", "replace").rstrip()
            self._stderr.append(text)
            logger.debug("Worker: %s", text)


def _progress(event: Mapping[str, Any]) -> Progress:
    remaining = event.get("remaining")
    return Progress(
        fraction=min(max(float(event.get("fraction", 0.0)), 0.0), 1.0),
        phase=str(event.get("phase", "")),
        detail=str(event.get("detail", "")),
        elapsed=float(event.get("elapsed", 0.0)),
        remaining=None if remaining is None else float(remaining),
    )


def _rebuild(event: Mapping[str, Any], stderr: list[str]) -> EngineRoomError:
    kind = all_error_types().get(str(event.get("code")), WorkerError)
    details = event.get("details")
    return kind(
        str(event.get("message", "The worker failed.")),
        hint=str(event.get("hint", "")),
        details={**(details if isinstance(details, dict) else {}), "stderr": stderr},
    )
