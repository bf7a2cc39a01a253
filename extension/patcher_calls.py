"""UNet calls of model patchers (ComfyUI, the Forge family) in the engine's terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from .architecture import Architecture
from .ops_shapes import skip_shapes
from .room import ServedModel
from .shapes import Shape
from .unet import Control

ControlLists = Mapping[str, Sequence["Tensor | None"]]
# x, timesteps, context, y, control, transformer_options
PatchedCall = tuple[
    Tensor, Tensor, Tensor, "Tensor | None", "ControlLists | None", Mapping[str, Any]
]
CONTROL_PARTS = {"input", "middle", "output"}
# Entries of transformer_options that change what the network computes, where they are not empty.
ACTIVE_OPTIONS = {
    "patches": "patches",
    "patches_replace": "replaced blocks",
    "optimized_attention_override": "an attention override",
    "block_modifiers": "block modifiers",
    "block_inner_modifiers": "block modifiers",
    "group_norm_wrapper": "a group norm wrapper",
}
# What lies around the network may change it for the time of a call; these do not.
KNOWN_WRAPPERS = {"engine_room", "easycache"}
# The ControlNet itself, which the Forge family passes along for wrappers; the network ignores it.
IGNORED_INPUTS = {"control_model"}


def describe(
    served: ServedModel, call: PatchedCall, extra: Mapping[str, Any]
) -> tuple[tuple[Any, ...], list[str]]:
    """A network's call as ``ServedModel.serve`` takes it: arguments, and active features."""
    assert served.arch is not None
    x, timesteps, context, y, control, options = call
    features = active_features(options, extra, control)
    shape = served.routed.describe(x, context, control is not None).shape
    residuals, problem = read_control(control, served.arch, shape)
    if problem:
        features.append(problem)
    if (y is not None) != bool(served.arch.adm_channels):
        features.append("the input 'y'")
    return (x, timesteps.float(), context, y, residuals), features


def active_features(
    options: Mapping[str, Any], extra: Mapping[str, Any], control: Mapping[str, Any] | None
) -> list[str]:
    """Names of what is active in a call and no engine computes."""
    found = []
    for key, words in ACTIVE_OPTIONS.items():
        value = options.get(key)
        if value:
            names = ", ".join(sorted(map(str, value))) if isinstance(value, Mapping) else ""
            found.append(f"{words} ({names})" if names else words)
    wrappers = (options.get("wrappers") or {}).get("diffusion_model") or {}
    others = sorted(str(key or "unnamed") for key, made in wrappers.items() if made)
    others = [key for key in others if key not in KNOWN_WRAPPERS]
    found += [f"another node's wrapper around the UNet ({', '.join(others)})"] if others else []
    given = {n for n, value in extra.items() if value is not None} - IGNORED_INPUTS
    found += [f"the input '{name}'" for name in sorted(given)]
    unknown = set(control or {}) - CONTROL_PARTS
    found += [f"control '{name}'" for name in sorted(unknown) if control and control[name]]
    return found


def read_control(
    control: Mapping[str, Sequence[Tensor | None]] | None, arch: Architecture, shape: Shape
) -> tuple[Control[Tensor] | None, str]:
    """The residuals of a call by block, and why they cannot be used (empty where they can).

    The host pops its lists from the end: the input list runs from the last block to the first,
    the output list belongs to the last skips. They are read here and left as they are.
    """
    if control is None or not any(control.get(part) for part in CONTROL_PARTS):
        return None, ""
    sizes = [tuple(dims) for dims in skip_shapes(arch, shape)]
    count = len(sizes)
    inputs = [*reversed(control.get("input") or ())][:count]
    last = [*(control.get("output") or ())][-count:]
    outputs: list[Tensor | None] = [*[None] * (count - len(last)), *last]
    middle = [*(control.get("middle") or ())][-1:]
    wanted = [*sizes[: len(inputs)], *sizes[-1:] * len(middle), *sizes]
    for residual, size in zip([*inputs, *middle, *outputs], wanted, strict=True):
        if residual is not None and tuple(residual.shape) != size:
            return None, f"a control residual of shape {tuple(residual.shape)} instead of {size}"
    return Control(input=inputs, middle=middle, output=outputs), ""
