"""This process's room, which of the hosts this is, and how a call gets to an engine."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any

from modules import shared

from ...errors import CancelledError
from ...progress import CancelToken, Progress
from ...room import Room, ServedModel, attempt
from ...router import Reason
from . import settings


@lru_cache(maxsize=1)
def is_forge() -> bool:
    """Whether this is Forge, reForge or Forge Classic; False in AUTOMATIC1111."""
    return importlib.util.find_spec("modules_forge") is not None


@lru_cache(maxsize=1)
def room() -> Room:
    """This process's room, over the folder of the settings."""
    return Room(settings.folder())


def configure() -> None:
    """A job begins: take what is set now."""
    room().tiers.settings = settings.tier_settings()
    room().pool.most = settings.engines_in_memory()


def unloaded() -> None:
    """The host reloads its scripts: stop building; engines stay, since the core does."""
    if room.cache_info().currsize:
        room().tiers.cancel()
        room().tiers.retry()


def count_replaced(network: Any) -> None:
    """A call of a UNet whose forward function another extension has replaced: the host's."""
    served = room().model(network, resize="before" if is_forge() else "after")
    if served.arch is not None:
        served.routed.count_host(Reason.FEATURE, "another extension replaced the UNet's forward")


def attempt_job(serve: Callable[[], Any]) -> Any:
    """Result of ``serve``; None where it fails or the job's build was cancelled."""
    try:
        return attempt(serve)
    except CancelledError:
        return None


class JobProgress:
    """A build that a picture waits for: shown in the host's progress text, ended by Interrupt."""

    def __init__(self) -> None:
        state = shared.state
        self.cancel = CancelToken(lambda: bool(state.interrupted or state.skipped))

    def __call__(self, progress: Progress) -> None:
        """Show a moment of the build."""
        shared.state.textinfo = f"TensorRT engine: {progress.phase} {progress.fraction:.0%}"


def serve(
    served: ServedModel, args: tuple[Any, ...], *, epoch: Hashable, features: list[str]
) -> Any:
    """One call through engines under the settings; None where the host must serve."""
    progress = JobProgress()
    served.tier = settings.tier()
    served.policy, served.on_progress, served.cancel = settings.policy(), progress, progress.cancel
    return served.serve(*args, epoch=epoch, features=features)
