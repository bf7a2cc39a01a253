"""What nodes say in the browser while they run and afterwards."""

from __future__ import annotations

import sys
from typing import Any

REPORT = "engine_room.report"


def report(node: str, text: str) -> None:
    """Show ``text`` on a node, at any time."""
    server = _server()
    if node and server is not None:
        server.send_sync(REPORT, {"node": node, "text": text})


def say(text: str) -> None:
    """Show ``text`` on the node that runs, until it says something else (newer hosts)."""
    server = _server()
    node = getattr(server, "last_node_id", None)
    if node and hasattr(server, "send_progress_text"):
        server.send_progress_text(text, node)


def _server() -> Any:
    """The host's server; None where its code runs without one."""
    return getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)
