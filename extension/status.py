"""What a host's user interface shows: engines, calls served and not, what is being built."""

from __future__ import annotations

from typing import Any

from . import __version__
from .engine_state import Machine
from .errors import UnsupportedMachineError
from .library import Entry
from .machine import backend_versions, machine_of
from .room import Room
from .serving import facts
from .speed import in_service, recorded


def status(room: Room, device: str) -> dict[str, Any]:
    """Everything about a room as a JSON object; never raises for what is on disk."""
    try:
        machine = machine_of(device)
    except UnsupportedMachineError:
        machine = Machine(backends=backend_versions())
    loaded = {candidate.stem for candidate in room.pool.candidates()}
    counts = room.counters.to_json()
    return {
        "version": __version__,
        "folder": str(room.library.folder),
        "gpu": machine.gpu,
        "backends": dict(machine.backends),
        "unable": room.tiers.unable or room.tiers.short,
        "installing": room.installing,
        "installed": room.installed,
        "served": counts["served"],
        "host": counts["host"],
        "reasons": counts["reasons"],
        "wanted": room.tiers.wanted,
        "progress": _progress(room),
        "failed": dict(room.tiers.failed),
        "memory_bytes": room.pool.nbytes,
        "log": list(room.lines),
        "engines": [
            {
                **facts(entry),
                "loaded": entry.stem in loaded,
                **_use(room, entry, device, machine.gpu),
            }
            for entry in room.library.entries(machine)
        ],
    }


def _progress(room: Room) -> dict[str, Any]:
    """How far the engines are that are being made ready, by stem."""
    events = [room.events[stem] for stem in room.tiers.wanted if stem in room.events]
    return {
        event.stem: {
            "label": event.label,
            "phase": event.progress.phase if event.progress else event.kind,
            "fraction": event.progress.fraction if event.progress else None,
            "remaining": event.progress.remaining if event.progress else None,
        }
        for event in events
        if event.kind in ("building", "loading")
    }


def _use(room: Room, entry: Entry, device: str, gpu: str) -> dict[str, Any]:
    used = entry.changing.get("last_used")
    found = entry.manifest and in_service(room.pool, entry.manifest.key, device)
    speed = found or recorded(entry.changing, gpu)
    return {
        "last_used": used if isinstance(used, int | float | str) else None,
        "speed": speed.ratio if speed else None,
    }
