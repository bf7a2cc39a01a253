"""The Forge family: the patcher's function wrapper, with the UNet's forward routed inside it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from typing import Any

from modules import shared

from ...live import OURS
from ...patcher_calls import PatchedCall, describe
from . import room, settings

_runs = itertools.count()


def attach(p: Any) -> None:
    """Route the UNet of this sampling run; called when its LoRAs are known."""
    if settings.policy() != "off":
        _wrap(p.sd_model)


def keep(params: Any) -> None:
    """Before each step: a model that came in mid-run (a refiner) is routed too."""
    model = shared.sd_model
    unet = getattr(getattr(model, "forge_objects", None), "unet", None)
    wrapper = getattr(unet, "model_options", {}).get("model_function_wrapper")
    if unet is not None and not isinstance(wrapper, Wrapper) and settings.policy() != "off":
        _wrap(model)


def _wrap(model: Any) -> None:
    unet = model.forge_objects.unet.clone()
    before = unet.model_options.get("model_function_wrapper")
    if isinstance(before, Wrapper):
        before = before.before
    identity = (id(model), str(getattr(model, "current_lora_hash", "")), next(_runs))
    unet.set_model_unet_function_wrapper(Wrapper(before, identity))
    model.forge_objects.unet = unet


class Wrapper:
    """Replaces the network's forward for the length of one ``apply_model``.

    The host then does its own scaling, casts and concatenation, and the engine sees exactly what
    the network would. Hosts copy options deeply; this must stay one object.
    """

    def __init__(self, before: Callable[..., Any] | None, epoch: Hashable) -> None:
        self.before = before
        self.epoch = epoch

    def __deepcopy__(self, memo: dict[int, Any]) -> Wrapper:
        return self

    def __call__(self, apply_model: Any, args: dict[str, Any]) -> Any:
        """One batch of conditions."""
        network = apply_model.__self__.diffusion_model
        replaced = network.__dict__.get("forward")
        routed = replaced is None
        if routed:
            network.forward = _routed_forward(network, self.epoch)
        elif not hasattr(replaced, OURS):
            room.count_replaced(network)
        try:
            if self.before is not None:
                return self.before(apply_model, args)
            return apply_model(args["input"], args["timestep"], **args["c"])
        finally:
            if routed:
                network.__dict__.pop("forward", None)


def _routed_forward(network: Any, epoch: Hashable) -> Any:
    original = network.forward

    def forward(
        x: Any,
        timesteps: Any = None,
        context: Any = None,
        y: Any = None,
        control: Any = None,
        transformer_options: Any = None,
        **extra: Any,
    ) -> Any:
        options = {} if transformer_options is None else transformer_options
        call = (x, timesteps, context, y, control, options)
        out = room.attempt_job(lambda: _serve(network, call, extra, epoch))
        if out is not None:
            return out
        return original(
            x,
            timesteps,
            context=context,
            y=y,
            control=control,
            transformer_options=options,
            **extra,
        )

    setattr(forward, OURS, True)
    return forward


def _serve(network: Any, call: PatchedCall, extra: dict[str, Any], epoch: Hashable) -> Any:
    served = room.room().model(network)
    if served.arch is None or call[2] is None:
        return None
    args, features = describe(served, call, extra)
    return room.serve(served, args, epoch=epoch, features=features)
