"""Live modules of hosts: architecture, weights, and everything that forbids an engine."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from torch import nn

from extension.errors import UnsupportedModelError
from extension.live import OURS, LiveWeights, live_architecture
from extension.ops_shapes import skip_shapes
from extension.patcher_calls import active_features, read_control
from extension.room import Room
from extension.shapes import Shape
from tests.support_ldm import ldm_unet
from tests.support_models import SMALL, random_inputs, random_weights, relative_l2

ARCH = SMALL["sd15"]
SHAPE = Shape(batch=1, height=8, width=8)


@pytest.fixture(scope="module")
def ldm():
    return ldm_unet(ARCH, random_weights(ARCH))


@pytest.fixture
def weights(ldm):
    return LiveWeights(ldm, ARCH)


@pytest.mark.parametrize("name", ["sd15", "sdxl", "inpainting", "two-levels"])
def test_the_architecture_of_the_original_module(name):
    """Head counts come from the layers, not from a guess."""
    arch = SMALL[name]
    found = live_architecture(ldm_unet(arch, random_weights(arch)))
    assert found.parameters() == arch.parameters()
    assert found.id == arch.id


def test_fp32_attention_is_read_from_the_layers(ldm):
    attention = [m for n, m in ldm.named_modules() if n.endswith(("attn1", "attn2"))]
    for module in attention:
        module.attn_precision = torch.float32
    try:
        assert live_architecture(ldm) == replace(ARCH, fp32_attention=True)
        attention[0].attn_precision = None
        with pytest.raises(UnsupportedModelError, match="fp32"):
            live_architecture(ldm)
    finally:
        for module in attention:
            del module.attn_precision


def test_other_modules_are_refused_in_words():
    with pytest.raises(UnsupportedModelError):
        live_architecture(nn.Sequential(nn.Linear(3, 3)))


def test_weights_are_those_of_this_moment(ldm, weights):
    assert weights.problem() is None
    before = weights["out.2.bias"]
    replacement = nn.Parameter(before.detach() + 1)
    ldm.out[2].bias = replacement
    try:
        assert weights["out.2.bias"] is replacement
    finally:
        ldm.out[2].bias = before
    assert set(weights) == set(ARCH.parameters())


def middle(ldm):
    return ldm.middle_block[0].in_layers[2]


class HypertileParams:
    """As A1111's HyperTile leaves it on each layer that it ever wrapped."""

    def __init__(self, module):
        self.enabled, self.forward = False, module.forward


def test_hypertile_counts_while_it_is_on(ldm, weights):
    module = middle(ldm)
    params = HypertileParams(module)
    setattr(module, "__webui_hypertile_params", params)
    module.forward = lambda *args: params.forward(*args)
    try:
        assert weights.problem() is None
        params.enabled = True
        assert "replaced forward" in weights.problem()
        params.enabled, params.forward = False, lambda x: x
        assert "replaced forward" in weights.problem()
    finally:
        del module.forward
        delattr(module, "__webui_hypertile_params")


class Quantised(torch.Tensor):
    pass


TRAPS = {
    "hook": (
        lambda m: m.register_forward_hook(lambda *a: None),
        lambda m, handle: handle.remove(),
        "a hook",
    ),
    "pre-hook": (
        lambda m: m.register_forward_pre_hook(lambda *a: None),
        lambda m, handle: handle.remove(),
        "a hook",
    ),
    "forward": (
        lambda m: setattr(m, "forward", lambda x: x),
        lambda m, _: delattr(m, "forward"),
        "replaced forward",
    ),
    "low-VRAM patch": (
        lambda m: setattr(m, "weight_function", [lambda w: w]),
        lambda m, _: delattr(m, "weight_function"),
        "patched on the fly",
    ),
    "online LoRA": (
        lambda m: setattr(m, "forge_online_loras", {"weight": 1}),
        lambda m, _: delattr(m, "forge_online_loras"),
        "LoRA",
    ),
    "scaled fp8": (
        lambda m: setattr(m, "scale_weight", torch.ones(())),
        lambda m, _: delattr(m, "scale_weight"),
        "scaled fp8",
    ),
    "tiling": (
        lambda m: setattr(m, "padding_mode", "circular"),
        lambda m, _: setattr(m, "padding_mode", "zeros"),
        "tiling",
    ),
    "additional bias": (
        lambda m: m.register_parameter("extra", nn.Parameter(torch.zeros(1))),
        lambda m, _: m.__delattr__("extra"),
        "additional weight",
    ),
    "quantised": (
        lambda m: (m.weight, m._parameters.__setitem__(
            "weight", m.weight.detach().to(torch.int8)))[0],
        lambda m, old: m._parameters.__setitem__("weight", old),
        "quantised",
    ),
    "not loaded": (
        lambda m: (m.weight, m._parameters.__setitem__(
            "weight", nn.Parameter(torch.empty_like(m.weight, device="meta"))))[0],
        lambda m, old: m._parameters.__setitem__("weight", old),
        "not loaded",
    ),
    "missing": (
        lambda m: m._parameters.pop("weight"),
        lambda m, old: m._parameters.__setitem__("weight", old),
        "not an ordinary parameter",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAPS)
def test_what_changes_a_layer_forbids_engines_and_is_named(ldm, weights, name):
    spring, undo, words = TRAPS[name]
    module = middle(ldm)
    handle = spring(module)
    try:
        problem = weights.problem()
        assert problem is not None
        assert words in problem
        assert "middle_block.0.in_layers.2" in problem or "additional" in words
    finally:
        undo(module, handle)
    assert weights.problem() is None


def test_a_model_that_is_partly_elsewhere_is_the_hosts(ldm, weights):
    """Low-VRAM modes: copies of the weights would take the memory that is being saved."""
    assert weights.problem(torch.device("cpu")) is None
    problem = weights.problem(torch.device("cuda:0"))
    assert "time_embed.0.weight" in problem
    assert "saving memory" in problem


def test_a_forward_of_our_own_is_no_trap(ldm, weights):
    def forward(x):
        return x

    setattr(forward, OURS, True)
    ldm.forward = forward
    try:
        assert weights.problem() is None
    finally:
        del ldm.forward


def test_no_model_is_kept_alive(tmp_path):
    room = Room(tmp_path)
    unet = ldm_unet(ARCH, random_weights(ARCH))
    served = room.model(unet)
    assert served.arch == ARCH
    assert room.model(unet) is served
    del unet, served
    gc.collect()
    assert room.models() == []


def test_a_room_serves_a_live_module(tmp_path):
    room = Room(tmp_path)
    unet = ldm_unet(ARCH, random_weights(ARCH))
    served = room.model(unet)
    served.policy = "wait"
    inputs = random_inputs(ARCH, SHAPE)
    args = [inputs[n] for n in ("x", "timesteps", "context")]
    with torch.no_grad():
        expected = unet(*args)
    out = served.serve(*args, None, None, epoch=1, features=[])
    assert relative_l2(out, expected) <= 1e-5
    with torch.no_grad():
        unet.out[2].bias += 1
        expected = unet(*args)
    assert relative_l2(served.serve(*args, None, None, epoch=2, features=[]), expected) <= 1e-5
    handle = middle(unet).register_forward_hook(lambda *a: None)
    assert served.serve(*args, None, None, epoch=3, features=[]) is None
    handle.remove()
    assert served.serve(*args, None, None, epoch=4, features=[]) is not None
    assert room.counters.totals == (3, 1)
    assert "a hook" in served.sentence
    room.close()


def test_a_module_that_is_no_unet_is_the_hosts(tmp_path):
    served = Room(tmp_path).model(nn.Linear(2, 2))
    assert served.refusal
    assert served.serve(1, 2, 3, None, None, epoch=0, features=[]) is None


# Calls of model patchers


def test_control_lists_are_read_by_block_and_left_alone():
    sizes = skip_shapes(ARCH, SHAPE)
    maps = [torch.full(size, float(i)) for i, size in enumerate(sizes)]
    control = {"input": [maps[1], None, maps[0]][::1], "middle": [maps[-1]], "output": maps[-3:]}
    control["input"] = [maps[2], None, maps[0]]
    copies = {part: list(items) for part, items in control.items()}
    found, problem = read_control(control, ARCH, SHAPE)
    assert problem == ""
    assert {part: list(items) for part, items in control.items()} == copies
    # The host pops the input list from its end, one for each block.
    assert [r is not None for r in found.input] == [True, False, True]
    assert found.input[0] is maps[0]
    assert found.output[-1] is maps[-1]
    assert found.output[0] is None
    assert len(found.output) == len(sizes)
    assert found.middle == [maps[-1]]


@pytest.mark.parametrize("control", [None, {}, {"input": [], "middle": [], "output": []}])
def test_no_control(control):
    assert read_control(control, ARCH, SHAPE) == (None, "")


def test_residuals_of_another_size_go_to_the_host():
    found, problem = read_control({"output": [torch.zeros(1, 32, 4, 4)]}, ARCH, SHAPE)
    assert found is None
    assert "(1, 32, 4, 4)" in problem


def test_features_are_named():
    options = {"patches": {"attn2_patch": [1]}, "patches_replace": {}, "sigmas": 3}
    assert active_features(options, {}, None) == ["patches (attn2_patch)"]
    assert active_features({"wrappers": {}}, {"guidance": None}, {"output": [1]}) == []
    extra = active_features({}, {"ref_latents": [1]}, {"style": [1]})
    assert extra == ["the input 'ref_latents'", "control 'style'"]
