"""Names of LoRA modules in every trainer's spelling, resolved to LDM modules."""

from __future__ import annotations

import re
from functools import lru_cache

from .architecture import Architecture
from .diffusers_names import ldm_to_diffusers

PREFIXES = (
    "lora_unet_",
    "lycoris_unet_",
    "lycoris_",
    "base_model.model.",
    "model.diffusion_model.",
    "diffusion_model.",
    "unet.",
    "unet_",
)
TEXT_ENCODER = re.compile(
    r"^(lora_te\d?_|lycoris_te\d?_|text_encoder(_\d)?\.|te\d?[._]|base_model\.model\.text_model\.|"
    r"text_model\.|text_encoders\.|clip_[lgh]\.)"
)
FOREIGN = (
    (re.compile(r"double_blocks|single_blocks|single_transformer_blocks"), "Flux"),
    (re.compile(r"joint_blocks|context_embedder|lora_transformer_|^transformer\."), "SD3 or Flux"),
    (re.compile(r"prior_unet|down_blocks\.\d+\.\d+\.channelwise"), "Stable Cascade"),
    (re.compile(r"motion_modules|temporal"), "a motion module"),
)
CONTEXT_BASES = {768: "SD1.x", 1024: "SD2.x", 2048: "SDXL", 1280: "the SDXL refiner"}
CROSS_ATTENTION = re.compile(r"attn2[._](processor[._])?to_[kv]$")


def is_text_encoder(module: str) -> bool:
    """Whether a module belongs to a text encoder, which the host patches itself."""
    return bool(TEXT_ENCODER.match(module))


def foreign_base(module: str) -> str | None:
    """The family a module's name gives away, where that is no LDM UNet."""
    for pattern, base in FOREIGN:
        if pattern.search(module):
            return base
    return None


def resolve(module: str, arch: Architecture) -> str | None:
    """LDM module (a parameter name without ``.weight``) of a file's module name, if any."""
    known = _aliases(arch)
    name = module
    while True:
        found = known.get(_canonical(name))
        if found:
            return found
        stripped = next((name[len(p) :] for p in PREFIXES if name.startswith(p)), None)
        if stripped is None:
            return None
        name = stripped


def _canonical(name: str) -> str:
    """One spelling for all: underscores, without attention processors."""
    name = name.replace(".processor.", ".").replace("_processor_", "_").replace(".", "_")
    return name + "_0" if name.endswith("_to_out") else name


@lru_cache(maxsize=8)
def _aliases(arch: Architecture) -> dict[str, str]:
    known: dict[str, str] = {}
    for ldm, theirs in ldm_to_diffusers(arch).items():
        module = ldm.rpartition(".")[0]
        known[_canonical(module)] = module
        known[_canonical(theirs.rpartition(".")[0])] = module
    return known
