"""Random weights and inputs for UNets, scaled so that every feature moves the result."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from extension.architecture import SDXL_REFINER, TINY, Architecture
from extension.onnx_graph import graph_inputs
from extension.shapes import Shape
from extension.unet import Control

REFINER_TINY = replace(
    SDXL_REFINER,
    model_channels=64,
    channel_mult=(1, 2, 2, 2),
    transformer_depth=(0, 0, 1, 1, 2, 2, 0, 0),
    transformer_depth_middle=2,
    transformer_depth_output=(0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0),
    context_dim=64,
    adm_channels=64 + 5 * 256,
)
PRUNED_TINY = replace(
    TINY["sdxl"],
    transformer_depth=(0, 0, 2, 1, 2, 1),
    transformer_depth_middle=-1,
    transformer_depth_output=(1, 1, 3, 2, 1, 1, 0, 0, 0),
)
NO_MIDDLE_TINY = replace(
    TINY["sdxl"],
    num_res_blocks=(1, 2, 1),
    transformer_depth=(0, 1, 2, 1),
    transformer_depth_middle=-2,
    transformer_depth_output=(1, 2, 1, 1, 1, 0, 0),
)
SMALL = {
    "sd15": replace(TINY["sd15"], channel_mult=(1, 2, 2, 2)),
    "sd21": replace(TINY["sd21"], channel_mult=(1, 1, 2, 2)),
    "sdxl": TINY["sdxl"],
    "refiner": REFINER_TINY,
    "pruned": PRUNED_TINY,
    "no-middle": NO_MIDDLE_TINY,
    "inpainting": replace(TINY["sd15"], in_channels=9, channel_mult=(1, 2, 2, 2)),
    "pix2pix": replace(TINY["sd15"], in_channels=8, channel_mult=(1, 2, 2, 2)),
    "two-levels": replace(
        TINY["sd15"],
        channel_mult=(1, 3),
        num_res_blocks=(1, 3),
        transformer_depth=(2, 1, 0, 1),
        transformer_depth_output=(1, 0, 1, 2, 1, 1),
    ),
}


def random_weights(arch: Architecture, seed: int = 0) -> dict[str, Tensor]:
    """fp32 weights that keep activations near 1, with biases that matter."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in arch.parameters().items():
        tensor = torch.randn(shape, generator=generator)
        if len(shape) > 1:
            tensor /= math.sqrt(math.prod(shape[1:]))
            # Sharper attention, so that the prompt moves the result.
            if name.endswith(("to_q.weight", "to_k.weight")):
                tensor *= 1.4
        else:
            tensor *= 0.2
            if name.endswith("weight"):
                tensor += 1
        weights[name] = tensor
    return weights


def random_inputs(arch: Architecture, shape: Shape, seed: int = 1) -> dict[str, Tensor]:
    """Every input of one call by its engine name, fp32."""
    generator = torch.Generator().manual_seed(seed)
    inputs = {
        name: torch.randn(dims, generator=generator)
        for name, dims in graph_inputs(arch, shape, control=shape.control).items()
    }
    inputs["timesteps"] = torch.rand(shape.batch, generator=generator) * 998 + 0.5
    return inputs


def control_of(inputs: dict[str, Tensor]) -> Control[Tensor] | None:
    """The control residuals among ``inputs``."""
    if "control_middle_0" not in inputs:
        return None
    count = sum(name.startswith("control_input_") for name in inputs)
    return Control(
        input=[inputs[f"control_input_{i}"] for i in range(count)],
        middle=[inputs["control_middle_0"]],
        output=[inputs[f"control_output_{i}"] for i in range(count)],
    )


def module_of(weights: dict[str, Tensor]) -> nn.Module:
    """A module that holds these very tensors under their LDM names, and computes nothing."""
    root = nn.Module()
    for name, tensor in weights.items():
        owner = root
        *path, leaf = name.split(".")
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = getattr(owner, part)
        owner.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
    return root


def relative_l2(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b| in fp64."""
    return float((a.double() - b.double()).norm() / b.double().norm())
