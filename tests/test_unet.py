"""The torch interpreter against the original LDM code, and the description itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from extension.architecture import FULL
from extension.ops_shapes import skip_shapes
from extension.ops_torch import TorchUNet
from extension.shapes import Shape
from extension.unet import Control, input_blocks
from tests.support_models import SMALL, control_of, random_inputs, random_weights, relative_l2

# fp32 rounds at 6e-8; some 100 layers in sequence reach about 1e-6. A wrong constant, name or
# order is far above 1e-5.
TOLERANCE = 1e-5
EVEN = Shape(batch=2, height=16, width=24)
ODD = Shape(batch=1, height=13, width=21, tokens=154, control=True)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(
    ("shape", "resize"), [(EVEN, "before"), (ODD, "before"), (ODD, "after")], ids=str
)
def test_equals_ldm(name, shape, resize):
    from tests.support_ldm import ldm_unet, run_ldm

    arch = replace(SMALL[name], resize=resize)
    weights = random_weights(arch)
    inputs = random_inputs(arch, shape)
    control = control_of(inputs)
    expected = run_ldm(ldm_unet(arch, weights), inputs, control, resize)
    actual = TorchUNet(arch, weights)(
        inputs["x"], inputs["timesteps"], inputs["context"], inputs.get("y"), control
    )
    assert relative_l2(actual, expected) <= TOLERANCE


@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_every_feature_matters(name):
    """The comparison above would notice a feature that is ignored."""
    arch = SMALL[name]
    unet = TorchUNet(arch, random_weights(arch))
    inputs = random_inputs(arch, ODD)
    control = control_of(inputs)
    base = unet(*(inputs.get(k) for k in ("x", "timesteps", "context", "y")), control)
    for key in ("timesteps", "context", "y"):
        if key in inputs:
            other = {**inputs, key: inputs[key] * 0.5}
            moved = unet(*(other.get(k) for k in ("x", "timesteps", "context", "y")), control)
            assert relative_l2(moved, base) > 20 * TOLERANCE, key
    for part in ("input", "middle", "output"):
        count = len(getattr(control, part))
        for index in range(count):
            entries = list(getattr(control, part))
            entries[index] = None
            moved = unet(
                *(inputs.get(k) for k in ("x", "timesteps", "context", "y")),
                replace(control, **{part: entries}),
            )
            assert relative_l2(moved, base) > 20 * TOLERANCE, (part, index)


def test_resize_orders_differ_only_at_odd_sizes():
    arch = SMALL["sd15"]
    weights = random_weights(arch)
    for shape, differs in ((EVEN, False), (ODD, True)):
        inputs = random_inputs(arch, replace(shape, control=False))
        before, after = (
            TorchUNet(replace(arch, resize=order), weights)(
                inputs["x"], inputs["timesteps"], inputs["context"]
            )
            for order in ("before", "after")
        )
        assert (relative_l2(before, after) > 20 * TOLERANCE) == differs


def test_timesteps_are_fractional():
    arch = SMALL["sd15"]
    unet = TorchUNet(arch, random_weights(arch))
    inputs = random_inputs(arch, EVEN)
    a, b = (unet(inputs["x"], torch.full((2,), step), inputs["context"]) for step in (500.0, 500.5))
    assert relative_l2(a, b) > 20 * TOLERANCE


def test_short_and_empty_control_lists_are_zeros():
    arch = SMALL["sd15"]
    unet = TorchUNet(arch, random_weights(arch))
    inputs = random_inputs(arch, EVEN)
    args = inputs["x"], inputs["timesteps"], inputs["context"], None
    plain = unet(*args)
    assert torch.equal(unet(*args, Control()), plain)
    assert torch.equal(unet(*args, Control(output=[None, None])), plain)


@pytest.mark.parametrize("arch", FULL.values(), ids=FULL)
def test_skip_shapes_follow_the_blocks(arch):
    shape = Shape(batch=2, height=13, width=64)
    found = skip_shapes(arch, shape)
    assert len(found) == len(list(input_blocks(arch)))
    assert found[0] == (2, 320, 13, 64)
    assert found[-1][2] == -(-13 // 2 ** (arch.levels - 1))
