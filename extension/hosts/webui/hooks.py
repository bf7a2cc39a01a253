"""What the doctor wants to know of this host."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from modules import extensions, scripts, shared

from ...doctor import HostFacts, known_others
from . import room


def facts() -> HostFacts:
    """Version, hooks, and other extensions that touch the UNet."""
    names = [extension.name for extension in extensions.active()]
    return HostFacts(
        name=_name(),
        hooks=_forge_hooks() if room.is_forge() else _a1111_hooks(),
        others=[*known_others(names), *_other_unets()],
    )


def _name() -> str:
    from modules import launch_utils

    kind = "Forge family" if room.is_forge() else "AUTOMATIC1111"
    return f"{kind} {launch_utils.git_tag()}"


def _has_script_hook() -> bool:
    return hasattr(scripts.Script, "process_before_every_sampling")


def _forge_hooks() -> dict[str, bool]:
    patcher: Any = None
    for name in ("backend.patcher.base", "ldm_patched.modules.model_patcher"):
        if patcher is None and _exists(name):
            patcher = getattr(importlib.import_module(name), "ModelPatcher", None)
    return {
        "process_before_every_sampling": _has_script_hook(),
        "set_model_unet_function_wrapper": hasattr(patcher, "set_model_unet_function_wrapper"),
    }


def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False


def _a1111_hooks() -> dict[str, bool]:
    from modules import sd_hijack, sd_unet

    return {
        "process_before_every_sampling": _has_script_hook(),
        "sd_unet": hasattr(sd_unet, "SdUnetOption"),
        "original forward": getattr(sd_hijack, "ldm_original_forward", None) is not None,
    }


def _other_unets() -> list[str]:
    """Options of other extensions in A1111's list of UNets."""
    if room.is_forge():
        return []
    from modules import sd_unet

    from .a1111 import LABEL

    labels = [option.label for option in sd_unet.unet_options if option.label != LABEL]
    chosen = getattr(shared.opts, "sd_unet", "Automatic")
    found = [f"{label}: another UNet that can be chosen" for label in labels]
    if chosen not in ("Automatic", LABEL):
        found.append(f"the setting SD Unet is '{chosen}': engines are not used")
    return found
