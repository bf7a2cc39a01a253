"""The example workflows as ComfyUI's API takes them, and files that they can load."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from PIL import Image

from extension.architecture import Architecture
from extension.checkpoint import tensor_bytes
from extension.model_layout import TEXT, VAE, text_shapes, vae_shapes
from extension.safetensors_file import Entry, write_safetensors
from extension.synthetic import UNET_PREFIX, random_tensor
from extension.synthetic_lora import make_lora

HINT = ((3, 16), (16, 16), (16, 32), (32, 32), (32, 96), (96, 96), (96, 256))
WIDGETS = ("INT", "FLOAT", "STRING", "BOOLEAN")
AFTER_GENERATE = ("fixed", "increment", "decrement", "randomize")


def write_example_files(base: Path, arch: Architecture) -> None:
    """A checkpoint, a LoRA, a ControlNet and a picture under the names of the examples."""
    for folder in ("checkpoints", "loras", "controlnet"):
        (base / "models" / folder).mkdir(parents=True, exist_ok=True)
    shapes = {UNET_PREFIX + name: shape for name, shape in arch.parameters().items()}
    for text in TEXT["sd15", "full"]:
        shapes |= dict(text_shapes(text))
    _write(base / "models/checkpoints/sd15.safetensors", shapes | dict(vae_shapes(VAE["full"])))
    write_control_model(base / "models/controlnet/canny.safetensors", arch)
    make_lora(base / "models/loras/style.safetensors", architecture=arch)
    (base / "input").mkdir(exist_ok=True)
    Image.effect_noise((64, 64), 90).convert("RGB").save(base / "input" / "example.png")


def write_control_model(path: Path, arch: Architecture) -> None:
    """A ControlNet for ``arch`` in fp16."""
    _write(path, control_shapes(arch))


def control_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Tensors of a ControlNet in the LDM layout: the down path, a hint encoder, 1x1 outputs."""
    kept = ("input_blocks.", "middle_block.", "time_embed.")
    shapes = {n: s for n, s in arch.parameters().items() if n.startswith(kept)}
    pairs = [*HINT, (HINT[-1][1], arch.model_channels)]
    for index, (inner, outer) in enumerate(pairs):
        shapes |= _conv(f"input_hint_block.{2 * index}", outer, inner, 3)
    widths = [arch.model_channels]
    for level, count in enumerate(arch.num_res_blocks):
        last = level == len(arch.num_res_blocks) - 1
        widths += [arch.channel_mult[level] * arch.model_channels] * (count + (not last))
    for index, width in enumerate(widths):
        shapes |= _conv(f"zero_convs.{index}.0", width, width, 1)
    shapes |= _conv("middle_block_out.0", widths[-1], widths[-1], 1)
    return {f"control_model.{name}": shape for name, shape in shapes.items()}


def _conv(name: str, out: int, channels: int, kernel: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (out, channels, kernel, kernel), f"{name}.bias": (out,)}


def _write(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    entries = [Entry(name, "F16", shape) for name, shape in shapes.items()]
    data = (tensor_bytes(random_tensor(n, s, 0).half()) for n, s in shapes.items())
    write_safetensors(path, entries, data, {})
    assert path.stat().st_size > 2 * sum(map(math.prod, shapes.values()))


def api_graph(path: Path, info: dict) -> dict:
    """A workflow file of the frontend in the form of POST /prompt.

    Args:
        info: the host's /object_info.
    """
    workflow = json.loads(path.read_text(encoding="utf-8"))
    sources = {link[0]: [str(link[1]), link[2]] for link in workflow["links"]}
    return {
        str(node["id"]): {"class_type": node["type"], "inputs": _inputs(node, sources, info)}
        for node in workflow["nodes"]
    }


def _inputs(node: dict, sources: dict, info: dict) -> dict:
    found = {
        item["name"]: sources[item["link"]]
        for item in node["inputs"]
        if item.get("link") is not None
    }
    values = iter(node.get("widgets_values") or [])
    sections = info[node["type"]]["input"]
    specs = {**sections.get("required", {}), **sections.get("optional", {})}
    for name, spec in specs.items():
        options = spec[1] if len(spec) > 1 else {}
        is_widget = isinstance(spec[0], list) or spec[0] in (*WIDGETS, "COMBO")
        if name in found or not is_widget:
            continue
        value = next(values, options.get("default"))
        found[name] = spec[0][0] if value is None and isinstance(spec[0], list) else value
        if options.get("control_after_generate"):
            assert next(values) in AFTER_GENERATE
    return found


def shrink(graph: dict, size: int, steps: int) -> dict:
    """The same graph for a small picture and few steps."""
    for node in graph.values():
        inputs = node["inputs"]
        for name in {"width", "height"} & set(inputs):
            inputs[name] = size
        if "steps" in inputs:
            inputs["steps"] = steps
    return graph


def moved(a: Path, b: Path) -> float:
    """Root mean square difference of two pictures of values 0 to 1."""
    pictures = (torch.frombuffer(bytearray(Image.open(p).tobytes()), dtype=torch.uint8)
                for p in (a, b))  # fmt: skip
    first, second = (picture.float() / 255 for picture in pictures)
    return float((first - second).square().mean().sqrt())
