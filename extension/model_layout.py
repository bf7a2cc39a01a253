"""Names and shapes of the text encoders and VAEs that checkpoints of each family hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

VOCABULARY = 49408
POSITIONS = 77
Named = Iterator[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, kw_only=True)
class TextLayout:
    """A CLIP text encoder: where it lies in the file, its naming, width, layers, projection."""

    prefix: str
    open_clip: bool
    width: int
    layers: int
    projection: int = 0


@dataclass(frozen=True, kw_only=True)
class VaeLayout:
    """The LDM autoencoder: base width, multipliers, ResBlocks per level."""

    width: int
    mults: tuple[int, ...]
    blocks: int
    prefix: str = "first_stage_model."
    latent: int = 4


CLIP_L = "cond_stage_model.transformer.text_model."
OPEN_CLIP = "cond_stage_model.model."
SDXL_L = "conditioner.embedders.0.transformer.text_model."
SDXL_G = "conditioner.embedders.1.model."
TEXT = {
    ("sd15", "full"): [TextLayout(prefix=CLIP_L, open_clip=False, width=768, layers=12)],
    ("sd21", "full"): [
        TextLayout(prefix=OPEN_CLIP, open_clip=True, width=1024, layers=24, projection=1024)
    ],
    ("sdxl", "full"): [
        TextLayout(prefix=SDXL_L, open_clip=False, width=768, layers=12),
        TextLayout(prefix=SDXL_G, open_clip=True, width=1280, layers=32, projection=1280),
    ],
    ("sd15", "tiny"): [TextLayout(prefix=CLIP_L, open_clip=False, width=64, layers=2)],
    ("sd21", "tiny"): [
        TextLayout(prefix=OPEN_CLIP, open_clip=True, width=64, layers=2, projection=64)
    ],
    ("sdxl", "tiny"): [
        TextLayout(prefix=SDXL_L, open_clip=False, width=64, layers=2),
        TextLayout(prefix=SDXL_G, open_clip=True, width=64, layers=2, projection=64),
    ],
}
VAE = {
    "full": VaeLayout(width=128, mults=(1, 2, 4, 4), blocks=2),
    "tiny": VaeLayout(width=32, mults=(1, 2, 2, 2), blocks=1),
}


def text_shapes(layout: TextLayout) -> Named:
    """Every tensor of a text encoder, with its full name."""
    names = _open_clip(layout) if layout.open_clip else _clip(layout)
    for name, shape in names:
        yield layout.prefix + name, shape


def _affine(name: str, *shape: int) -> Named:
    yield f"{name}.weight", shape
    yield f"{name}.bias", shape[:1]


def _clip(layout: TextLayout) -> Named:
    width = layout.width
    yield "embeddings.token_embedding.weight", (VOCABULARY, width)
    yield "embeddings.position_embedding.weight", (POSITIONS, width)
    for i in range(layout.layers):
        layer = f"encoder.layers.{i}"
        for part in "qkv":
            yield from _affine(f"{layer}.self_attn.{part}_proj", width, width)
        yield from _affine(f"{layer}.self_attn.out_proj", width, width)
        yield from _affine(f"{layer}.layer_norm1", width)
        yield from _affine(f"{layer}.mlp.fc1", 4 * width, width)
        yield from _affine(f"{layer}.mlp.fc2", width, 4 * width)
        yield from _affine(f"{layer}.layer_norm2", width)
    yield from _affine("final_layer_norm", width)


def _open_clip(layout: TextLayout) -> Named:
    width = layout.width
    yield "positional_embedding", (POSITIONS, width)
    yield "text_projection", (width, layout.projection)
    yield "token_embedding.weight", (VOCABULARY, width)
    for i in range(layout.layers):
        layer = f"transformer.resblocks.{i}"
        yield from _affine(f"{layer}.ln_1", width)
        yield f"{layer}.attn.in_proj_weight", (3 * width, width)
        yield f"{layer}.attn.in_proj_bias", (3 * width,)
        yield from _affine(f"{layer}.attn.out_proj", width, width)
        yield from _affine(f"{layer}.ln_2", width)
        yield from _affine(f"{layer}.mlp.c_fc", 4 * width, width)
        yield from _affine(f"{layer}.mlp.c_proj", width, 4 * width)
    yield from _affine("ln_final", width)


def vae_shapes(layout: VaeLayout) -> Named:
    """Every tensor of the autoencoder, with its full name."""
    latent = layout.latent
    for name, shape in (*_encoder(layout), *_decoder(layout)):
        yield layout.prefix + name, shape
    yield from _affine(f"{layout.prefix}quant_conv", 2 * latent, 2 * latent, 1, 1)
    yield from _affine(f"{layout.prefix}post_quant_conv", latent, latent, 1, 1)


def _res(name: str, channels: int, out: int) -> Named:
    yield from _affine(f"{name}.norm1", channels)
    yield from _affine(f"{name}.conv1", out, channels, 3, 3)
    yield from _affine(f"{name}.norm2", out)
    yield from _affine(f"{name}.conv2", out, out, 3, 3)
    if channels != out:
        yield from _affine(f"{name}.nin_shortcut", out, channels, 1, 1)


def _middle(name: str, channels: int) -> Named:
    yield from _res(f"{name}.mid.block_1", channels, channels)
    yield from _affine(f"{name}.mid.attn_1.norm", channels)
    for part in ("q", "k", "v", "proj_out"):
        yield from _affine(f"{name}.mid.attn_1.{part}", channels, channels, 1, 1)
    yield from _res(f"{name}.mid.block_2", channels, channels)


def _encoder(layout: VaeLayout) -> Named:
    channels = layout.width
    yield from _affine("encoder.conv_in", channels, 3, 3, 3)
    for level, mult in enumerate(layout.mults):
        for block in range(layout.blocks):
            name = f"encoder.down.{level}.block.{block}"
            yield from _res(name, channels, mult * layout.width)
            channels = mult * layout.width
        if level < len(layout.mults) - 1:
            yield from _affine(f"encoder.down.{level}.downsample.conv", channels, channels, 3, 3)
    yield from _middle("encoder", channels)
    yield from _affine("encoder.norm_out", channels)
    yield from _affine("encoder.conv_out", 2 * layout.latent, channels, 3, 3)


def _decoder(layout: VaeLayout) -> Named:
    channels = layout.mults[-1] * layout.width
    yield from _affine("decoder.conv_in", channels, layout.latent, 3, 3)
    yield from _middle("decoder", channels)
    for level in reversed(range(len(layout.mults))):
        width = layout.mults[level] * layout.width
        for block in range(layout.blocks + 1):
            yield from _res(f"decoder.up.{level}.block.{block}", channels, width)
            channels = width
        if level:
            yield from _affine(f"decoder.up.{level}.upsample.conv", channels, channels, 3, 3)
    yield from _affine("decoder.norm_out", channels)
    yield from _affine("decoder.conv_out", 3, channels, 3, 3)
