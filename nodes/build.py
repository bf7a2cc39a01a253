"""The nodes that make files: an engine, or an ONNX pair."""

from typing import Any, ClassVar

from .model import CATEGORY, MODEL_TIP, PRECISION_TIP, PRECISIONS


class EngineRoomBuild:
    """Builds the engine for a size ahead of time; a shared one serves every checkpoint and LoRA."""

    CATEGORY = CATEGORY
    DESCRIPTION = __doc__
    FUNCTION = "build"
    OUTPUT_NODE = True
    RETURN_TYPES = ("MODEL", "STRING")
    RETURN_NAMES = ("model", "report")
    OUTPUT_TOOLTIPS = ("The model, routed through engines.", "What was built, in words.")
    _made: ClassVar[dict[str, str]] = {}

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Inputs with tooltips."""
        side = {"min": 8, "max": 8192, "step": 8}
        return {
            "required": {
                "model": ("MODEL", {"tooltip": MODEL_TIP}),
                "width": ("INT", {"default": 1024, **side, "tooltip": "Picture width."}),
                "height": (
                    "INT",
                    {"default": 1024, **side, "tooltip": "Picture height."},
                ),
                "pictures": (
                    "INT",
                    {"default": 1, "min": 1, "max": 64, "tooltip": "Pictures drawn together."},
                ),
                "guidance": (
                    "BOOLEAN",
                    {
                        "default": True,
                        "tooltip": "With a negative prompt (cfg above 1): two rows a picture.",
                    },
                ),
                "prompt_chunks": (
                    "INT",
                    {
                        "default": 1,
                        "min": 1,
                        "max": 16,
                        "tooltip": "Blocks of 75 tokens; 2 also serves prompts of 1.",
                    },
                ),
                "controlnet": (
                    "BOOLEAN",
                    {
                        "default": False,
                        "tooltip": "With inputs for ControlNet; it also serves without one.",
                    },
                ),
            },
            "optional": {
                "weights": (
                    ["shared", "baked"],
                    {
                        "tooltip": "shared: holds no weights and serves every checkpoint and LoRA. "
                        "baked: holds this model with its LoRAs, and serves nothing else."
                    },
                ),
                "precision": (PRECISIONS, {"tooltip": PRECISION_TIP}),
            },
            "hidden": {"node": "UNIQUE_ID"},
        }

    @classmethod
    def IS_CHANGED(cls, node: str = "", **inputs: Any) -> Any:
        """Run again once the engine that this node made last is deleted."""
        from ..extension.hosts.comfy.room import room

        stem = cls._made.get(str(node))
        gone = stem is not None and not room().library.engine_path(stem).exists()
        return float("nan") if gone else ""

    def build(
        self,
        model: Any,
        width: int,
        height: int,
        pictures: int,
        guidance: bool,
        prompt_chunks: int,
        controlnet: bool,
        weights: str = "shared",
        precision: str = PRECISIONS[0],
        node: str = "",
    ) -> dict[str, Any]:
        """Build, verify and load; the report is also shown on the node."""
        from ..extension.hosts.comfy import jobs
        from ..extension.hosts.comfy.routing import keep_or_route
        from ..extension.shapes import Shape, tokens_for_chunks

        shape = Shape.from_pixels(
            width=width,
            height=height,
            batch=pictures * (2 if guidance else 1),
            tokens=tokens_for_chunks(prompt_chunks),
            control=controlnet,
        )
        chosen = "" if precision == PRECISIONS[0] else precision
        work = jobs.bake if weights == "baked" else jobs.build
        self._made[str(node)], report = work(model, shape, precision=chosen)
        routed = keep_or_route(model, precision=chosen)
        return {"ui": {"text": [report]}, "result": (routed, report)}


class EngineRoomExport:
    """Writes the model with every patch merged (LoRA, merges) as ONNX over a safetensors file."""

    CATEGORY = CATEGORY
    DESCRIPTION = __doc__
    FUNCTION = "export"
    OUTPUT_NODE = True
    RETURN_TYPES = ("STRING",)
    RETURN_NAMES = ("folder",)
    OUTPUT_TOOLTIPS = ("The folder with unet.onnx and unet.safetensors.",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Inputs with tooltips."""
        return {
            "required": {
                "model": ("MODEL", {"tooltip": MODEL_TIP}),
                "folder": (
                    "STRING",
                    {"default": "onnx/model", "tooltip": "A name inside the output folder."},
                ),
            },
            "optional": {"precision": (PRECISIONS[1:], {"tooltip": "Of the weights in the file."})},
        }

    def export(self, model: Any, folder: str, precision: str = PRECISIONS[1]) -> dict[str, Any]:
        """Export; the path is also shown on the node."""
        from ..extension.hosts.comfy import jobs

        path = jobs.export(model, folder, precision)
        return {"ui": {"text": [path]}, "result": (path,)}
