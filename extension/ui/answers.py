"""What the tab answers to its events: HTML, texts and pictures, with no gradio."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from .. import threads
from ..doctor import diagnose
from ..errors import CancelledError, EngineRoomError
from ..files import child_folder
from ..log import logger
from ..onnx_export import export_pair
from ..progress import CancelToken, Progress
from ..status import status
from . import facts
from .baked import bake_live
from .comparison import Comparison, compare, report_html
from .drawing import DrawJob

POLL_SECONDS = 0.3
SHARED, BAKED = "shared: works with every checkpoint and LoRA (recommended)", "baked: this one only"


class Answers:
    """For one host; a generator yields until its work is done.

    Args:
        update: gradio's function of that name: changes of a control.
    """

    def __init__(self, host: facts.UiHost, update: Callable[..., Any]) -> None:
        self.host, self._update = host, update
        self._task: CancelToken | None = None

    def refresh(self, chosen: str | None = None) -> list[Any]:
        """Headline, table, ids: the one that was chosen stays so while it is there."""
        ids = self._ids()
        return self._view(ids, value=chosen if chosen in ids else next(iter(ids), None))

    def _beside(self) -> list[Any]:
        """As ``refresh``, for what goes on by itself: it never changes what is chosen."""
        return self._view(self._ids())

    def _ids(self) -> list[str]:
        return [row["id"] for row in facts.engine_rows(self.host)]

    def _view(self, ids: list[str], **picked: Any) -> list[Any]:
        picker = self._update(choices=ids, **picked)
        return [facts.headline(self.host), facts.engines_html(self.host), picker]

    def list_loras(self) -> Any:
        """The LoRAs that the host knows now."""
        return self._update(choices=self.host.loras())

    def estimate(self, weights: str, *controls: Any) -> str:
        """What a build would take, or what is wrong with the size."""
        try:
            choice = facts.BuildChoice(**_named(controls))
            return facts.estimate(self.host, choice, baked=weights == BAKED)
        except EngineRoomError as error:
            return str(error)

    def run_build(
        self,
        chosen: str | None,
        weights: str,
        loras: list[str] | None,
        strength: float,
        *controls: Any,
    ) -> Iterator[list[Any]]:
        """Build in the background and show how far it is."""
        try:
            choice = facts.BuildChoice(**_named(controls))
            shapes = choice.shapes()
            jobs = [self.host.job(shape) for shape in shapes]
        except EngineRoomError as error:
            yield self._shown(str(error), chosen)
            return
        if weights == BAKED:
            yield from self._run_baked(chosen, shapes, loras or [], strength)
            return
        tiers = self.host.room().tiers
        for job in jobs:
            tiers.failed.pop(tiers.key(job).stem, None)
        stems = {tiers.want(job): f"{job.arch.label}, {job.shape.label}" for job in jobs}
        yield from self._follow(set(stems))
        ends = [
            f"{label}: {tiers.failed[stem]}" if stem in tiers.failed else f"{label}: ready"
            for stem, label in stems.items()
        ]
        yield self._shown("; ".join(ends), chosen)

    def watch(self, chosen: str | None) -> Iterator[list[Any]]:
        """What is being built, also by another page or a picture; for a page that was opened."""
        if self.host.room().tiers.wanted:
            yield from self._follow(None)
            yield self._shown("No engine is being built any more.", chosen)
        else:
            yield self._shown("", chosen)

    def _follow(self, stems: set[str] | None) -> Iterator[list[Any]]:
        """The progress of ``stems`` (None: of anything) until they are no longer wanted."""
        room, shown = self.host.room(), self._beside()
        while wanted := [s for s in room.tiers.wanted if stems is None or s in stems]:
            event = room.events.get(wanted[0])
            progress = event.progress if event else None
            label = event.label if event else "An engine is next"
            if event and event.kind == "loading":
                progress, label = None, f"{label}: being loaded and verified on this device"
            yield [facts.progress_html(progress, label), *shown, self._log()]
            time.sleep(POLL_SECONDS)

    def _shown(self, text: str, chosen: str | None) -> list[Any]:
        return self._end(facts.progress_html(None, text), chosen)

    def _end(self, html: str, chosen: str | None) -> list[Any]:
        """What is shown last. An engine is only chosen here where none was at the beginning."""
        shown = self._beside() if chosen else self.refresh()
        return [html, *shown, self._log()]

    def _log(self) -> str:
        return "\n".join(reversed(self.host.room().lines))

    def _run_baked(
        self, chosen: str | None, shapes: list[Any], loras: list[str], strength: float
    ) -> Iterator[list[Any]]:
        shown = self._beside()

        def work(progress: list[Progress], cancel: CancelToken) -> str:
            return bake_live(self.host, shapes, loras, strength, progress.append, cancel)

        for moment in self._in_background("Baked engine", work):
            yield [moment, *shown, self._log()]
        yield self._end(moment, chosen)

    def cancel(self) -> str:
        """Cancel what is being built or exported."""
        tiers, task = self.host.room().tiers, self._task
        busy = bool(tiers.wanted) or task is not None
        tiers.cancel()
        if task is not None:
            task.cancel()
        return facts.progress_html(None, "Cancelled." if busy else "Nothing is being built.")

    def run_export(
        self, name: str, loras: list[str] | None, strength: float
    ) -> Iterator[list[str]]:
        """Export the loaded model with its LoRAs."""

        def work(progress: list[Progress], cancel: CancelToken) -> str:
            with self.host.merged(loras or [], strength) as live:
                return f"Written to {_export(live, name, progress, cancel)}"

        for moment in self._in_background("Export", work):
            yield [moment, self._log()]

    def _in_background(self, label: str, work: Any) -> Iterator[str]:
        """Run ``work(progress, cancel)``; HTML of its progress, then of what it returned."""
        if self._task is not None:
            yield facts.progress_html(None, "One export or baked engine at a time.")
            return
        self._task = cancel = CancelToken()
        progress: list[Progress] = []
        outcome: list[str] = []

        def run() -> None:
            try:
                outcome.append(work(progress, cancel))
            except CancelledError:
                outcome.append("Cancelled; nothing was left behind.")
            except EngineRoomError as error:
                outcome.append(str(error))
            except Exception as error:
                logger.exception("%s failed.", label)
                outcome.append(f"{label} failed: {error}")
            finally:
                self._task = None
            self.host.room().tell(f"{label}: {outcome[0]}")

        thread = threads.start(run, name="tab", stop=cancel.cancel)
        while thread.is_alive():
            yield facts.progress_html(progress[-1] if progress else None, label)
            time.sleep(POLL_SECONDS)
        yield facts.progress_html(None, outcome[0])

    def run_install(self) -> Iterator[str]:
        """Download what is missing; the host's own packages are not touched."""
        room = self.host.room()
        room.install()
        while room.installing:
            yield facts.progress_html(None, room.installing)
            time.sleep(POLL_SECONDS)
        yield facts.progress_html(None, room.installed)

    def verify(self, stem: str | None) -> list[Any]:
        """Check the chosen engine's files and results."""
        return self._answer(lambda: facts.verify(self.host, stem or ""), stem)

    def delete(self, stem: str | None) -> list[Any]:
        """Delete the chosen engine."""

        def work() -> str:
            freed = self.host.room().remove(stem or "")
            return f"Deleted {stem}: {freed / 1e6:.1f} MB are free again."

        return self._answer(work, stem)

    def _answer(self, work: Any, stem: str | None) -> list[Any]:
        """What ``work`` says, or its error, with everything refreshed."""
        try:
            text = work() if stem else "Choose an engine first."
        except EngineRoomError as error:
            text = str(error)
        return [facts.progress_html(None, text), *self.refresh(stem)]

    def run_compare(
        self,
        prompt: str,
        negative: str,
        width: float,
        height: float,
        steps: float,
        cfg: float,
        seed: float,
    ) -> Iterator[list[Any]]:
        """Draw the same picture twice; report, both pictures, their difference."""
        try:
            numbers = {"width": width, "height": height, "steps": steps, "seed": seed}
            whole = {name: int(value or 0) for name, value in numbers.items()}
            job = DrawJob(prompt=prompt, negative=negative, cfg=float(cfg or 0), **whole)
            for found in compare(self.host, job):
                if isinstance(found, Comparison):
                    pictures = [found.host, found.engine, found.difference]
                    yield [report_html(found.report), *pictures]
                else:
                    yield [report_html(found), None, None, None]
        except EngineRoomError as error:
            yield [report_html(str(error)), None, None, None]
        except Exception as error:
            logger.exception("The comparison failed.")
            yield [report_html(f"The host could not draw: {error}"), None, None, None]

    def report(self) -> Iterator[str]:
        """What the doctor says, then the status as JSON."""
        yield "Examining this machine; a test engine takes some seconds ..."
        room, device = self.host.room(), self.host.device()
        found = diagnose(room.library, device, host=self.host.facts())
        yield "\n".join([*found.lines, "", json.dumps(status(room, device), indent=1)])


def _export(live: facts.LiveModel, name: str, progress: list[Progress], cancel: CancelToken) -> str:
    folder = child_folder(live.folder, name)
    export_pair(
        live.weights,
        live.arch,
        folder,
        dtype="fp16",
        origin=live.source,
        on_progress=progress.append,
        cancel=cancel,
    )
    return str(folder)


def _named(controls: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(facts.BuildChoice.__dataclass_fields__, controls, strict=True))
