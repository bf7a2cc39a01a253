"""HTTP routes for the panel in ComfyUI: status, removal by id; nothing takes a path."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from server import PromptServer

from ...errors import EngineRoomError, LibraryError, SettingError
from ...key import check_stem

BASE = "/engine_room"
Action = Callable[[Any], Awaitable[Any]]


def register() -> None:
    """Add the routes to ComfyUI's server."""
    if getattr(PromptServer, "instance", None) is None:
        return
    routes = PromptServer.instance.routes
    routes.get(f"{BASE}/status")(show)
    for action in (remove, retry, cancel, install, doctor):
        routes.post(f"{BASE}/{action.__name__}")(_json_only(action))


def _json_only(action: Action) -> Action:
    """Refuse what a page of another origin can send without the host's consent (no preflight)."""

    async def handle(request: Any) -> Any:
        if request.content_type != "application/json":
            return _refuse(SettingError("The request must be JSON."), 415)
        return await action(request)

    return handle


async def show(request: Any) -> Any:
    """Engines, counters, builds."""
    return web.json_response(await asyncio.to_thread(_status))


def _status() -> dict[str, Any]:
    from ...status import status
    from .room import room

    return status(room(), _place())


def _place() -> str:
    """Where the host draws, as engines name it."""
    import comfy.model_management

    from .loading import place_of

    return place_of(comfy.model_management.get_torch_device())


async def remove(request: Any) -> Any:
    """Delete the engine of ``{"id": ...}`` from memory and disk."""

    def work(stem: str) -> dict[str, Any]:
        from .room import room

        check_stem(stem)
        return {"freed": room().remove(stem)}

    try:
        body = json.loads(await request.text())
        return web.json_response(await asyncio.to_thread(work, body.get("id")))
    except (ValueError, AttributeError):
        return _refuse(LibraryError("The request names no engine."), 400)
    except EngineRoomError as error:
        return _refuse(error, 404)


async def retry(request: Any) -> Any:
    """Try failed engines again when they are next wanted."""
    from .room import room

    room().tiers.retry()
    return web.json_response({})


async def cancel(request: Any) -> Any:
    """Cancel builds in the background."""
    from .room import room

    room().tiers.cancel()
    return web.json_response({})


async def install(request: Any) -> Any:
    """Fill the private folder with TensorRT; the host's packages are not touched."""
    from .room import room

    room().install()
    return web.json_response({"installing": room().installing})


async def doctor(request: Any) -> Any:
    """Examine this machine: a test engine is built, which takes some seconds."""

    def work() -> dict[str, Any]:
        from ...doctor import diagnose
        from .hooks import facts
        from .room import room

        return diagnose(room().library, _place(), host=facts()).to_json()

    return web.json_response(await asyncio.to_thread(work))


def _refuse(error: EngineRoomError, code: int) -> Any:
    return web.json_response({"error": error.to_json()}, status=code)
