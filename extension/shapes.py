"""Sizes: pixels and latents, batches, prompt tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .errors import SettingError

PIXELS_PER_LATENT = 8
TOKENS_PER_CHUNK = 77
MAX_LATENT = 4096
MAX_BATCH = 1024
MAX_TOKENS = TOKENS_PER_CHUNK * 64


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of one UNet call.

    Attributes:
        batch: B, rows of ``x`` (conditional and unconditional together).
        height, width: of the latent, in latent cells (pixels / 8).
        tokens: T, rows of the text context.
        control: whether ControlNet residuals are inputs.
    """

    batch: int
    height: int
    width: int
    tokens: int = TOKENS_PER_CHUNK
    control: bool = False

    def __post_init__(self) -> None:
        _check("batch", self.batch, MAX_BATCH)
        _check("latent height", self.height, MAX_LATENT)
        _check("latent width", self.width, MAX_LATENT)
        _check("context rows", self.tokens, MAX_TOKENS)
        if not isinstance(self.control, bool):
            raise SettingError(f"control must be true or false, not {self.control!r}.")

    @classmethod
    def from_pixels(
        cls,
        *,
        width: int,
        height: int,
        batch: int,
        tokens: int = TOKENS_PER_CHUNK,
        control: bool = False,
    ) -> Shape:
        """Return the shape for a picture of ``width`` x ``height`` pixels.

        Raises:
            SettingError: a side is not a multiple of 8; the nearest valid sides are named.
        """
        return cls(
            batch=batch,
            height=latent_side("height", height),
            width=latent_side("width", width),
            tokens=tokens,
            control=control,
        )

    @property
    def pixels(self) -> tuple[int, int]:
        """Width and height of the picture, in pixels."""
        return self.width * PIXELS_PER_LATENT, self.height * PIXELS_PER_LATENT

    @property
    def label(self) -> str:
        """The shape in words, for people."""
        width, height = self.pixels
        control = ", ControlNet" if self.control else ""
        return f"{width}x{height}, batch {self.batch}, {self.tokens} tokens{control}"

    def divides_evenly(self, levels: int) -> bool:
        """Whether ``levels`` resolutions halve the latent without a remainder."""
        step = 1 << (levels - 1)
        return self.height % step == 0 and self.width % step == 0

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, obj: Mapping[str, Any]) -> Shape:
        """Inverse of ``to_json``; raises SettingError on a missing or unknown field."""
        names = set(cls.__dataclass_fields__)
        if not isinstance(obj, Mapping) or set(obj) != names:
            raise SettingError(f"A shape needs exactly the fields {sorted(names)}; got {obj!r}.")
        return cls(**obj)


def latent_side(name: str, pixels: int) -> int:
    """Return a side in latent cells; ``pixels`` must be a positive multiple of 8."""
    if isinstance(pixels, bool) or not isinstance(pixels, int) or pixels < PIXELS_PER_LATENT:
        raise SettingError(
            f"The {name} must be a whole number of at least {PIXELS_PER_LATENT} pixels, "
            f"not {pixels!r}."
        )
    below, rest = divmod(pixels, PIXELS_PER_LATENT)
    if rest:
        low, high = below * PIXELS_PER_LATENT, (below + 1) * PIXELS_PER_LATENT
        raise SettingError(
            f"The {name} of {pixels} pixels is not a multiple of {PIXELS_PER_LATENT}.",
            hint=f"The nearest valid values are {low} and {high}.",
        )
    if below > MAX_LATENT:
        raise SettingError(
            f"The {name} of {pixels} pixels is larger than {MAX_LATENT * PIXELS_PER_LATENT}."
        )
    return below


def parse_pixels(text: str) -> tuple[int, int]:
    """Parse ``"768x512"`` into (width, height); both sides are checked."""
    parts = text.lower().replace("×", "x").split("x")
    if len(parts) not in (1, 2) or not all(part.strip().isdecimal() for part in parts):
        raise SettingError(f"'{text}' is not a size.", hint="Write it as 512 or 768x512.")
    sides = [int(part) for part in parts]
    width, height = sides[0], sides[-1]
    latent_side("width", width)
    latent_side("height", height)
    return width, height


def tokens_for_chunks(chunks: int) -> int:
    """Context rows of a prompt of ``chunks`` blocks of 75 tokens."""
    return chunks * TOKENS_PER_CHUNK


def _check(name: str, value: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise SettingError(f"The {name} must be a whole number from 1 to {most}, not {value!r}.")
