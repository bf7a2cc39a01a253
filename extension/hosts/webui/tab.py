"""The tab "Build TRT engine"."""

from __future__ import annotations

from typing import Any


def tabs() -> list[Any]:
    """For ``on_ui_tabs``: (blocks, title, element id)."""
    return []
