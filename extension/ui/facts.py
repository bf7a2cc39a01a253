"""What the tab asks of a host, and what it tells in words."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ..doctor import HostFacts
from ..errors import EngineRoomError, SettingError
from ..memory import hwc8_bytes
from ..progress import CancelToken, Progress
from ..room import Room
from ..shapes import Shape, tokens_for_chunks
from ..status import status
from ..tiers import Job

PRESETS = {
    "512 x 512": (512, 512),
    "512 x 768, portrait": (512, 768),
    "768 x 512, landscape": (768, 512),
    "768 x 768": (768, 768),
    "1024 x 1024": (1024, 1024),
    "832 x 1216, portrait": (832, 1216),
    "1216 x 832, landscape": (1216, 832),
}
COLUMNS = ("Engine", "State", "Size", "Built in", "In memory", "Id")
BYTES_PER_ENGINE = 40e6


class UiHost(Protocol):
    """A host, as the tab sees it."""

    has_control: bool

    def room(self) -> Room:
        """This process's room."""

    def device(self) -> str:
        """Where it draws, such as ``cuda:0``."""

    def checkpoint(self) -> str:
        """Name of the loaded checkpoint; empty where there is none."""

    def facts(self) -> HostFacts:
        """Its version, the hooks that are found in it, and other extensions."""

    def job(self, shape: Shape) -> Job:
        """The engine job for the loaded model; raises EngineRoomError where there can be none."""

    def export(
        self, name: str, on_progress: Callable[[Progress], None], cancel: CancelToken
    ) -> str:
        """Write the loaded model, LoRAs included, as an ONNX pair; returns the folder."""


def shape_of(
    width: float, height: float, pictures: float, guidance: bool, chunks: float, control: bool
) -> Shape:
    """The shape that the controls stand for; raises SettingError in words."""
    numbers = [width, height, pictures, chunks]
    if any(number is None or number != int(number) for number in numbers):
        raise SettingError("Width, height, pictures and prompt blocks must be whole numbers.")
    return Shape.from_pixels(
        width=int(width),
        height=int(height),
        batch=int(pictures) * (2 if guidance else 1),
        tokens=tokens_for_chunks(int(chunks)),
        control=bool(control),
    )


def headline(host: UiHost) -> str:
    """Markdown: model, GPU, backend, and who draws now."""
    facts = status(host.room(), host.device())
    backends = ", ".join(f"{name} {version}" for name, version in facts["backends"].items())
    lines = [f"**Checkpoint:** {host.checkpoint() or 'none loaded'}"]
    try:
        job = host.job(Shape(batch=2, height=64, width=64))
        lines[0] += f" ({job.arch.label}, {job.target.dtype})"
    except EngineRoomError as error:
        lines.append(f"**No engines:** {error}")
    lines.append(f"**Device:** {facts['gpu']} | **Backend:** {backends or 'none installed'}")
    total = facts["served"] + facts["host"]
    served = f"engines served {facts['served']} of {total} UNet calls" if total else "none yet"
    lines.append(f"**Pictures since the start:** {served}")
    lines += [f"- {r['count']} calls by the host: {r['text']}" for r in facts["reasons"][:5]]
    return "\n\n".join(lines[:3]) + ("\n\n" + "\n".join(lines[3:]) if lines[3:] else "")


def estimate(host: UiHost, shape: Shape) -> str:
    """Markdown: what a build would take."""
    job = host.job(shape)
    tiers = host.room().tiers
    key = tiers.key(job)
    if host.room().library.find(key) is not None:
        return f"The engine for {shape.label} is there already."
    seconds = tiers.expected_seconds(job)
    text = f"{shape.label}: about {seconds:.0f} s to build, {BYTES_PER_ENGINE / 1e6:.0f} MB on disk"
    if key.conv3x3_format == "hwc8":
        text += f", {hwc8_bytes(job.arch) / 1e6:.0f} MB of VRAM for copies of weights"
    return f"{text}."


def progress_html(progress: Progress | None, label: str) -> str:
    """A bar that screen readers understand."""
    if progress is None:
        return f"<p role='status'>{html.escape(label)}</p>"
    percent = round(100 * progress.fraction)
    left = "" if progress.remaining is None else f", about {progress.remaining:.0f} s left"
    text = f"{label}: {progress.phase}, {percent} %, {progress.elapsed:.0f} s so far{left}"
    return (
        f"<div role='progressbar' aria-valuenow='{percent}' aria-valuemin='0' "
        f"aria-valuemax='100' style='border:1px solid currentColor;border-radius:4px'>"
        f"<div style='width:{percent}%;height:1em;background:currentColor;opacity:.45'></div>"
        f"</div><p role='status'>{html.escape(text)}</p>"
    )


def engine_rows(host: UiHost) -> list[Mapping[str, Any]]:
    """Every engine as the status tells it."""
    return list(status(host.room(), host.device())["engines"])


def engines_html(host: UiHost) -> str:
    """The table of engines."""
    rows = engine_rows(host)
    if not rows:
        return "<p>No engines yet. Choose a size and press Build.</p>"
    head = "".join(f"<th scope='col' style='text-align:left'>{name}</th>" for name in COLUMNS)
    body = "".join(f"<tr>{_cells(row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cells(row: Mapping[str, Any]) -> str:
    seconds = row["build_seconds"]
    cells = (
        row["label"] or "unknown",
        row["text"],
        f"{row['bytes'] / 1e6:.1f} MB",
        "" if seconds is None else f"{seconds:.0f} s",
        "yes" if row["loaded"] else "no",
        row["id"],
    )
    return "".join(f"<td style='padding-right:1em'>{html.escape(str(cell))}</td>" for cell in cells)
