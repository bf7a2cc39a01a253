"""Architectures from shapes: every family, stable ids, and refusals in words."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from extension.architecture import (
    FULL,
    SD15,
    SD21,
    SDXL,
    SDXL_REFINER,
    SSD1B,
    TINY,
    VEGA,
    Architecture,
)
from extension.errors import UnsupportedModelError
from extension.shapes import Shape
from tests.support_models import SMALL

KNOWN = {
    # label and parameter count as published (SD 1.x 860 M, SD 2.x 866 M, SDXL 2.57 B,
    # refiner 2.26 B, SSD-1B 1.33 B, Vega 0.75 B)
    "sd15": (SD15, "SD1.x", 859_520_964),
    "sd21": (SD21, "SD2.x", 865_910_724),
    "sdxl": (SDXL, "SDXL", 2_567_463_684),
    "refiner": (SDXL_REFINER, "SDXL refiner", 2_259_526_660),
    "ssd1b": (SSD1B, "Pruned SDXL", 1_331_334_404),
    "vega": (VEGA, "Pruned SDXL", 745_225_604),
}
# Ids name engines on disk: a change here makes every engine of every user outdated.
IDS = {
    "sd15": "58733e3c",
    "sdxl": "04c2692b",
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_families(name):
    arch, label, count = KNOWN[name]
    assert arch.label == label
    assert sum(math.prod(shape) for shape in arch.parameters().values()) == count


@pytest.mark.parametrize("arch", [*SMALL.values(), *FULL.values(), SSD1B, VEGA, SDXL_REFINER])
def test_read_back_from_shapes(arch):
    assert Architecture.from_shapes(arch.parameters()) == arch
    assert Architecture.from_json(json.loads(json.dumps(arch.to_json()))) == arch


def test_ids_are_stable_and_distinct():
    assert {name: FULL[name].id[:8] for name in IDS} == IDS
    every = [*FULL.values(), *TINY.values(), *SMALL.values(), SSD1B, VEGA]
    assert len({arch.id for arch in every}) == len(set(every))


@pytest.mark.parametrize(
    ("channels", "label"), [(9, "SD1.x inpainting (9 channels)"), (8, "SD1.x pix2pix (8 channels)")]
)
def test_input_channels_are_named(channels, label):
    assert replace(SD15, in_channels=channels).label == label


def test_resize_order_is_dropped_where_it_cannot_matter():
    after = replace(SD15, resize="after")
    even, odd = Shape(batch=1, height=64, width=72), Shape(batch=1, height=65, width=64)
    assert after.for_shape(even) == SD15.for_shape(even)
    assert after.for_shape(odd) != SD15.for_shape(odd)
    assert SD15.for_shape(even).id == after.for_shape(even).id


def test_heads_and_attention_come_from_the_host():
    shapes = SD15.parameters()
    arch = Architecture.from_shapes(shapes, head_channels=64, fp32_attention=True, resize="after")
    assert (arch.num_heads, arch.head_channels) == (0, 64)
    assert arch.fp32_attention
    assert arch.resize == "after"
    with pytest.raises(UnsupportedModelError, match=r"320 channels .* 7 heads"):
        Architecture.from_shapes(shapes, num_heads=7)
    with pytest.raises(UnsupportedModelError, match="not both"):
        Architecture.from_shapes(shapes, num_heads=8, head_channels=64)


FOREIGN = {
    "Flux": ["double_blocks.0.img_attn.qkv.weight", "img_in.weight"],
    "SD3": ["joint_blocks.0.x_block.attn.qkv.weight"],
    "VAE": ["encoder.conv_in.weight", "decoder.conv_in.weight"],
    "LoRA": ["lora_unet_down_blocks_0_attentions_0_proj_in.lora_down.weight"],
    "ControlNet": ["zero_convs.0.0.weight", "input_hint_block.0.weight"],
    "text encoder": ["text_model.encoder.layers.0.mlp.fc1.weight"],
    "no tensors": [],
    "unknown": ["foo.weight"],
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_models_are_named(kind):
    with pytest.raises(UnsupportedModelError, match=kind) as caught:
        Architecture.from_shapes(dict.fromkeys(FOREIGN[kind], (8, 8)))
    assert "SD1.x" in caught.value.hint


def test_video_models_are_refused():
    shapes = {**SD15.parameters(), "input_blocks.1.1.time_stack.0.norm1.weight": (320,)}
    with pytest.raises(UnsupportedModelError, match="video"):
        Architecture.from_shapes(shapes)


def test_class_conditioned_upscalers_are_refused():
    shapes = {**SD15.parameters(), "label_emb.weight": (1000, 1280)}
    with pytest.raises(UnsupportedModelError, match="class labels"):
        Architecture.from_shapes(shapes)


@pytest.mark.parametrize("arch", TINY.values(), ids=TINY)
def test_every_missing_parameter_is_an_error(arch):
    """Whichever tensor a damaged file lacks, the answer is an error that names a tensor."""
    shapes = arch.parameters()
    for name in shapes:
        fewer = {n: s for n, s in shapes.items() if n != name}
        with pytest.raises(UnsupportedModelError) as caught:
            Architecture.from_shapes(fewer)
        assert caught.value.message


def test_extra_and_misshapen_parameters_are_named():
    shapes = SD15.parameters()
    with pytest.raises(UnsupportedModelError, match=r"time_embed.cond_proj.weight is not part"):
        Architecture.from_shapes({**shapes, "time_embed.cond_proj.weight": (320, 256)})
    with pytest.raises(UnsupportedModelError, match=r"out.0.weight is of an unexpected shape"):
        Architecture.from_shapes({**shapes, "out.0.weight": (321,)})


@pytest.mark.parametrize(
    "change",
    [
        {"channel_mult": [1, "2"]},
        {"model_channels": 2**40},
        {"model_channels": True},
        {"fp32_attention": 1},
        {"resize": "sideways"},
        {"num_res_blocks": []},
        {"transformer_depth": [1] * 10_000},
        {"extra": 1},
    ],
)
def test_hostile_json_is_refused(change):
    with pytest.raises(UnsupportedModelError):
        Architecture.from_json({**SD15.to_json(), **change})
