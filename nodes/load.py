"""The node that samples with a baked engine alone, without a checkpoint."""

from typing import Any

from .model import CATEGORY

NONE = "no baked engine yet"


class EngineRoomLoad:
    """A baked engine as a MODEL, without the checkpoint's UNet. It draws its own size alone."""

    CATEGORY = CATEGORY
    DESCRIPTION = __doc__
    FUNCTION = "load"
    RETURN_TYPES = ("MODEL", "STRING")
    RETURN_NAMES = ("model", "report")
    OUTPUT_TOOLTIPS = (
        "For a sampler; it takes no LoRA and no merge.",
        "What the engine holds and draws, in words.",
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Inputs with tooltips."""
        from ..extension.hosts.comfy.loading import choices

        tip = "An engine that was built with weights: baked. Its manifest knows what it is."
        return {"required": {"engine": (choices() or [NONE], {"tooltip": tip})}}

    def load(self, engine: str) -> tuple[Any, str]:
        """The engine's MODEL; an error says why it cannot be used here."""
        from ..extension.hosts.comfy.loading import load

        return load(engine)
