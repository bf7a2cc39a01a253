"""The original LDM UNet as an oracle: its own layers, with the hosts' plumbing around them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from ldm.modules.attention import SpatialTransformer
from ldm.modules.diffusionmodules.openaimodel import UNetModel, timestep_embedding
from torch import Tensor, nn

from extension.architecture import Architecture
from extension.unet import Control


def ldm_unet(arch: Architecture, weights: dict[str, Tensor]) -> UNetModel:
    """Build LDM's UNetModel for ``arch``; loading is strict, so names and shapes must agree."""
    model = UNetModel(
        image_size=32,
        in_channels=arch.in_channels,
        model_channels=arch.model_channels,
        out_channels=arch.out_channels,
        num_res_blocks=list(arch.num_res_blocks),
        attention_resolutions=[],
        channel_mult=arch.channel_mult,
        num_heads=8,
        use_spatial_transformer=True,
        context_dim=arch.context_dim,
        use_linear_in_transformer=arch.linear_projection,
        legacy=False,
    )
    depths = iter(arch.transformer_depth)
    for block in model.input_blocks:
        if "ResBlock" in type(block[0]).__name__:
            _set_transformer(arch, block, next(depths))
    depths = iter(arch.transformer_depth_output)
    for block in model.output_blocks:
        _set_transformer(arch, block, next(depths))
    _set_middle(arch, model)
    if arch.adm_channels:
        wide = arch.embedding_channels
        layers = nn.Linear(arch.adm_channels, wide), nn.SiLU(), nn.Linear(wide, wide)
        model.label_emb = nn.Sequential(nn.Sequential(*layers))
        model.num_classes = "sequential"
    model.load_state_dict(weights, strict=True)
    return model.eval()


def _transformer(arch: Architecture, channels: int, depth: int) -> SpatialTransformer:
    heads = arch.heads(channels)
    return SpatialTransformer(
        channels,
        heads,
        channels // heads,
        depth=depth,
        context_dim=[arch.context_dim] * depth,
        use_linear=arch.linear_projection,
        use_checkpoint=False,
    )


def _set_transformer(arch: Architecture, block: nn.Sequential, depth: int) -> None:
    if depth:
        block.insert(1, _transformer(arch, block[0].out_channels, depth))


def _set_middle(arch: Architecture, model: UNetModel) -> None:
    depth, width = arch.transformer_depth_middle, arch.channel_mult[-1] * arch.model_channels
    if depth == -2:
        model.middle_block = None
    elif depth == -1:
        model.middle_block = type(model.middle_block)(model.middle_block[0])
    else:
        model.middle_block[1] = _transformer(arch, width, depth)


@torch.no_grad()
def run_ldm(
    model: UNetModel,
    inputs: dict[str, Tensor],
    control: Control[Tensor] | None,
    resize: str,
) -> Tensor:
    """One call, resizing where ComfyUI (``before``) or A1111 (``after``) does."""
    emb = model.time_embed(timestep_embedding(inputs["timesteps"], model.model_channels))
    if model.num_classes is not None:
        emb = emb + model.label_emb(inputs["y"])
    contexts = [inputs["context"]] * 16  # one for each transformer block of a stack
    h, skips = inputs["x"], []
    for i, block in enumerate(model.input_blocks):
        h = block(h, emb, contexts)
        h = h + control.input[i] if control else h
        skips.append(h)
    h = model.middle_block(h, emb, contexts) if model.middle_block is not None else h
    h = h + control.middle[0] if control else h
    for block in model.output_blocks:
        skip = skips.pop()
        skip = skip + control.output[len(skips)] if control else skip
        if resize == "after" and h.shape[-2:] != skip.shape[-2:]:
            h = F.interpolate(h, size=skip.shape[-2:], mode="nearest")
        h = torch.cat([h, skip], dim=1)
        for layer in block:
            if type(layer).__name__ == "Upsample" and resize == "before":
                h = layer.conv(F.interpolate(h, size=skips[-1].shape[-2:], mode="nearest"))
            elif type(layer).__name__ == "Upsample":
                h = layer(h)
            elif type(layer).__name__ == "SpatialTransformer":
                h = layer(h, contexts)
            else:
                h = layer(h, emb)
    return model.out(h)
