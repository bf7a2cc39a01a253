"""Carry out a plan: split, pad and repeat inputs, run the engines, join their outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from .engine.interface import Engine
from .router import Part, Plan
from .unet import Control

Inputs = dict[str, Tensor]


def engine_inputs(
    x: Tensor,
    timesteps: Tensor,
    context: Tensor,
    y: Tensor | None = None,
    control: Control[Tensor] | None = None,
) -> Inputs:
    """Name the tensors of a UNet call as engines do; absent control residuals stay absent.

    The control lists are read, never changed, so the host can still consume them.
    """
    inputs = {"x": x, "timesteps": timesteps, "context": context}
    if y is not None:
        inputs["y"] = y
    for part in ("input", "middle", "output"):
        residuals: Sequence[Tensor | None] = getattr(control, part) if control else ()
        for index, residual in enumerate(residuals):
            if residual is not None:
                inputs[f"control_{part}_{index}"] = residual
    return inputs


def run_unet(unet: Callable[..., Tensor], inputs: Mapping[str, Tensor]) -> Tensor:
    """Run a UNet (the torch interpreter, or another call of its form) on inputs by engine name."""
    control = None
    if "control_middle_0" in inputs:
        count = sum(name.startswith("control_output_") for name in inputs)
        control = Control(
            input=[inputs[f"control_input_{i}"] for i in range(count)],
            middle=[inputs["control_middle_0"]],
            output=[inputs[f"control_output_{i}"] for i in range(count)],
        )
    context, y = inputs["context"], inputs.get("y")
    return unet(inputs["x"], inputs["timesteps"], context, y, control)


def serve(plan: Plan, engines: Mapping[str, Engine], inputs: Mapping[str, Tensor]) -> Tensor:
    """Run ``plan`` over ``inputs`` (from ``engine_inputs``).

    Returns:
        [B, C_out, H, W]; valid until one of the engines runs again if the plan has one part.
    """
    outputs = []
    for part in plan.parts:
        engine = engines[part.stem]
        out = engine.run(_part_inputs(part, engine, inputs))
        rows = out[: part.stop - part.start]
        # An engine's output buffer is overwritten by its next run.
        outputs.append(rows.clone() if len(plan.parts) > 1 else rows)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _part_inputs(part: Part, engine: Engine, inputs: Mapping[str, Tensor]) -> Inputs:
    found: Inputs = {}
    for name, spec in engine.inputs.items():
        tensor = inputs.get(name)
        if tensor is None:
            found[name] = inputs["x"].new_zeros(spec.shape)
            continue
        tensor = tensor[part.start : part.stop]
        if part.padding:
            last = tensor[-1:].expand(part.padding, *tensor.shape[1:])
            tensor = torch.cat([tensor, last])
        if name == "context" and part.repeats > 1:
            tensor = tensor.repeat(1, part.repeats, 1)
        found[name] = tensor
    return found
