"""The node that shows what engines change: nothing but the time."""

from typing import Any

from .model import CATEGORY, MODEL_TIP


class EngineRoomCompare:
    """Samples the same seed through the host and through engines (Euler, normal schedule)."""

    CATEGORY = CATEGORY
    DESCRIPTION = __doc__
    FUNCTION = "compare"
    OUTPUT_NODE = True
    RETURN_TYPES = ("LATENT", "LATENT", "STRING")
    RETURN_NAMES = ("host", "engine", "report")
    OUTPUT_TOOLTIPS = ("Drawn by the host.", "Drawn by engines.", "Error, time and memory.")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Inputs with tooltips."""
        return {
            "required": {
                "model": ("MODEL", {"tooltip": MODEL_TIP}),
                "positive": ("CONDITIONING", {"tooltip": "What to draw."}),
                "negative": ("CONDITIONING", {"tooltip": "What to avoid."}),
                "latent": ("LATENT", {"tooltip": "An empty latent of the size to compare."}),
                "seed": ("INT", {"default": 0, "min": 0, "max": 2**64 - 1, "tooltip": "Noise."}),
                "steps": (
                    "INT",
                    {"default": 8, "min": 1, "max": 100, "tooltip": "Steps."},
                ),
                "cfg": (
                    "FLOAT",
                    {"default": 7.0, "min": 1.0, "max": 30.0, "tooltip": "Guidance scale."},
                ),
            }
        }

    def compare(
        self,
        model: Any,
        positive: Any,
        negative: Any,
        latent: Any,
        seed: int,
        steps: int,
        cfg: float,
    ) -> dict[str, Any]:
        """Both latents and a report, which is also shown on the node."""
        from ..extension.hosts.comfy import jobs

        host, engine, report = jobs.compare(
            model, positive, negative, latent, seed=seed, steps=steps, cfg=cfg
        )
        return {"ui": {"text": [report]}, "result": (host, engine, report)}
