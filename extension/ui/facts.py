"""What the tab asks of a host, and what it tells in words."""

from __future__ import annotations

import html
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from ..architecture import Architecture
from ..doctor import HostFacts
from ..engine_state import State
from ..errors import EngineRoomError, SettingError
from ..machine import machine_of
from ..memory import engine_bytes, hwc8_bytes, parameter_bytes
from ..progress import Progress
from ..room import Room
from ..serving import Target, load_engine
from ..serving import verify as compare_with_torch
from ..shapes import Shape, tokens_for_chunks
from ..status import status
from ..wanted import Job
from .drawing import DrawJob, Drawn

Preset = tuple[int, int, float]
# Width, height, and how much larger the second pass of a hires fix is.
PRESETS: Mapping[str, Preset] = {
    "512 x 512": (512, 512, 1.0),
    "512 x 768, portrait": (512, 768, 1.0),
    "768 x 512, landscape": (768, 512, 1.0),
    "768 x 768": (768, 768, 1.0),
    "1024 x 1024": (1024, 1024, 1.0),
    "832 x 1216, portrait": (832, 1216, 1.0),
    "1216 x 832, landscape": (1216, 832, 1.0),
    "512 x 512 with hires fix x 2": (512, 512, 2.0),
    "512 x 768 with hires fix x 1.5": (512, 768, 1.5),
    "1024 x 1024 with hires fix x 1.5": (1024, 1024, 1.5),
}
COLUMNS = (
    "Model",
    "Size",
    "Batch",
    "Prompt",
    "Weights",
    "State",
    "Speed",
    "Disk",
    "Built in",
    "Last used",
    "In memory",
    "Id",
)
BYTES_PER_ENGINE = 40e6
SCALES = (1.0, 8.0)


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

    def merged(self, loras: Sequence[str], strength: float) -> AbstractContextManager[LiveModel]:
        """The loaded model with just these LoRAs, which stay as they are within the context.

        Raises:
            EngineRoomError: there is no model, or the host cannot merge them.
        """

    def loras(self) -> list[str]:
        """Names of LoRAs that a prompt may carry."""

    def draw(self, job: DrawJob, *, engines: bool) -> Drawn:
        """One picture through the host alone, or through engines (a missing one is built).

        Raises:
            EngineRoomError: it cannot be drawn; says why.
        """


@dataclass(frozen=True, kw_only=True)
class LiveModel:
    """A loaded model to be exported or frozen into an engine.

    Attributes:
        weights: LDM name to tensor, each a copy of its own on the CPU.
        folder: where exports go.
        source: where the weights come from, for manifests and ONNX files.
        model: what a host needs to sample without the checkpoint, for manifests.
    """

    arch: Architecture
    weights: Mapping[str, Tensor]
    folder: Path
    source: Mapping[str, str]
    model: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class BuildChoice:
    """What the controls of the tab stand for, as gradio hands it over.

    Attributes:
        scale: of the second pass of a hires fix; 1 is without.
        chunks: prompt blocks of 75 tokens.
    """

    width: float
    height: float
    scale: float
    pictures: float
    chunks: float
    guidance: bool
    control: bool

    def shapes(self) -> list[Shape]:
        """Shapes to build: one, or two for a hires fix; raises SettingError in words."""
        numbers = [self.width, self.height, self.pictures, self.chunks]
        if any(number is None or number != int(number) for number in numbers):
            raise SettingError("Width, height, pictures and prompt blocks must be whole numbers.")
        if self.scale is None or not SCALES[0] <= self.scale <= SCALES[1]:
            raise SettingError(f"The hires scale must be from {SCALES[0]:g} to {SCALES[1]:g}.")
        width, height = int(self.width), int(self.height)
        # Hosts cut the larger size to whole latent cells.
        larger = [int(side * self.scale) // 8 * 8 for side in (width, height)]
        sizes = dict.fromkeys([(width, height), (larger[0], larger[1])])
        return [self._shape(*size) for size in sizes]

    def _shape(self, width: int, height: int) -> Shape:
        return Shape.from_pixels(
            width=width,
            height=height,
            batch=int(self.pictures) * (2 if self.guidance else 1),
            tokens=tokens_for_chunks(int(self.chunks)),
            control=bool(self.control),
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
    failed = list(facts["failed"].items())[-5:]
    lines += [f"- {stem} is not built again by itself: {why}" for stem, why in failed]
    lines += [f"- {facts['unable']}"] if facts["unable"] else []
    return "\n\n".join(lines[:3]) + ("\n\n" + "\n".join(lines[3:]) if lines[3:] else "")


def estimate(host: UiHost, choice: BuildChoice, *, baked: bool) -> str:
    """Markdown: what building would take, a line for each size."""
    return "\n".join(f"- {_estimate(host, shape, baked)}" for shape in choice.shapes())


def _estimate(host: UiHost, shape: Shape, baked: bool) -> str:
    job = host.job(shape)
    tiers = host.room().tiers
    key = tiers.key(job)
    if not baked and host.room().library.find(key) is not None:
        return f"{shape.label}: the engine is there already."
    seconds = tiers.expected_seconds(job, baked=baked)
    disk, memory = BYTES_PER_ENGINE, engine_bytes(job.arch, shape, job.target.dtype)
    if baked:
        weights = parameter_bytes(job.arch, job.target.dtype)
        disk, memory = disk + weights, memory + weights
    elif key.conv3x3_format == "hwc8":
        memory += hwc8_bytes(job.arch)
    return (
        f"{shape.label}: about {seconds:.0f} s to build, at most {disk / 1e6:.0f} MB on disk, "
        f"about {memory / 1e6:.0f} MB of memory on the GPU while it is in use."
    )


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
        return "<p>No engines yet. Choose a size and press Accelerate.</p>"
    head = "".join(f"<th scope='col' style='text-align:left'>{name}</th>" for name in COLUMNS)
    body = "".join(f"<tr>{_cells(row)}</tr>" for row in rows)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div style='overflow-x:auto'>{table}</div>"


def _cells(row: Mapping[str, Any]) -> str:
    seconds, key = row["build_seconds"], row["key"]
    shape = Shape.from_json(key["shape"]) if key else None
    model = (row["label"] or "unknown").split(",")[0]
    baked = key and key["weights"] == "baked"
    cells = (
        model,
        "x".join(map(str, shape.pixels)) if shape else "",
        shape.batch if shape else "",
        f"{shape.tokens} tokens{', ControlNet' if shape.control else ''}" if shape else "",
        row["label"].rpartition("baked: ")[2] if baked else "any",
        row["text"],
        "" if row["speed"] is None else f"{row['speed']:.2f} x host",
        f"{row['bytes'] / 1e6:.1f} MB",
        "" if seconds is None else f"{seconds:.0f} s",
        ago(row["last_used"]),
        "yes" if row["loaded"] else "no",
        row["id"],
    )
    return "".join(f"<td style='padding-right:1em'>{html.escape(str(cell))}</td>" for cell in cells)


def ago(when: Any) -> str:
    """A time as people say it, from seconds since the epoch or an ISO date."""
    try:
        moment = when if isinstance(when, int | float) else datetime.fromisoformat(when).timestamp()
    except (TypeError, ValueError):
        return "never"
    seconds = max(time.time() - moment, 0.0)
    for size, name in ((86400, "day"), (3600, "hour"), (60, "minute")):
        count = int(seconds // size)
        if count:
            return f"{count} {name}{'s' if count > 1 else ''} ago"
    return "just now"


def verify(host: UiHost, stem: str) -> str:
    """Check an engine's files and, where the loaded model fits it, what it computes; in words.

    Raises:
        EngineRoomError: it is damaged, or computes something else.
    """
    room = host.room()
    room.library.verify_files(stem)
    entry = room.library.entry(stem, machine_of(host.device()))
    if entry.state in (State.OTHER_GPU, State.OTHER_VERSION, State.OUTDATED):
        return f"{stem}: its files are whole; {entry.text}."
    key = entry.key
    job = host.job(key.shape)
    if key.architecture != job.arch.for_shape(key.shape).id:
        return f"{stem}: its files are whole. Load a model of its kind to compare its results."
    target = Target.of_key(key, host.device())
    engine = load_engine(room.library, entry, target)
    try:
        result = compare_with_torch(room.library, entry, engine, job.arch, None, target)
    finally:
        engine.close()
    if not result.passed:
        room.pool.set_aside(stem, "verified again, and wrong")
    result.require(stem)
    return f"{stem}: right; worst error {result.worst:.2g}, allowed {result.limit:.2g}."
