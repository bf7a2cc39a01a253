"""The one room of this ComfyUI process."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import folder_paths

from ...room import Room

KEY = "engine_room"


@lru_cache(maxsize=1)
def room() -> Room:
    """This process's room, over ``models/engine-room``."""
    return Room(Path(folder_paths.models_dir) / "engine-room")
