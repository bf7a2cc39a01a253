"""The node that routes a MODEL through engines."""

from typing import Any

CATEGORY = "Engine Room"
MODEL_TIP = "The model, before or after any LoRA loader."
TIERS = ["auto", "shared", "baked", "instant", "off"]
PRECISIONS = ["as the host", "fp16", "bf16", "fp32"]
PRECISION_TIP = (
    "What engines compute in. Another precision than the host's needs a copy of the weights in it."
)
POLICIES = {
    "build in the background": "background",
    "build now and wait": "wait",
    "never build": "never",
}


class EngineRoomModel:
    """Routes this model's UNet calls through engines; the host serves what no engine can."""

    CATEGORY = CATEGORY
    DESCRIPTION = __doc__
    FUNCTION = "apply"
    RETURN_TYPES = ("MODEL",)
    RETURN_NAMES = ("model",)
    OUTPUT_TOOLTIPS = ("The same model, faster wherever an engine can serve it.",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Inputs with tooltips."""
        return {
            "required": {
                "model": ("MODEL", {"tooltip": MODEL_TIP}),
                "tier": (
                    TIERS,
                    {
                        "default": "auto",
                        "tooltip": "auto: the fastest engine that is ready. shared: engines that "
                        "hold no weights. baked: only engines that hold these very weights. "
                        "instant: the model's own operations as one CUDA graph, nothing is built; "
                        "auto uses it while an engine is missing. off: the host alone.",
                    },
                ),
                "when_missing": (
                    list(POLICIES),
                    {
                        "tooltip": "What happens at a size that has no engine yet. While one is "
                        "built in the background, pictures come from the host as always."
                    },
                ),
            },
            "optional": {"precision": (PRECISIONS, {"tooltip": PRECISION_TIP})},
            "hidden": {"node": "UNIQUE_ID"},
        }

    def apply(
        self,
        model: Any,
        tier: str,
        when_missing: str,
        precision: str = PRECISIONS[0],
        node: str = "",
    ) -> tuple[Any]:
        """Return a clone of ``model`` with or without routing; the node tells how it went."""
        from ..extension.hosts.comfy.routing import route, unroute

        if tier == "off":
            return (unroute(model),)
        chosen = "" if precision == PRECISIONS[0] else precision
        policy = POLICIES[when_missing]
        return (route(model, policy=policy, tier=tier, precision=chosen, node=str(node)),)
