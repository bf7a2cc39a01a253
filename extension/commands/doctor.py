"""doctor: what this machine has, whether engines can be built and run, and what to do."""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

from .. import __version__
from ..engine import BACKENDS, get_backend
from ..errors import EngineRoomError
from ..jobs import Limits, WorkerSetup, run_job
from ..library import State
from ..machine import can_build_ahead, default_device, driver_version, machine_of
from . import common
from .common import Report

FALLBACK_CAPABILITY = "8.9"


def add(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("doctor", help="check this machine and say what to do")
    parser.add_argument("--no-selftest", action="store_true", help="do not build a test engine")
    common.add_library(parser)
    parser.set_defaults(run=doctor)


def doctor(args: argparse.Namespace) -> Report:
    """Examine everything; the exit code is 1 where something must be done."""
    facts: dict[str, Any] = _versions()
    todo: list[str] = []
    facts["backends"] = {
        name: _examine(name, facts, todo, selftest=not args.no_selftest) for name in BACKENDS
    }
    usable = [name for name, found in facts["backends"].items() if found["state"] == "ok"]
    if not usable:
        todo.append("No backend works. For RTX cards: python -m pip install tensorrt-rtx")
    facts["library"] = _library(args, todo)
    facts["todo"] = todo
    lines = [f"{name}: {value}" for name, value in facts.items() if isinstance(value, str)]
    lines += [f"{name}: {found['text']}" for name, found in facts["backends"].items()]
    lines.append(f"library: {facts['library']['text']}")
    lines += [f"{i}. {text}" for i, text in enumerate(todo, 1)] or ["all good"]
    return Report(data=facts, lines=lines, exit_code=1 if todo else 0)


def _versions() -> dict[str, Any]:
    import torch

    device = default_device()
    gpu = "none"
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        gpu = f"{torch.cuda.get_device_name()} (compute capability {major}.{minor})"
    return {
        "engine room": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "torch": torch.__version__,
        "gpu": gpu,
        "driver": f"CUDA {driver_version()}" if driver_version() else "none",
        "device": device,
    }


def _examine(
    name: str, facts: dict[str, Any], todo: list[str], *, selftest: bool
) -> dict[str, Any]:
    """A backend's version and, where it can build here, a tiny engine's build."""
    try:
        version = get_backend(name).version()
    except EngineRoomError:
        return {"state": "absent", "text": "not installed"}
    except Exception as error:
        todo.append(f"{name} is installed but broken ({error}). Install it again.")
        return {"state": "broken", "text": f"broken: {error}"}
    if not selftest or (name == "tensorrt" and facts["device"] == "cpu"):
        return {"state": "ok", "text": f"{version}, not tested", "version": version}
    try:
        seconds = _selftest(name, facts["device"])
    except EngineRoomError as error:
        todo.append(f"{name} {version} cannot build: {error}")
        return {"state": "broken", "text": f"{version}, broken: {error}", "version": version}
    text = f"{version}, built a test engine in {seconds:.1f} s"
    return {"state": "ok", "text": text, "version": version, "selftest_seconds": seconds}


def _selftest(name: str, device: str) -> float:
    capability = "cpu"
    if name != "onnxruntime":
        capability = FALLBACK_CAPABILITY if device == "cpu" else machine_of(device).capability
    setup = WorkerSetup(hide_gpu=can_build_ahead((capability,)))
    with tempfile.TemporaryDirectory(prefix="engine-room-") as folder:
        job = {
            "kind": "selftest",
            "backend": name,
            "folder": str(Path(folder)),
            "capabilities": [capability],
        }
        result = run_job(job, setup=setup, limits=Limits(seconds=300))
    return float(result["build_seconds"])


def _library(args: argparse.Namespace, todo: list[str]) -> dict[str, Any]:
    library = common.library_of(args)
    entries = library.entries(machine_of(default_device()))
    counts: dict[str, int] = {}
    for entry in entries:
        counts[entry.state.value] = counts.get(entry.state.value, 0) + 1
        if entry.state in (State.DAMAGED, State.INCOMPLETE):
            remove = f"{Path(sys.executable).name} -m extension engines remove {entry.stem}"
            todo.append(f"Engine {entry.stem}: {entry.text}. Remove it: {remove}")
    words = ", ".join(f"{count} {state}" for state, count in sorted(counts.items())) or "empty"
    return {"folder": str(library.folder), "text": f"{library.folder}: {words}", **counts}
