"""The tab in the host: its loaded model, and its export."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from modules import call_queue, devices, paths, shared
from torch import Tensor

from ...doctor import HostFacts
from ...errors import EngineRoomError, SettingError
from ...log import logger
from ...room import Room, ServedModel
from ...routed import DTYPE_NAMES
from ...serving import Target
from ...shapes import Shape
from ...ui.drawing import DrawJob, Drawn, lora_tags
from ...ui.facts import LiveModel
from ...wanted import Job
from . import api, drawing, hooks, room
from .prediction import prediction_of


class WebuiHost:
    """This host, as the tab sees it."""

    def __init__(self) -> None:
        self.has_control = room.is_forge()

    def room(self) -> Room:
        """This process's room."""
        return room.room()

    def device(self) -> str:
        """Where it draws."""
        return api.place()

    def checkpoint(self) -> str:
        """The loaded checkpoint."""
        info = getattr(_loaded(), "sd_checkpoint_info", None)
        return str(getattr(info, "title", "") or "")

    def facts(self) -> HostFacts:
        """Version, hooks, and other extensions."""
        return hooks.facts()

    def job(self, shape: Shape) -> Job:
        """The engine job for the loaded model.

        Raises:
            EngineRoomError: no model is loaded, or no engine can serve it.
        """
        target = Target(device=self.device(), dtype=DTYPE_NAMES[_dtype()])
        return Job(arch=_served().require(), shape=shape, target=target)

    @contextlib.contextmanager
    def merged(self, loras: Sequence[str], strength: float) -> Iterator[LiveModel]:
        """The loaded model with these LoRAs, merged in the host's own way by drawing a little.

        The host's jobs wait within the context: they would merge others. Without LoRAs too it
        draws, which takes those of the last picture out.
        """
        job = DrawJob(prompt=f"merge{lora_tags(loras, strength)}", width=64, height=64, steps=1)
        with call_queue.queue_lock:
            drawing.draw_now(job, engines=False)
            served = _served()
            yield LiveModel(
                arch=served.require(),
                weights=_Copy(served.weights),
                folder=Path(paths.models_path) / "engine-room" / "onnx",
                source={"checkpoint": self.checkpoint()},
                model={"prediction": prediction_of(_loaded())},
            )

    def loras(self) -> list[str]:
        """Names of the LoRA files that the host knows."""
        networks = sys.modules.get("networks")
        return sorted(getattr(networks, "available_networks", {}))

    def draw(self, job: DrawJob, *, engines: bool) -> Drawn:
        """One picture through the host's own processing, with no other extension's script."""
        return drawing.draw(job, engines=engines)


class _Copy(Mapping[str, Tensor]):
    """The live weights, each copied when it is read, outside of inference mode."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights

    def __getitem__(self, name: str) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            return self._weights[name].detach().to("cpu", copy=True)

    def __iter__(self) -> Any:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def _loaded() -> Any:
    """The loaded model without making the host load one."""
    from modules import sd_models

    return getattr(sd_models.model_data, "sd_model", None)


def _unet() -> Any:
    model = _loaded()
    if room.is_forge():
        patcher = getattr(getattr(model, "forge_objects", None), "unet", None)
        unet = getattr(getattr(patcher, "model", None), "diffusion_model", None)
    else:
        unet = getattr(getattr(model, "model", None), "diffusion_model", None)
    if unet is None:
        raise SettingError("No checkpoint is loaded yet.", hint="Draw one picture first.")
    return unet


def _served() -> ServedModel:
    """What Engine Room knows of the loaded model."""
    return room.room().model(_unet(), resize="before" if room.is_forge() else "after")


def _dtype() -> torch.dtype:
    """What the UNet's calls compute in."""
    if not room.is_forge():
        return torch.float32 if shared.cmd_opts.no_half else devices.dtype_unet
    model = _loaded().forge_objects.unet.model
    for name in ("computation_dtype", "manual_cast_dtype"):
        found = getattr(model, name, None)
        if found is not None:
            return found  # type: ignore[no-any-return]
    return next(iter(_unet().parameters())).dtype  # type: ignore[no-any-return]


def tabs() -> list[Any]:
    """For ``on_ui_tabs``: (blocks, title, element id)."""
    try:
        import gradio

        from ...ui.tab import Tab

        return [(Tab(WebuiHost(), gradio).build(), "Build TRT engine", "engine_room")]
    except (EngineRoomError, ImportError, AttributeError, TypeError):
        logger.exception("The tab of Engine Room could not be made.")
        return []
