"""The UNet's configuration, read from the shapes in a state dict, with a stable id."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any

from .errors import UnsupportedModelError
from .shapes import Shape

NORM_GROUPS = 32
MAX_BLOCKS = 256
MAX_CHANNELS = 2**20
UNCLIP_CONTEXT = 1024  # SD2.1 unCLIP takes `y` too; its text context is SD2's
RESIZE_ORDERS = ("before", "after", "none")
SUPPORTED = (
    "Supported are LDM UNets: SD1.x, SD2.x, SDXL, the SDXL refiner, inpainting and pix2pix "
    "variants, and pruned SDXL (SSD-1B, Vega)."
)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Configuration of an LDM UNet.

    Attributes:
        in_channels, out_channels: of the latent.
        model_channels: width of the first level; level i has ``channel_mult[i]`` times that.
        num_res_blocks: ResBlocks of the down path, per level (the up path has one more).
        transformer_depth: transformer blocks after each ResBlock of the down path, in order.
        transformer_depth_middle: -1 is a ResBlock alone, -2 no middle block at all.
        transformer_depth_output: the same for the up path, in the order of ``output_blocks``.
        context_dim: width D of the text context.
        adm_channels: width A of ``y``; 0 where the UNet takes none.
        linear_projection: ``proj_in``/``proj_out`` are linear layers, not 1x1 convolutions.
        num_heads, head_channels: exactly one is positive, the other 0.
        fp32_attention: query-key products and softmax run in fp32.
        resize: where the up path meets a skip of another size, nearest resizing happens
            ``before`` the up-sampling convolution (ComfyUI, Forge), ``after`` it (A1111), or
            never (``none``: every level divides evenly).
    """

    in_channels: int
    out_channels: int
    model_channels: int
    channel_mult: tuple[int, ...]
    num_res_blocks: tuple[int, ...]
    transformer_depth: tuple[int, ...]
    transformer_depth_middle: int
    transformer_depth_output: tuple[int, ...]
    context_dim: int
    adm_channels: int
    linear_projection: bool
    num_heads: int
    head_channels: int
    fp32_attention: bool
    resize: str = "before"

    def __post_init__(self) -> None:
        levels = len(self.channel_mult)
        blocks = sum(self.num_res_blocks)
        consistent = (
            levels >= 1
            and len(self.num_res_blocks) == levels
            and min(self.channel_mult) >= 1
            and min(self.num_res_blocks) >= 1
            and self.channel_mult[0] == 1
            and len(self.transformer_depth) == blocks
            and len(self.transformer_depth_output) == blocks + levels
            and min(self.transformer_depth + self.transformer_depth_output) >= 0
            and self.transformer_depth_middle >= -2
            and min(self.in_channels, self.out_channels, self.context_dim) >= 1
            and self.adm_channels >= 0
            and (self.num_heads > 0) != (self.head_channels > 0)
            and self.resize in RESIZE_ORDERS
        )
        if not consistent:
            raise UnsupportedModelError(
                "The UNet configuration contradicts itself.", hint=SUPPORTED, details=self.to_json()
            )
        if self.model_channels < 1 or self.model_channels % NORM_GROUPS:
            raise UnsupportedModelError(
                f"The UNet is {self.model_channels} channels wide; its group norms need a "
                f"multiple of {NORM_GROUPS}.",
                hint=SUPPORTED,
            )
        self._check_heads()

    def _check_heads(self) -> None:
        for channels in self.attention_widths():
            if channels % (self.num_heads or self.head_channels):
                heads = (
                    f"{self.num_heads} heads"
                    if self.num_heads
                    else f"heads of {self.head_channels} channels"
                )
                raise UnsupportedModelError(
                    f"Attention over {channels} channels cannot be divided into {heads}.",
                    hint="Give the head count of the live model.",
                )

    def attention_widths(self) -> set[int]:
        """Channel counts of the levels that have transformer blocks."""
        widths: set[int] = set()
        ins, outs = list(self.transformer_depth), list(self.transformer_depth_output)
        for mult, count in zip(self.channel_mult, self.num_res_blocks, strict=True):
            if any(ins.pop(0) for _ in range(count)):
                widths.add(mult * self.model_channels)
        for mult, count in reversed(list(zip(self.channel_mult, self.num_res_blocks, strict=True))):
            if any(outs.pop(0) for _ in range(count + 1)):
                widths.add(mult * self.model_channels)
        if self.transformer_depth_middle > 0:
            widths.add(self.channel_mult[-1] * self.model_channels)
        return widths

    @property
    def levels(self) -> int:
        """Number of resolutions."""
        return len(self.channel_mult)

    @property
    def embedding_channels(self) -> int:
        """Width of the timestep embedding after its MLP."""
        return 4 * self.model_channels

    def heads(self, channels: int) -> int:
        """Number of attention heads at a level of ``channels`` channels."""
        return self.num_heads or channels // self.head_channels

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Return every parameter's LDM name and shape, in the order the UNet uses them."""
        from .ops_shapes import parameter_shapes

        return parameter_shapes(self)

    def for_shape(self, shape: Shape) -> Architecture:
        """Drop the resize order where it cannot matter, so that hosts share engines."""
        return replace(self, resize="none") if shape.divides_evenly(self.levels) else self

    @property
    def id(self) -> str:
        """SHA-256 (hex) of the canonical JSON form."""
        return _identity(self)

    @property
    def family(self) -> str:
        """``sd1``, ``sd2``, ``sdxl`` or ``refiner``: the family it is built like.

        Told by how text and size conditioning enter, so narrow test models have a family too.
        """
        if self.adm_channels and self.context_dim != UNCLIP_CONTEXT:
            return "sdxl" if self.levels == 3 else "refiner"
        return "sd2" if self.linear_projection else "sd1"

    @property
    def label(self) -> str:
        """What the model is, in words."""
        names = {
            "sd1": "SD1.x",
            "sd2": "SD2.x",
            "sdxl": "SDXL",
            "refiner": "SDXL refiner",
        }
        label = names[self.family]
        if self.family == "sdxl" and self.transformer_depth_middle < 0:
            label = "Pruned SDXL"
        if self.model_channels not in (320, 384):
            label += f" ({self.model_channels} channels wide)"
        kinds = {9: "inpainting", 8: "pix2pix"}
        if self.in_channels in kinds:
            label += f" {kinds[self.in_channels]} ({self.in_channels} channels)"
        elif self.in_channels != 4:
            label += f" with {self.in_channels} input channels"
        return label

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a JSON object (tuples as lists)."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_json(cls, obj: Mapping[str, Any]) -> Architecture:
        """Inverse of ``to_json``.

        Raises:
            UnsupportedModelError: fields are missing, unknown, or of the wrong type.
        """
        kinds = {f.name: str(f.type) for f in fields(cls)}
        if not isinstance(obj, Mapping) or set(obj) != set(kinds):
            raise UnsupportedModelError(f"An architecture needs exactly the fields {list(kinds)}.")
        values = {name: _typed(name, obj[name], kind) for name, kind in kinds.items()}
        return cls(**values)

    @classmethod
    def from_shapes(
        cls,
        shapes: Mapping[str, Sequence[int]],
        *,
        num_heads: int | None = None,
        head_channels: int | None = None,
        fp32_attention: bool | None = None,
        resize: str = "before",
    ) -> Architecture:
        """Read the configuration from LDM parameter names and shapes.

        The head count and fp32 attention are not in the shapes: convolutional projections
        default to 8 heads, linear ones to 64 channels a head; SD2.x defaults to fp32 attention.

        Raises:
            UnsupportedModelError: in words: what was seen, and what is supported.
        """
        from .detection import detect

        return detect(
            shapes,
            num_heads=num_heads,
            head_channels=head_channels,
            fp32_attention=fp32_attention,
            resize=resize,
        )


def _typed(name: str, value: Any, kind: str) -> Any:
    """Return a JSON value as a field of type ``kind``, or raise."""
    if kind.startswith("tuple"):
        if isinstance(value, list | tuple) and len(value) <= MAX_BLOCKS and all(map(_small, value)):
            return tuple(value)
    elif (kind == "int" and _small(value)) or type(value).__name__ == kind != "int":
        return value
    raise UnsupportedModelError(f"The architecture's '{name}' must be {kind}, not {value!r:.80}.")


def _small(value: Any) -> bool:
    return type(value) is int and abs(value) <= MAX_CHANNELS


SD15 = Architecture(
    in_channels=4,
    out_channels=4,
    model_channels=320,
    channel_mult=(1, 2, 4, 4),
    num_res_blocks=(2, 2, 2, 2),
    transformer_depth=(1, 1, 1, 1, 1, 1, 0, 0),
    transformer_depth_middle=1,
    transformer_depth_output=(0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1),
    context_dim=768,
    adm_channels=0,
    linear_projection=False,
    num_heads=8,
    head_channels=0,
    fp32_attention=False,
)
SD21 = replace(
    SD15,
    context_dim=1024,
    linear_projection=True,
    num_heads=0,
    head_channels=64,
    fp32_attention=True,
)
SDXL = Architecture(
    in_channels=4,
    out_channels=4,
    model_channels=320,
    channel_mult=(1, 2, 4),
    num_res_blocks=(2, 2, 2),
    transformer_depth=(0, 0, 2, 2, 10, 10),
    transformer_depth_middle=10,
    transformer_depth_output=(10, 10, 10, 2, 2, 2, 0, 0, 0),
    context_dim=2048,
    adm_channels=2816,
    linear_projection=True,
    num_heads=0,
    head_channels=64,
    fp32_attention=False,
)
SDXL_REFINER = replace(
    SDXL,
    model_channels=384,
    channel_mult=(1, 2, 4, 4),
    num_res_blocks=(2, 2, 2, 2),
    transformer_depth=(0, 0, 4, 4, 4, 4, 0, 0),
    transformer_depth_middle=4,
    transformer_depth_output=(0, 0, 0, 4, 4, 4, 4, 4, 4, 0, 0, 0),
    context_dim=1280,
    adm_channels=2560,
)
SSD1B = replace(
    SDXL,
    transformer_depth=(0, 0, 2, 2, 4, 4),
    transformer_depth_middle=-1,
    transformer_depth_output=(4, 4, 10, 2, 1, 1, 0, 0, 0),
)
VEGA = replace(
    SDXL,
    transformer_depth=(0, 0, 1, 1, 2, 2),
    transformer_depth_middle=-1,
    transformer_depth_output=(2, 2, 2, 1, 1, 1, 0, 0, 0),
)
TINY = {
    "sd15": replace(SD15, model_channels=32, context_dim=64),
    "sd21": replace(SD21, model_channels=64, channel_mult=(1, 2, 2, 2), context_dim=64),
    "sdxl": replace(
        SDXL,
        model_channels=64,
        channel_mult=(1, 2, 2),
        transformer_depth=(0, 0, 1, 1, 2, 2),
        transformer_depth_middle=2,
        transformer_depth_output=(2, 2, 2, 1, 1, 1, 0, 0, 0),
        context_dim=128,
        adm_channels=64 + 6 * 256,
    ),
}
FULL = {"sd15": SD15, "sd21": SD21, "sdxl": SDXL}


def family(name: str, size: str) -> Architecture:
    """Return the full or tiny architecture of ``sd15``, ``sd21`` or ``sdxl``."""
    return {"tiny": TINY, "full": FULL}[size][name]


@lru_cache(maxsize=64)
def _identity(arch: Architecture) -> str:
    text = json.dumps(arch.to_json(), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
