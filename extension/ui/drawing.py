"""A picture that a host draws for the tab: what is asked for, and what came of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import SettingError
from ..shapes import Shape

STEPS = (1, 150)
LORA_TAG = re.compile(r"<lora:([^:>]+):([^:>]+)>")


@dataclass(frozen=True, kw_only=True)
class DrawJob:
    """One picture with a fixed seed; ``prompt`` may hold LoRA tags as the A1111 family writes them.

    Attributes:
        width, height: in pixels.
    """

    prompt: str
    negative: str = ""
    width: int = 512
    height: int = 512
    steps: int = 20
    cfg: float = 7.0
    seed: int = 1

    def __post_init__(self) -> None:
        Shape.from_pixels(width=self.width, height=self.height, batch=1)
        if not STEPS[0] <= self.steps <= STEPS[1]:
            raise SettingError(f"Steps must be from {STEPS[0]} to {STEPS[1]}.")


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A picture (PIL), how long it took, and the calls that engines and host served.

    Attributes:
        engines: calls by engine id.
    """

    image: Any
    seconds: float
    served: int
    host: int
    engines: Mapping[str, int]


def lora_tags(choices: Sequence[str], strength: float) -> str:
    """Prompt tags for LoRAs of one strength; raises SettingError for a name that breaks a tag."""
    for name in choices:
        if not LORA_TAG.fullmatch(f"<lora:{name}:1>"):
            raise SettingError(f"The LoRA name '{name}' cannot stand in a prompt.")
    return "".join(f" <lora:{name}:{strength:g}>" for name in choices)
