"""Pictures on disk, side by side, and how far apart two of them are."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from .errors import MissingPackageError
from .files import atomic_write, ensure_folder

LABEL_HEIGHT, GAP = 18, 8
BACKGROUND, INK = (24, 24, 27), (235, 235, 235)


def psnr(a: Tensor, b: Tensor) -> float:
    """Peak signal-to-noise ratio in dB of two pictures in [0, 1]; infinite where equal."""
    error = float((a.double() - b.double()).square().mean())
    return math.inf if error == 0 else -10 * math.log10(error)


def _pillow() -> Any:
    try:
        from PIL import Image, ImageDraw, PngImagePlugin
    except ImportError as error:
        raise MissingPackageError.of("pillow", "to write pictures") from error
    return Image, ImageDraw, PngImagePlugin


def to_image(picture: Tensor) -> Any:
    """[3, H, W] in [0, 1] to a Pillow image."""
    image, _, _ = _pillow()
    array = (picture.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).contiguous()
    return image.fromarray(array.cpu().numpy())


def save_png(path: str | Path, image: Any, metadata: Mapping[str, str] | None = None) -> Path:
    """Write a Pillow image whole or not at all, with text entries."""
    _, _, plugin = _pillow()
    info = plugin.PngInfo()
    for key, text in (metadata or {}).items():
        info.add_text(key, text)
    buffer = io.BytesIO()
    image.save(buffer, "PNG", pnginfo=info)
    path = Path(path)
    ensure_folder(path.parent)
    atomic_write(path, buffer.getvalue())
    return path


def side_by_side(pictures: Sequence[Tensor], labels: Sequence[str]) -> Any:
    """Pictures [3, H, W] of one size in a row, each under its label."""
    image, draw, _ = _pillow()
    height, width = pictures[0].shape[-2:]
    columns = len(pictures)
    size = (columns * width + (columns + 1) * GAP, height + LABEL_HEIGHT + 2 * GAP)
    sheet = image.new("RGB", size, BACKGROUND)
    pen = draw.Draw(sheet)
    for i, (picture, label) in enumerate(zip(pictures, labels, strict=True)):
        left = GAP + i * (width + GAP)
        pen.text((left, GAP // 2), label, fill=INK)
        sheet.paste(to_image(picture), (left, LABEL_HEIGHT + GAP))
    return sheet


def tile(pictures: Tensor) -> Tensor:
    """A batch [B, 3, H, W] as one picture [3, H, B * W]."""
    return pictures.permute(1, 2, 0, 3).flatten(2)
