"""What the commands share: results, progress, and the arguments that several take."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..engine import BACKENDS
from ..engine.interface import DTYPES
from ..library import Library
from ..machine import default_device
from ..model import LoraChoice
from ..progress import Progress
from ..serving import Target
from ..shapes import Shape, parse_pixels, tokens_for_chunks

LIBRARY_VARIABLE = "ENGINE_ROOM_LIBRARY"
BAR_WIDTH = 24


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a command found or did: facts for ``--json``, lines for people, an exit code."""

    data: Mapping[str, Any]
    lines: Sequence[str] = field(default=())
    exit_code: int = 0


class ProgressLine:
    """Progress on standard error: one line rewritten on a terminal, else one line a phase."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._terminal = sys.stderr.isatty()
        self._phase = ""
        self._last = 0.0

    def __call__(self, progress: Progress) -> None:
        """Show a moment of a job."""
        if self._terminal:
            self._rewrite(progress)
        elif progress.phase != self._phase:
            sys.stderr.write(f"{self._label}: {progress.phase}\n")
        self._phase = progress.phase

    def _rewrite(self, progress: Progress) -> None:
        now = time.monotonic()
        if now - self._last < 0.1 and progress.fraction < 1:
            return
        self._last = now
        bar = ("#" * round(progress.fraction * BAR_WIDTH)).ljust(BAR_WIDTH, ".")
        left = "" if progress.remaining is None else f", {progress.remaining:.0f} s left"
        text = f"{self._label} [{bar}] {progress.fraction:4.0%} {progress.phase}{left}"
        sys.stderr.write(f"\r{text[:110]:<110}" + ("\n" if progress.fraction >= 1 else ""))
        sys.stderr.flush()


def default_library() -> Path:
    """The library folder of the command line: ``ENGINE_ROOM_LIBRARY``, or in the home folder."""
    return Path(os.environ.get(LIBRARY_VARIABLE) or Path.home() / "engine-room")


def add_library(parser: argparse.ArgumentParser) -> None:
    """``--library``."""
    parser.add_argument(
        "--library",
        type=Path,
        default=None,
        metavar="DIR",
        help=f"folder of engines (default: ${LIBRARY_VARIABLE}, or engine-room in the home folder)",
    )


def library_of(args: argparse.Namespace) -> Library:
    """The library that the arguments name."""
    return Library(args.library or default_library())


def add_loras(parser: argparse.ArgumentParser) -> None:
    """``--lora``, any number."""
    parser.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="FILE[:STRENGTH]",
        help="a LoRA to merge, with its strength (default 1); may be given several times",
    )


def loras_of(args: argparse.Namespace) -> list[LoraChoice]:
    """The LoRAs that the arguments name."""
    return [LoraChoice.parse(text) for text in args.lora]


def add_target(parser: argparse.ArgumentParser) -> None:
    """``--device``, ``--backend``, ``--dtype``, ``--capability``."""
    parser.add_argument("--device", default=None, help="cpu or cuda:0 (default: the GPU if usable)")
    parser.add_argument("--backend", choices=BACKENDS, default=None, help="compiler and runtime")
    parser.add_argument("--dtype", choices=DTYPES, default=None, help="precision of the engine")
    parser.add_argument(
        "--capability",
        default=None,
        metavar="8.9,12.0",
        help="compute capabilities to build for (default: this GPU's); needs no GPU",
    )


def target_of(args: argparse.Namespace) -> Target:
    """The target that the arguments name."""
    capabilities = tuple(args.capability.split(",")) if args.capability else ()
    device = args.device or default_device()
    return Target(
        device=device,
        backend=args.backend or "",
        dtype=args.dtype or "",
        capabilities=capabilities,
    )


def add_shape(parser: argparse.ArgumentParser) -> None:
    """``--size``, ``--batch``, ``--chunks``, ``--control``."""
    parser.add_argument("--size", default="512", metavar="WxH", help="in pixels (default 512)")
    parser.add_argument(
        "--batch", type=int, default=2, help="rows of a call: 2 for each picture with guidance"
    )
    parser.add_argument(
        "--chunks", type=int, default=1, help="blocks of 75 prompt tokens (default 1)"
    )
    parser.add_argument("--control", action="store_true", help="with ControlNet inputs")


def shape_of(args: argparse.Namespace) -> Shape:
    """The shape that the arguments name."""
    width, height = parse_pixels(args.size)
    return Shape.from_pixels(
        width=width,
        height=height,
        batch=args.batch,
        tokens=tokens_for_chunks(args.chunks),
        control=args.control,
    )


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines with aligned columns; the first row is the heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def megabytes(count: int) -> str:
    """Bytes in words, such as ``21.4 MB``."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
