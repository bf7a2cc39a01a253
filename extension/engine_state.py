"""What can be said about an engine on a machine without loading it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from .key import EngineKey, host_platform
from .manifest import Manifest
from .unet import EMITTER_VERSION


class State(Enum):
    """What can be said about an engine without loading it; the value is the stable code."""

    READY = "ready"
    UNVERIFIED = "unverified"
    OTHER_GPU = "other-gpu"
    OTHER_VERSION = "other-version"
    OUTDATED = "outdated"
    INCOMPLETE = "incomplete"
    DAMAGED = "damaged"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What an engine must fit: GPU name, compute capability, driver, backend versions."""

    gpu: str = "CPU"
    capability: str = "cpu"
    driver: str = ""
    backends: Mapping[str, str] = field(default_factory=dict)
    platform: str = field(default_factory=host_platform)


def parity_results(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The well-formed parity results of a state file."""
    items = state.get("parity")
    return [i for i in items if isinstance(i, dict)] if isinstance(items, list) else []


def same_place(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two parity results are of the same GPU, driver and backend version."""
    return all(a.get(name) == b.get(name) for name in ("gpu", "driver", "backend_version"))


def judge(
    stem: str,
    manifest: Manifest,
    size: int | None,
    machine: Machine | None,
    changing: Mapping[str, Any],
) -> tuple[State, str]:
    """State of an engine in code and words.

    Args:
        stem: of its files' names.
        size: of its engine file in bytes; None where it is missing.
        machine: where it would run; None where nobody asks.
        changing: its state file.
    """
    key = manifest.key
    if key.stem != stem:
        return State.DAMAGED, "its manifest belongs to another engine"
    if size is None:
        return State.INCOMPLETE, "its engine file is missing"
    if size != manifest.engine_bytes:
        return State.DAMAGED, f"it has {size} bytes instead of {manifest.engine_bytes}"
    if machine is None:
        return State.UNVERIFIED, "not looked at on any machine"
    if key.platform != machine.platform:
        return State.OTHER_GPU, f"made for {key.platform}; this is {machine.platform}"
    if key.emitter != EMITTER_VERSION:
        return State.OUTDATED, "made by another version of Engine Room; it is built again on demand"
    if machine.capability not in key.capabilities:
        made_for = ", ".join(key.capabilities)
        return State.OTHER_GPU, f"made for {made_for}; this is {machine.gpu} ({machine.capability})"
    version = machine.backends.get(key.backend)
    if version != key.backend_version:
        here = f"here is {version}" if version else "which is not installed here"
        return State.OTHER_VERSION, f"made by {key.backend} {key.backend_version}; {here}"
    return _parity_state(key, machine, changing)


def _parity_state(
    key: EngineKey, machine: Machine, changing: Mapping[str, Any]
) -> tuple[State, str]:
    wanted = {
        "gpu": machine.gpu,
        "driver": machine.driver,
        "backend_version": key.backend_version,
    }
    for item in parity_results(changing):
        worst, limit = item.get("worst_relative_l2"), item.get("limit")
        if (
            not same_place(item, wanted)
            or not isinstance(worst, float)
            or not isinstance(limit, float)
        ):
            continue
        if worst <= limit:
            return State.READY, f"ready (error {worst:.2g}, allowed {limit:.2g})"
        return State.DAMAGED, f"it computes something else (error {worst:.2g}, allowed {limit:.2g})"
    return State.UNVERIFIED, "not verified on this machine yet"
