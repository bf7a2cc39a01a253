"""The same picture through the host and through engines: what differs, and what it is worth."""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..accuracy import relative_l2
from ..errors import EngineRoomError
from ..key import STEM
from ..picture import psnr, to_image
from ..speed import Speed, record
from .drawing import DrawJob, Drawn
from .facts import UiHost

WARM_UP_STEPS = 2
AMPLIFIED = 10


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two pictures, their difference ten times amplified (PIL images), and a report in words."""

    host: Any
    engine: Any
    difference: Any
    report: str


def compare(host: UiHost, job: DrawJob) -> Iterator[str | Comparison]:
    """Draw with both; yields what is being done, then the comparison.

    Each way draws a short picture first, so that loading, building and warming up are not timed.

    Raises:
        EngineRoomError: the host cannot draw.
    """
    short = replace(job, steps=WARM_UP_STEPS)
    drawn: list[Drawn] = []
    for words, engines in (("the host", False), ("engines", True)):
        yield f"Warming up {words} ..."
        host.draw(short, engines=engines)
        yield f"Drawing with {words} ..."
        drawn.append(host.draw(job, engines=engines))
    yield _judge(host, job, drawn[0], drawn[1])


def _judge(host: UiHost, job: DrawJob, plain: Drawn, fast: Drawn) -> Comparison:
    pictures = [pixels(drawn.image) for drawn in (plain, fast)]
    if pictures[0].shape != pictures[1].shape:
        raise EngineRoomError("The two pictures have different sizes; the host changed its mind.")
    difference = ((pictures[1] - pictures[0]).abs() * AMPLIFIED).clamp(0, 1)
    return Comparison(
        host=plain.image,
        engine=fast.image,
        difference=to_image(difference),
        report=_report(host, job, plain, fast, pictures),
    )


def _report(host: UiHost, job: DrawJob, plain: Drawn, fast: Drawn, pictures: list[Tensor]) -> str:
    calls = fast.served + fast.host
    ratio = plain.seconds / max(fast.seconds, 1e-9)
    lines = [
        f"Engines served {fast.served} of {calls} UNet calls.",
        f"Host {plain.seconds:.2f} s, engines {fast.seconds:.2f} s: {ratio:.2f} times as fast.",
        f"Pictures differ by {relative_l2(pictures[1], pictures[0]):.2g} (relative L2), "
        f"PSNR {psnr(pictures[1], pictures[0]):.1f} dB.",
        f"Engines hold {host.room().pool.nbytes / 1e6:.0f} MB of memory.",
    ]
    if not fast.served:
        lines.append("No call went through an engine; the list above says why.")
    elif fast.host == 0:
        _record(host, job, plain, fast)
        if ratio < 1:
            lines.append("The host is faster here: engines are not recommended at this size.")
    return "\n".join(lines)


def _record(host: UiHost, job: DrawJob, plain: Drawn, fast: Drawn) -> None:
    """Keep the figures with the engine that served most: time of a picture by steps."""
    stem = max(fast.engines, key=lambda name: fast.engines[name])
    if not STEM.fullmatch(stem):
        return  # an instant one: nothing of it is kept
    speed = Speed(host_ms=1e3 * plain.seconds / job.steps, engine_ms=1e3 * fast.seconds / job.steps)
    record(host.room().library, stem, host.device(), speed)


def pixels(image: Any) -> Tensor:
    """A PIL image as [3, H, W] in [0, 1]."""
    rgb = image.convert("RGB")
    data = torch.frombuffer(bytearray(rgb.tobytes()), dtype=torch.uint8)
    return data.view(rgb.height, rgb.width, 3).permute(2, 0, 1).float() / 255


def report_html(text: str) -> str:
    """The report, line by line, for screen readers too."""
    return f"<p role='status'>{'<br>'.join(map(html.escape, text.splitlines()))}</p>"
