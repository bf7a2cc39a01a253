"""The settings page, and what is set."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from modules import paths, shared

from ...tier_settings import TierSettings

SECTION = ("engine_room", "Engine Room (TensorRT)")
POLICIES = ["background", "wait", "never", "off"]
TIERS = ["auto", "shared", "baked", "instant"]
MEMORY = (1, 32)
CALLS = (1, 200)
DISK_GB = (0, 200)
PROMOTE = (0, 200)
CALLS_PER_PICTURE = 20

_forced: list[str] = []


def register() -> None:
    """Add the page to the host's settings."""
    _choose(
        "policy",
        POLICIES,
        "At a size that has no engine yet",
        "background: build one while the host draws; wait: build it first; never: only use what "
        "is there; off: always draw with the host",
    )
    _choose(
        "tier",
        TIERS,
        "Engines that may serve",
        "auto: a baked engine where the loaded weights are those in it, else a shared one, else "
        "an instant one (the model's own operations as one CUDA graph: nothing is built)",
    )
    _slide(
        "after_calls",
        2,
        CALLS,
        "UNet calls of a size before its engine is built",
        "more: sizes that are drawn once are not built for",
    )
    _slide(
        "promote",
        0,
        PROMOTE,
        "Pictures with the same weights before an engine with them baked in is built",
        "0: never; a baked engine is a little faster, as large as the checkpoint, on disk and in "
        "VRAM, and serves these weights alone",
    )
    _add(
        "staging",
        True,
        "Copy convolution weights into the faster layout where VRAM allows",
        "about 1.1 GB for SD1.5 and 0.7 GB for SDXL; engines without copies are a little slower",
    )
    _add(
        "instant",
        True,
        "Draw faster while an engine is missing",
        "the model's own operations as one CUDA graph; needs no TensorRT, but some VRAM of its own",
    )
    _slide("most", 6, MEMORY, "Engines kept in memory", "the least recently used goes first")
    _slide(
        "disk",
        0,
        DISK_GB,
        "Gigabytes of disk for engines",
        "0: no limit; beyond it the engine unused for longest is deleted after a build",
    )
    _add(
        "folder",
        "",
        "Folder of engines",
        "empty: models/engine-room; several hosts may share one; needs a restart",
    )


def _add(name: str, default: Any, label: str, info: str, kind: Any = None, **args: Any) -> None:
    option = shared.OptionInfo(default, label, kind, args or None, section=SECTION)
    shared.opts.add_option(f"engine_room_{name}", option.info(info))


def _choose(name: str, choices: list[str], label: str, info: str) -> None:
    """A setting of named values, the first of which is the default."""
    import gradio

    _add(name, choices[0], label, info, gradio.Radio, choices=choices)


def _slide(name: str, default: int, limits: tuple[int, int], label: str, info: str) -> None:
    import gradio

    least, most = limits
    _add(name, default, label, info, gradio.Slider, minimum=least, maximum=most, step=1)


def policy() -> str:
    """What to do at a size without an engine; ``off`` where nothing is to be routed."""
    return _forced[-1] if _forced else str(_choice("policy", POLICIES))


def tier() -> str:
    """Which engines may serve: one of ``TIERS``."""
    return str(_choice("tier", TIERS))


def tier_settings() -> TierSettings:
    """How engines come about."""
    return TierSettings(
        after_calls=_number("after_calls", 2, CALLS),
        staging=bool(getattr(shared.opts, "engine_room_staging", True)),
        instant=bool(getattr(shared.opts, "engine_room_instant", True)),
        disk_budget=_number("disk", 0, DISK_GB) * 1_000_000_000,
        promote_after=_number("promote", 0, PROMOTE) * CALLS_PER_PICTURE,
    )


def engines_in_memory() -> int:
    """How many engines stay loaded."""
    return _number("most", 6, MEMORY)


def folder() -> Path:
    """Where engines lie."""
    chosen = str(getattr(shared.opts, "engine_room_folder", "") or "").strip()
    return Path(chosen) if chosen else Path(paths.models_path) / "engine-room"


@contextlib.contextmanager
def forced(chosen: str) -> Iterator[None]:
    """Another policy for the length of one job; hold the host's queue lock."""
    _forced.append(chosen)
    try:
        yield
    finally:
        _forced.pop()


def _choice(name: str, choices: list[str]) -> str:
    chosen = str(getattr(shared.opts, f"engine_room_{name}", choices[0]))
    return chosen if chosen in choices else choices[0]


def _number(name: str, default: int, limits: tuple[int, int]) -> int:
    """A number that a user or a hand-edited settings file gave, within its limits."""
    value = getattr(shared.opts, f"engine_room_{name}", default)
    try:
        return min(max(int(value), limits[0]), limits[1])
    except (TypeError, ValueError, OverflowError):
        return default
