"""What this machine has, whether engines can be built and run here, and what to do about it."""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import __version__, packages
from .architecture import TINY
from .backend_choice import choose, surroundings
from .driver import driver_cuda, driver_version, gpus
from .engine import BACKENDS, get_backend
from .engine_state import State
from .errors import EngineRoomError
from .jobs import Limits, WorkerSetup, run_job
from .library import Library
from .log import logger
from .machine import CPU_BACKEND, machine_of, needs_no_gpu
from .parity import check
from .worker_tasks import SELFTEST_ENGINE, SELFTEST_SHAPE

FALLBACK_CAPABILITY = "8.9"
SELFTEST_SECONDS = 300.0
KNOWN_OTHERS = {
    "tensorrt": "also replaces the UNet; use one of the two",
    "stable-fast": "also replaces the UNet; use one of the two",
    "onediff": "also replaces the UNet; use one of the two",
    "deepcache": "skips UNet blocks; the host serves while it is on",
    "teacache": "skips UNet blocks; the host serves while it is on",
    "wavespeed": "skips UNet blocks; the host serves while it is on",
    "hypertile": "changes attention; the host serves while it is on",
    "tome": "merges tokens; the host serves while it is on",
    "freeu": "changes UNet blocks; the host serves while it is on",
    "controlnet": "served by engines with ControlNet inputs where the host hands them over",
    "ipadapter": "changes attention; the host serves while it is on",
}
MENDED = (State.DAMAGED, State.INCOMPLETE)


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """What a host adapter adds.

    Attributes:
        name: host and version.
        hooks: what Engine Room needs of the host, and whether it was found.
        others: other extensions that touch the UNet, with what that means.
    """

    name: str = ""
    hooks: Mapping[str, bool] = field(default_factory=dict)
    others: Sequence[str] = ()


def known_others(names: Iterable[str]) -> list[str]:
    """Those of the installed extensions that are known to touch the UNet, with the meaning."""
    found = []
    for name in sorted(set(names)):
        plain = name.lower().replace("_", "-")
        if "engine-room" in plain:
            continue
        meaning = next((text for part, text in KNOWN_OTHERS.items() if part in plain), None)
        if meaning is not None:
            found.append(f"{name}: {meaning}")
    return found


@dataclass(kw_only=True)
class Diagnosis:
    """Facts by name, JSON-serialisable, and what a person has to do."""

    facts: dict[str, Any] = field(default_factory=dict)
    todo: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Facts, things to do, and both in words."""
        return {"facts": self.facts, "todo": self.todo, "lines": self.lines}

    @property
    def lines(self) -> list[str]:
        """All of it for people; the last lines are "all good" or numbered things to do."""
        found = [f"{name}: {_words(value)}" for name, value in self.facts.items()]
        return found + ([f"{i}. {text}" for i, text in enumerate(self.todo, 1)] or ["all good"])


def diagnose(
    library: Library, device: str, *, selftest: bool = True, host: HostFacts | None = None
) -> Diagnosis:
    """Examine everything; never raises for what it finds.

    Args:
        device: where the host draws.
        selftest: build a tiny engine with each backend, and run it where it can run.
    """
    found = Diagnosis(facts=_versions(device))
    backends = {name: _backend(name, device, found.todo, selftest) for name in BACKENDS}
    for name, text in backends.items():
        found.facts[name] = text
    _recommend(found, device, backends)
    found.facts["private folder"] = str(packages.root() or "none: the environment's packages serve")
    found.facts["library"] = _library(library, device, found.todo)
    if host is not None:
        _host(found, host)
    return found


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_words(inner)}" for name, inner in value.items()) or "none"
    if isinstance(value, list):
        return "; ".join(value) or "none"
    return {True: "found", False: "missing"}.get(value, str(value))


def _versions(device: str) -> dict[str, Any]:
    driver = driver_cuda()
    return {
        "engine room": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "torch": torch.__version__,
        "gpus": [f"{gpu.name} (compute capability {gpu.capability})" for gpu in gpus()],
        "driver": f"{driver_version()} (CUDA {driver})" if driver else "none",
        "device": device,
    }


def _backend(name: str, device: str, todo: list[str], selftest: bool) -> str:
    """A backend's version, and what came of its test."""
    try:
        version = get_backend(name).version()
    except EngineRoomError:
        return "not installed"
    except Exception as error:
        todo.append(f"{name} is installed but broken ({error}). Install it again.")
        return f"broken: {error}"
    if not selftest or (name == "tensorrt" and device == "cpu"):
        return f"{version}, not tested"
    try:
        return f"{version}, {_selftest(name, device)}"
    except EngineRoomError as error:
        todo.append(f"{name} {version} does not work: {error}")
        return f"{version}, broken: {error}"
    except Exception as error:
        logger.exception("The self-test of %s failed.", name)
        todo.append(f"{name} {version} does not work: {error}")
        return f"{version}, broken: {error}"


def _selftest(name: str, device: str) -> str:
    """Build the tiny engine in the worker; run and compare it where this device can."""
    place = "cpu" if name == CPU_BACKEND else device
    runs = name == CPU_BACKEND or device != "cpu"
    capability = machine_of(place).capability if runs else FALLBACK_CAPABILITY
    setup = WorkerSetup(
        packages=packages.worker_folders(name), hide_gpu=needs_no_gpu(name, (capability,))
    )
    with tempfile.TemporaryDirectory(prefix="engine-room-") as folder:
        job = {
            "kind": "selftest",
            "backend": name,
            "folder": folder,
            "capabilities": [capability],
        }
        done = run_job(job, setup=setup, limits=Limits(seconds=SELFTEST_SECONDS))
        built = f"built a test engine in {done['build_seconds']:.1f} s"
        if not runs:
            return f"{built} (not run: no GPU here)"
        data = (Path(folder) / SELFTEST_ENGINE).read_bytes()
    with torch.inference_mode(False):
        engine = get_backend(name).load(data, device=place)
        try:
            result = check(engine, TINY["sd15"], SELFTEST_SHAPE, None, dtype="fp32", device=place)
            result.require(name)
        finally:
            engine.close()
    return f"{built} and ran it: right"


def _recommend(found: Diagnosis, device: str, backends: Mapping[str, str]) -> None:
    """Which TensorRT belongs here; something to do where it is missing or cannot be."""
    try:
        choice = choose(surroundings())
        found.facts["for this machine"] = f"{choice.backend} for CUDA {choice.cuda}"
    except EngineRoomError as error:
        found.facts["for this machine"] = str(error)
        if device != "cpu" or all(text == "not installed" for text in backends.values()):
            found.todo.append(str(error))
        return
    if backends["tensorrt_rtx"] == backends["tensorrt"] == "not installed":
        command = packages.install_command()
        found.todo.append(f"TensorRT is not installed. Press Install TensorRT, or: {command}")


def _library(library: Library, device: str, todo: list[str]) -> str:
    counts: dict[str, int] = {}
    try:
        entries = library.entries(machine_of(device))
    except OSError as error:
        todo.append(f"The folder of engines cannot be read: {error}.")
        return f"{library.folder}: {error}"
    for entry in entries:
        counts[entry.state.value] = counts.get(entry.state.value, 0) + 1
        if entry.state in MENDED:
            todo.append(f"Engine {entry.stem}: {entry.text}. Delete it; it is built again.")
    words = ", ".join(f"{count} {state}" for state, count in sorted(counts.items())) or "empty"
    return f"{library.folder}: {words}"


def _host(found: Diagnosis, host: HostFacts) -> None:
    found.facts["host"] = host.name
    found.facts["hooks"] = dict(host.hooks)
    found.facts["others"] = list(host.others)
    missing = [name for name, present in host.hooks.items() if not present]
    if missing:
        found.todo.append(
            f"{host.name} has no {', '.join(missing)}: pictures come from the host. "
            "Update the host, or report this with the text above."
        )
