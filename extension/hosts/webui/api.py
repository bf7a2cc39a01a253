"""HTTP routes: status, and actions by engine id; the host's authentication is respected."""

from __future__ import annotations

import base64
import binascii
import secrets
from typing import Any

from modules import devices, shared

from ...doctor import diagnose
from ...errors import EngineRoomError, LibraryError
from ...key import check_stem
from ...status import status
from .room import room

BASE = "/engine-room"
COOKIES = ("access-token", "access-token-unsecure")


def add_routes(demo: Any, app: Any) -> None:
    """For ``on_app_started``."""
    app.add_api_route(f"{BASE}/status", _guarded(show), methods=["GET"])
    app.add_api_route(f"{BASE}/remove", _guarded(remove), methods=["POST"])
    app.add_api_route(f"{BASE}/doctor", _guarded(doctor), methods=["POST"])


def place() -> str:
    """The device that the host draws on, as engines name it."""
    device = devices.device
    return f"cuda:{device.index or 0}" if device.type == "cuda" else "cpu"


def show(body: Any) -> dict[str, Any]:
    """Engines, counters, builds."""
    return status(room(), place())


def remove(body: Any) -> dict[str, Any]:
    """Delete the engine of ``{"id": ...}`` from memory and disk."""
    if not isinstance(body, dict):
        raise LibraryError("The request names no engine.")
    stem = check_stem(body.get("id", ""))
    return {"freed": room().remove(stem)}


def doctor(body: Any) -> dict[str, Any]:
    """Examine this machine: a test engine is built, which takes some seconds."""
    from .hooks import facts

    return diagnose(room().library, place(), host=facts()).to_json()


def allowed(app: Any, headers: Any, cookies: Any) -> bool:
    """Whether a request carries what the host would ask of it."""
    if getattr(shared.cmd_opts, "api_auth", None):
        return _basic(headers.get("authorization", ""), str(shared.cmd_opts.api_auth))
    if getattr(app, "auth", None) is None:
        return True
    tokens = getattr(app, "tokens", {})
    names = [name for name in cookies if name.startswith(COOKIES)]
    return any(cookies[name] in tokens for name in names)


def _basic(header: str, accounts: str) -> bool:
    kind, _, text = header.partition(" ")
    try:
        given = base64.b64decode(text, validate=True).decode() if kind.lower() == "basic" else ""
    except (ValueError, binascii.Error):
        return False
    return any(
        secrets.compare_digest(given.encode(), account.strip().encode())
        for account in accounts.split(",")
    )


def _guarded(action: Any) -> Any:
    from fastapi import Request
    from fastapi.concurrency import run_in_threadpool
    from fastapi.responses import JSONResponse

    async def handle(request: Request) -> JSONResponse:
        if not allowed(request.app, request.headers, request.cookies):
            return JSONResponse({"error": "not authenticated"}, status_code=401)
        # JSON needs a preflight, which the host answers; other forms cross origins without one.
        kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if request.method == "POST" and kind != "application/json":
            return JSONResponse({"error": "the request must be JSON"}, status_code=415)
        try:
            body = await request.json() if request.method == "POST" else None
            return JSONResponse(await run_in_threadpool(action, body))
        except EngineRoomError as error:
            return JSONResponse({"error": error.to_json()}, status_code=404)
        except ValueError:
            return JSONResponse({"error": "the body is no JSON"}, status_code=400)

    # Postponed annotations would leave FastAPI with a name that this module does not have.
    handle.__annotations__ = {"request": Request, "return": JSONResponse}
    return handle
