"""What the doctor wants to know of ComfyUI."""

from __future__ import annotations

from pathlib import Path

import folder_paths
from comfy import patcher_extension
from comfy.ldm.modules.diffusionmodules import openaimodel

from ...doctor import HostFacts, known_others


def facts() -> HostFacts:
    """Version, hooks, and other custom nodes that touch the UNet."""
    wrappers = getattr(patcher_extension, "WrappersMP", None)
    callbacks = getattr(patcher_extension, "CallbacksMP", None)
    return HostFacts(
        name=f"ComfyUI {_version()}",
        hooks={
            "diffusion model wrapper": hasattr(wrappers, "DIFFUSION_MODEL"),
            "pre-run callback": hasattr(callbacks, "ON_PRE_RUN"),
            "detach callback": hasattr(callbacks, "ON_DETACH"),
        },
        others=[*known_others(_custom_nodes()), *_replaced_forward()],
    )


def _version() -> str:
    try:
        from comfyui_version import __version__
    except ImportError:
        return "of unknown version"
    return str(__version__)


def _custom_nodes() -> list[str]:
    folders = [Path(folder) for folder in folder_paths.get_folder_paths("custom_nodes")]
    return [
        path.name
        for folder in folders
        if folder.is_dir()
        for path in folder.iterdir()
        if path.is_dir() and not path.name.endswith((".disabled", "__pycache__"))
    ]


def _replaced_forward() -> list[str]:
    module = getattr(openaimodel.UNetModel.forward, "__module__", "")
    if module == openaimodel.__name__:
        return []
    return [f"the UNet's forward is replaced by {module}: the host serves"]
