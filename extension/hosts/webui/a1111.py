"""AUTOMATIC1111: the option that its ``sd_unet`` picks, and the UNet behind it."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from modules import devices, lowvram, sd_hijack, sd_unet, shared

from . import room, settings

PATCHED = (
    torch.nn.Linear,
    torch.nn.Conv2d,
    torch.nn.GroupNorm,
    torch.nn.LayerNorm,
    torch.nn.MultiheadAttention,
)
LABEL = "Engine Room (TensorRT)"


class EngineOption(sd_unet.SdUnetOption):  # type: ignore[misc]
    """Belongs to whatever checkpoint is loaded, so that "Automatic" picks it."""

    label = LABEL

    @property
    def model_name(self) -> str | None:
        """The loaded checkpoint's name, or None so that nothing matches."""
        info = getattr(shared.sd_model, "sd_checkpoint_info", None)
        if settings.policy() == "off" or not is_ldm(shared.sd_model):
            return None
        return getattr(info, "model_name", None)

    def create_unet(self) -> Any:
        """The UNet that routes calls."""
        return EngineUnet()


OPTION = EngineOption()
_runs = itertools.count(1)


def list_options(found: list[Any]) -> None:
    """Add the option; always the same object, so that the host does not activate it again."""
    found.append(OPTION)


def is_ldm(model: Any) -> bool:
    """Whether a loaded model's UNet calls come through ``sd_unet`` at all (SD3's do not)."""
    return (
        original_forward(getattr(getattr(model, "model", None), "diffusion_model", None))
        is not None
    )


def original_forward(unet: Any) -> Any:
    """The forward function that the host replaced for this UNet's class."""
    kind = type(unet)
    if kind.__module__.startswith("sgm."):
        return sd_hijack.sgm_original_forward
    return sd_hijack.ldm_original_forward if kind.__module__.startswith("ldm.") else None


class EngineUnet(sd_unet.SdUnet):  # type: ignore[misc]
    """Takes the host's UNet calls and serves each from an engine or from the host's forward.

    Attributes:
        run: number of the sampling run.
        replaced: a UNet with a forward of another extension, until a call of this step comes.
    """

    run = 0
    replaced: Any = None

    def activate(self) -> None:
        """Bring the UNet back: the host moved it to the CPU, but engines read its weights.

        In medvram mode the host brings the whole model when it is called, unless it believes that
        it is there already.
        """
        model = shared.sd_model
        if not model.lowvram or lowvram.module_in_gpu is model.model:
            model.model.diffusion_model.to(devices.device)

    def forward(self, x: Any, timesteps: Any, context: Any, *args: Any, **kwargs: Any) -> Any:
        """One UNet call; never fails where the host's own would not."""
        EngineUnet.replaced = None
        unet = shared.sd_model.model.diffusion_model
        out = room.attempt_job(lambda: _serve(unet, x, timesteps, context, args, kwargs))
        if out is not None:
            return out
        return original_forward(unet)(unet, x, timesteps, context, *args, **kwargs)


def _serve(unet: Any, x: Any, timesteps: Any, context: Any, args: Any, kwargs: Any) -> Any:
    served = room.room().model(unet, resize="after")
    if served.arch is None or settings.policy() == "off":
        return None
    y = kwargs.get("y", args[0] if args else None)
    features = active_features()
    features += [f"the input '{name}'" for name in kwargs if name != "y"]
    if len(args) > 1 or (y is not None) != bool(served.arch.adm_channels):
        features.append("additional inputs")
    if not features:
        apply_loras(unet)
    epoch = (id(shared.sd_model), wanted_loras(), EngineUnet.run)
    call = (x, timesteps.float(), context, y, None)
    return room.serve(served, call, epoch=epoch, features=features)


def begin() -> None:
    """A sampling run begins: other extensions may have changed the model since the last."""
    EngineUnet.run = next(_runs)


def notice(params: Any) -> None:
    """Before each step: a replaced forward (ControlNet's) may go past the UNet that we gave."""
    settle()
    unet = getattr(getattr(shared.sd_model, "model", None), "diffusion_model", None)
    if "forward" in getattr(unet, "__dict__", {}) and isinstance(sd_unet.current_unet, EngineUnet):
        EngineUnet.replaced = unet


def settle() -> None:
    """After a step: count it where its calls did go past."""
    unet, EngineUnet.replaced = EngineUnet.replaced, None
    if unet is not None:
        room.count_replaced(unet)


def loaded(model: Any) -> None:
    """The host loaded a model in mid-job (a refiner): it does not choose a UNet again by itself."""
    if shared.state.job:
        sd_unet.apply_unet()


def active_features() -> list[str]:
    """What is active in the host's UNet and no engine computes."""
    model = shared.sd_model
    found = []
    if shared.loaded_hypernetworks:
        found.append("a hypernetwork")
    if getattr(model, "applied_token_merged_ratio", 0):
        found.append("token merging")
    if sd_hijack.model_hijack.circular_enabled:
        found.append("tiling")
    if getattr(shared.opts, "lora_functional", False) and wanted_loras():
        found.append("LoRA by the old method")
    if shared.cmd_opts.lowvram:
        found.append("low-VRAM mode")
    return found


def wanted_loras() -> Hashable:
    """The networks that the job asks for, with strengths, as the host compares them."""
    networks = sys.modules.get("networks")
    loaded = getattr(networks, "loaded_networks", ())
    return tuple(
        (
            n.name,
            n.te_multiplier,
            n.unet_multiplier,
            n.dyn_dim,
            getattr(getattr(n, "network_on_disk", None), "hash", None),
        )
        for n in loaded
    )


@torch.no_grad()
def apply_loras(unet: Any) -> None:
    """Merge the job's networks as the host's layers would on their next forward.

    The host merges inside each layer's forward, which engines never run.
    """
    networks = sys.modules.get("networks")
    if networks is None or not hasattr(networks, "network_apply_weights"):
        return
    wanted = (id(unet), wanted_loras())
    if getattr(unet, "engine_room_loras", None) == wanted and _consistent(unet, networks):
        return
    for module in _layers(unet):
        if hasattr(module, "network_layer_name"):
            networks.network_apply_weights(module)
    unet.engine_room_loras = wanted


def _layers(unet: Any) -> Iterator[Any]:
    """The layers whose forward the host's LoRA code replaces."""
    return (module for module in unet.modules() if isinstance(module, PATCHED))


def _consistent(unet: Any, networks: Any) -> bool:
    """Whether the first patched layer still carries what is wanted (a reload restores it)."""
    wanted = tuple(
        (n.name, n.te_multiplier, n.unet_multiplier, n.dyn_dim) for n in networks.loaded_networks
    )
    layer = next((m for m in _layers(unet) if hasattr(m, "network_layer_name")), None)
    return layer is None or getattr(layer, "network_current_names", ()) == wanted
