"""Read an Architecture from parameter shapes, or say what the tensors are instead."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from .architecture import SUPPORTED, Architecture
from .errors import UnsupportedModelError

Shapes = Mapping[str, Sequence[int]]

# The first marker that matches names the kind; order matters only where kinds share names.
FOREIGN = (
    (r"double_blocks\.|single_blocks\.", "a Flux model"),
    (r"joint_blocks\.", "an SD3 model"),
    (r"time_stack|time_mixer|temporal", "a video diffusion model"),
    (r"lora_|hada_|lokr_|\.lora\.", "a LoRA"),
    (r"zero_convs\.|input_hint_block\.|controlnet_", "a ControlNet"),
    (r"cap_embedder|caption_projection|adaLN|transformer_blocks\.\d+\.attn\.", "a transformer"),
    (r"text_model\.|transformer\.resblocks|positional_embedding", "a text encoder"),
    (r"(^|\.)(encoder|decoder)\.|quant_conv", "a VAE"),
    (r"string_to_param|emb_params", "an embedding"),
    (r"^(unet\.)?(down|up)_blocks\.", "a UNet with diffusers names"),
)


def describe_foreign(names: Sequence[str] | Mapping[str, object]) -> str:
    """Say in words what a set of tensor names most likely is."""
    names = list(names)
    for pattern, kind in FOREIGN:
        if any(re.search(pattern, name) for name in names):
            return kind
    sample = ", ".join(sorted(names)[:3])
    return f"unknown tensors ({sample}, ...)" if names else "no tensors at all"


def detect(
    shapes: Shapes,
    *,
    num_heads: int | None = None,
    head_channels: int | None = None,
    fp32_attention: bool | None = None,
    resize: str = "before",
) -> Architecture:
    """Return the architecture whose parameters are exactly ``shapes``; see ``from_shapes``."""
    _require_ldm(shapes)
    first = shapes["input_blocks.0.0.weight"]
    width = first[0]
    mults, res_blocks, depths_in = _down_path(shapes, width)
    linear, context_dim = _transformer_facts(shapes)
    adm = _adm_channels(shapes)
    heads = _heads(linear, num_heads, head_channels)
    architecture = Architecture(
        in_channels=first[1],
        out_channels=shapes["out.2.weight"][0],
        model_channels=width,
        channel_mult=mults,
        num_res_blocks=res_blocks,
        transformer_depth=depths_in,
        transformer_depth_middle=_middle_depth(shapes),
        transformer_depth_output=_up_path(shapes, sum(res_blocks) + len(res_blocks)),
        context_dim=context_dim,
        adm_channels=adm,
        linear_projection=linear,
        num_heads=heads[0],
        head_channels=heads[1],
        fp32_attention=bool(fp32_attention),
        resize=resize,
    )
    if fp32_attention is None:
        architecture = replace(architecture, fp32_attention=architecture.family == "sd2")
    _compare(architecture, shapes)
    return architecture


def _unsupported(seen: str, **details: object) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"This is not a supported UNet: {seen}.", hint=SUPPORTED, details=details
    )


def _require_ldm(shapes: Shapes) -> None:
    anchors = ("input_blocks.0.0.weight", "time_embed.0.weight", "out.2.weight")
    missing = [name for name in anchors if name not in shapes]
    if not missing and re.search(FOREIGN[2][0], " ".join(shapes)):
        raise _unsupported(f"it is {FOREIGN[2][1]}")
    if len(missing) == len(anchors):
        raise _unsupported(f"it is {describe_foreign(shapes)}")
    if missing:
        raise _unsupported(f"the tensors {', '.join(missing)} are missing")
    for name in (anchors[0], anchors[2]):
        if len(shapes[name]) != 4:
            raise _unsupported(f"'{name}' has {len(shapes[name])} dimensions instead of 4")
    if "label_emb.weight" in shapes:
        raise _unsupported(
            "it is conditioned on class labels ('label_emb.weight'), as upscalers are"
        )


def _depth(shapes: Shapes, block: str) -> int:
    """Transformer blocks in ``block`` (for example ``input_blocks.1.1``)."""
    depth = 0
    while f"{block}.transformer_blocks.{depth}.attn1.to_q.weight" in shapes:
        depth += 1
    return depth


def _down_path(
    shapes: Shapes, width: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    mults: list[int] = []
    counts, depths = [0], []
    index = 1
    while True:
        res = shapes.get(f"input_blocks.{index}.0.out_layers.3.weight")
        down = shapes.get(f"input_blocks.{index}.0.op.weight")
        if res is None and down is None:
            break
        if res is not None:
            if res[0] % width:
                raise _unsupported(
                    f"'input_blocks.{index}' is {res[0]} channels wide, not a multiple of {width}"
                )
            if counts[-1] == 0:
                mults.append(res[0] // width)
            counts[-1] += 1
            depths.append(_depth(shapes, f"input_blocks.{index}.1"))
        else:
            counts.append(0)
        index += 1
    if not mults or 0 in counts:
        raise _unsupported(f"'input_blocks.{index}' is neither a ResBlock nor a down-sampling")
    return tuple(mults), tuple(counts), tuple(depths)


def _middle_depth(shapes: Shapes) -> int:
    if "middle_block.0.out_layers.3.weight" not in shapes:
        return -2
    depth = _depth(shapes, "middle_block.1")
    return depth if depth else -1


def _up_path(shapes: Shapes, count: int) -> tuple[int, ...]:
    return tuple(_depth(shapes, f"output_blocks.{i}.1") for i in range(count))


def _transformer_facts(shapes: Shapes) -> tuple[bool, int]:
    """Whether projections are linear, and the context's width."""
    for name, shape in shapes.items():
        if name.endswith("transformer_blocks.0.attn2.to_k.weight"):
            projection = name.split("transformer_blocks")[0] + "proj_in.weight"
            return len(shapes.get(projection, ())) == 2, shape[-1]
    raise _unsupported("it has no cross-attention, so it takes no prompt")


def _adm_channels(shapes: Shapes) -> int:
    label = shapes.get("label_emb.0.0.weight")
    return label[-1] if label else 0


def _heads(linear: bool, num_heads: int | None, head_channels: int | None) -> tuple[int, int]:
    if num_heads and head_channels:
        raise UnsupportedModelError("Give a head count or the channels of a head, not both.")
    if num_heads:
        return num_heads, 0
    if head_channels:
        return 0, head_channels
    return (0, 64) if linear else (8, 0)


def _compare(architecture: Architecture, shapes: Shapes) -> None:
    """Every parameter present with its shape, none extra: else say which are at fault."""
    expected = architecture.parameters()
    missing = [name for name in expected if name not in shapes]
    extra = [name for name in shapes if name not in expected]
    wrong = [n for n, s in expected.items() if n in shapes and tuple(shapes[n]) != s]
    for names, fault in (
        (missing, "missing"),
        (extra, "not part of such a UNet"),
        (wrong, "of an unexpected shape"),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UnsupportedModelError(
                f"This looks like {architecture.label}, but {', '.join(names[:3])}{more} "
                f"{'is' if len(names) == 1 else 'are'} {fault}.",
                hint=SUPPORTED,
                details={"names": names[:50]},
            )
