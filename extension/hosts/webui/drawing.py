"""One picture through the host's own processing, for comparisons and for merging LoRAs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from modules import call_queue, processing, scripts, shared

from ...errors import SettingError
from ...ui.drawing import DrawJob, Drawn
from . import room, settings
from .script import EngineRoomScript


def draw(job: DrawJob, *, engines: bool) -> Drawn:
    """Draw ``job`` between the host's own jobs; nothing is saved, no other script takes part.

    Raises:
        SettingError: the host drew nothing.
    """
    with call_queue.queue_lock:
        return draw_now(job, engines=engines)


def draw_now(job: DrawJob, *, engines: bool) -> Drawn:
    """``draw`` by a caller that holds the host's queue."""
    with settings.forced("wait" if engines else "off"):
        before = room.room().counters.to_json()
        shared.state.begin(job="engine_room")
        started = time.perf_counter()
        try:
            with closing(_processing(job)) as p:
                p.scripts, p.script_args = _runner(), ()
                images = processing.process_images(p).images
        finally:
            shared.state.end()
        seconds = time.perf_counter() - started
        after = room.room().counters.to_json()
    if not images:
        raise SettingError("The host drew no picture; it may have been interrupted.")
    return Drawn(
        image=images[0],
        seconds=seconds,
        served=after["served"] - before["served"],
        host=after["host"] - before["host"],
        engines=_difference(after["engines"], before["engines"]),
    )


def _processing(job: DrawJob) -> Any:
    return processing.StableDiffusionProcessingTxt2Img(
        sd_model=shared.sd_model,
        prompt=job.prompt,
        negative_prompt=job.negative,
        width=job.width,
        height=job.height,
        steps=job.steps,
        cfg_scale=job.cfg,
        seed=job.seed,
        sampler_name="Euler",
        do_not_save_samples=True,
        do_not_save_grid=True,
    )


def _runner() -> Any:
    """A script runner with this extension alone."""
    ours = [
        script
        for script in scripts.scripts_txt2img.alwayson_scripts
        if isinstance(script, EngineRoomScript)
    ]
    runner = scripts.ScriptRunner()
    runner.scripts, runner.alwayson_scripts = list(ours), list(ours)
    return runner


def _difference(after: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    counts = {stem: count - before.get(stem, 0) for stem, count in after.items()}
    return {stem: count for stem, count in counts.items() if count}
