"""The tab's controls, in the part of gradio that 3.41 and 4.40 share."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Iterator
from typing import Any

from .. import threads
from ..doctor import diagnose
from ..errors import CancelledError, EngineRoomError
from ..log import logger
from ..onnx_export import export_pair
from ..progress import CancelToken, Progress
from ..status import status
from . import facts
from .baked import bake_live
from .comparison import Comparison, compare, report_html
from .drawing import DrawJob, lora_tags

POLL_SECONDS = 0.3
INTRODUCTION = (
    "An engine makes the UNet faster for one picture size. It holds no weights: the same engine "
    "serves every checkpoint and LoRA of this kind, at any strength. Engines are built in the "
    "background; until one is ready, and wherever none can help, pictures come as always."
)
SHARED, BAKED = "shared: works with every checkpoint and LoRA (recommended)", "baked: this one only"


def copyable(textbox: Any) -> dict[str, bool]:
    """The argument for a copy button, where this gradio has one."""
    known = inspect.signature(textbox.__init__).parameters
    return {"show_copy_button": True} if "show_copy_button" in known else {}


class Tab:
    """Builds the tab for one host and answers its events."""

    def __init__(self, host: facts.UiHost) -> None:
        self.host = host
        self._task = CancelToken()

    def build(self) -> Any:
        """The gradio Blocks."""
        import gradio as gr

        with gr.Blocks(analytics_enabled=False) as blocks:
            gr.Markdown(INTRODUCTION)
            headline = gr.Markdown(elem_id="engine_room_headline")
            progress = gr.HTML(elem_id="engine_room_progress")
            with gr.Row():
                controls, weights = self._shape_controls(gr)
                loras, strength, buttons = self._build_controls(gr)
            with gr.Accordion("Log", open=False):
                log = gr.Textbox(show_label=False, lines=8, elem_id="engine_room_log")
            engines = gr.HTML(elem_id="engine_room_engines")
            shown = [headline, engines, *self._engine_controls(gr, progress, headline, engines)]
            chosen = shown[2]
            self._compare_controls(gr)
            self._doctor_controls(gr, progress)
            accelerate, cancel, export, folder = buttons
            picked = [weights, loras, strength]
            accelerate.click(self.run_build, [*picked, *controls], [progress, *shown, log])
            cancel.click(self.cancel, None, progress)
            export.click(self.run_export, [folder, loras, strength], [progress, log])
            blocks.load(self.refresh, None, [headline, engines, chosen])
            blocks.load(self.list_loras, None, loras)
            blocks.load(self.watch, None, [progress, *shown, log])
        return blocks

    def _shape_controls(self, gr: Any) -> tuple[list[Any], Any]:
        with gr.Column():
            preset = gr.Dropdown(
                list(facts.PRESETS),
                label="My usual size",
                value="512 x 512",
                elem_id="engine_room_preset",
            )
            with gr.Row():
                width = gr.Number(512, label="Width", precision=0, elem_id="engine_room_width")
                height = gr.Number(512, label="Height", precision=0, elem_id="engine_room_height")
                scale = gr.Number(1, label="Hires fix x", elem_id="engine_room_scale")
            with gr.Row():
                pictures = gr.Number(1, label="Pictures at once", precision=0)
                chunks = gr.Number(1, label="Prompt blocks of 75 tokens", precision=0)
            guidance = gr.Checkbox(True, label="With a negative prompt (CFG above 1)")
            control = gr.Checkbox(
                False, label="With inputs for ControlNet", visible=self.host.has_control
            )
            weights = gr.Radio(
                [SHARED, BAKED], label="Weights", value=SHARED, elem_id="engine_room_weights"
            )
            text = gr.Markdown(elem_id="engine_room_estimate")
        controls = [width, height, scale, pictures, chunks, guidance, control]
        preset.change(
            lambda name: list(facts.PRESETS.get(name, (512, 512, 1.0))),
            preset,
            [width, height, scale],
        )
        for control_ in (weights, *controls):
            control_.change(self.estimate, [weights, *controls], text)
        return controls, weights

    def _build_controls(self, gr: Any) -> tuple[Any, Any, tuple[Any, ...]]:
        with gr.Column():
            accelerate = gr.Button(
                "Accelerate this checkpoint", variant="primary", elem_id="engine_room_build"
            )
            cancel = gr.Button("Cancel", elem_id="engine_room_cancel")
            with gr.Accordion("Export ONNX, and LoRAs to merge", open=False):
                loras = gr.Dropdown(
                    self.host.loras(),
                    label="LoRAs to merge (for ONNX and baked engines)",
                    multiselect=True,
                    elem_id="engine_room_loras",
                )
                strength = gr.Number(1, label="Strength", elem_id="engine_room_strength")
                folder = gr.Textbox(
                    "model", label="Name of the ONNX folder", elem_id="engine_room_folder"
                )
                export = gr.Button("Export ONNX", elem_id="engine_room_export")
        return loras, strength, (accelerate, cancel, export, folder)

    def _engine_controls(self, gr: Any, progress: Any, headline: Any, engines: Any) -> list[Any]:
        with gr.Row():
            chosen = gr.Dropdown([], label="Engine", elem_id="engine_room_chosen")
            verify = gr.Button("Verify engine", elem_id="engine_room_verify")
            delete = gr.Button("Delete engine", elem_id="engine_room_delete")
            refresh = gr.Button("Refresh", elem_id="engine_room_refresh")
        shown = [headline, engines, chosen]
        verify.click(self.verify, chosen, [progress, *shown])
        delete.click(self.delete, chosen, [progress, *shown])
        refresh.click(self.refresh, None, shown)
        return [chosen]

    def _compare_controls(self, gr: Any) -> None:
        with gr.Accordion("Compare: the same picture with and without engines", open=False):
            prompt = gr.Textbox("a lighthouse at dusk", label="Prompt")
            negative = gr.Textbox("", label="Negative prompt")
            with gr.Row():
                width = gr.Number(512, label="Width", precision=0, elem_id="engine_room_c_width")
                height = gr.Number(512, label="Height", precision=0, elem_id="engine_room_c_height")
                steps = gr.Number(20, label="Steps", precision=0, elem_id="engine_room_c_steps")
                cfg = gr.Number(7, label="CFG scale")
                seed = gr.Number(1, label="Seed", precision=0)
            start = gr.Button("Compare", elem_id="engine_room_compare")
            report = gr.HTML(elem_id="engine_room_comparison")
            with gr.Row():
                pictures = [
                    gr.Image(label=label, type="pil", interactive=False)
                    for label in ("Host", "Engine", "Difference, 10 times amplified")
                ]
        inputs = [prompt, negative, width, height, steps, cfg, seed]
        start.click(self.run_compare, inputs, [report, *pictures])

    def _doctor_controls(self, gr: Any, progress: Any) -> None:
        with gr.Accordion("Doctor", open=False):
            report = gr.Textbox(
                label="Everything a bug report needs",
                lines=4,
                elem_id="engine_room_report",
                **copyable(gr.Textbox),
            )
            doctor = gr.Button("Examine this machine", elem_id="engine_room_doctor")
            install = gr.Button(
                "Install TensorRT into the extension's private folder (up to 1 GB)",
                elem_id="engine_room_install",
            )
        doctor.click(self.report, None, report)
        install.click(self.run_install, None, progress)

    def refresh(self) -> list[Any]:
        """Headline, table, ids."""
        import gradio as gr

        ids = [row["id"] for row in facts.engine_rows(self.host)]
        picker = gr.update(choices=ids, value=ids[0] if ids else None)
        return [facts.headline(self.host), facts.engines_html(self.host), picker]

    def list_loras(self) -> Any:
        """The LoRAs that the host knows now."""
        import gradio as gr

        return gr.update(choices=self.host.loras())

    def estimate(self, weights: str, *controls: Any) -> str:
        """What a build would take, or what is wrong with the size."""
        try:
            choice = facts.BuildChoice(**_named(controls))
            return facts.estimate(self.host, choice, baked=weights == BAKED)
        except EngineRoomError as error:
            return str(error)

    def run_build(
        self, weights: str, loras: list[str] | None, strength: float, *controls: Any
    ) -> Iterator[list[Any]]:
        """Build in the background and show how far it is."""
        try:
            choice = facts.BuildChoice(**_named(controls))
            shapes = choice.shapes()
            jobs = [self.host.job(shape) for shape in shapes]
        except EngineRoomError as error:
            yield self._shown(str(error))
            return
        if weights == BAKED:
            yield from self._run_baked(shapes, loras or [], strength)
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
        yield self._shown("; ".join(ends))

    def watch(self) -> Iterator[list[Any]]:
        """What is being built, also by another page or a picture; for a page that was opened."""
        if self.host.room().tiers.wanted:
            yield from self._follow(None)
            yield self._shown("No engine is being built any more.")
        else:
            yield self._shown("")

    def _follow(self, stems: set[str] | None) -> Iterator[list[Any]]:
        """The progress of ``stems`` (None: of anything) until they are no longer wanted."""
        room, shown = self.host.room(), self.refresh()
        while wanted := [s for s in room.tiers.wanted if stems is None or s in stems]:
            event = room.events.get(wanted[0])
            progress = event.progress if event else None
            label = event.label if event else "An engine is next"
            if event and event.kind == "loading":
                progress, label = None, f"{label}: being loaded and verified on this device"
            yield [facts.progress_html(progress, label), *shown, self._log()]
            time.sleep(POLL_SECONDS)

    def _shown(self, text: str) -> list[Any]:
        return [facts.progress_html(None, text), *self.refresh(), self._log()]

    def _log(self) -> str:
        return "\n".join(reversed(self.host.room().lines))

    def _run_baked(
        self, shapes: list[Any], loras: list[str], strength: float
    ) -> Iterator[list[Any]]:
        shown = self.refresh()

        def work(progress: list[Progress], cancel: CancelToken) -> str:
            self._merge(loras, strength)
            return bake_live(self.host, shapes, loras, strength, progress.append, cancel)

        for moment in self._in_background("Baked engine", work):
            yield [moment, *shown, self._log()]
        yield [moment, *self.refresh(), self._log()]

    def _merge(self, loras: list[str], strength: float) -> None:
        """Have the host merge LoRAs into its weights, in its own way, by drawing a little."""
        if loras:
            prompt = f"merge{lora_tags(loras, strength)}"
            job = DrawJob(prompt=prompt, width=64, height=64, steps=1)
            self.host.draw(job, engines=False)

    def cancel(self) -> str:
        """Cancel what is being built or exported."""
        self.host.room().tiers.cancel()
        self._task.cancel()
        return facts.progress_html(None, "Cancelled.")

    def run_export(
        self, name: str, loras: list[str] | None, strength: float
    ) -> Iterator[list[str]]:
        """Export the loaded model with its LoRAs."""

        def work(progress: list[Progress], cancel: CancelToken) -> str:
            self._merge(loras or [], strength)
            return f"Written to {self._export(name, progress, cancel)}"

        for moment in self._in_background("Export", work):
            yield [moment, self._log()]

    def _export(self, name: str, progress: list[Progress], cancel: CancelToken) -> str:
        from ..files import child_folder

        live = self.host.live()
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

    def _in_background(self, label: str, work: Any) -> Iterator[str]:
        """Run ``work(progress, cancel)``; HTML of its progress, then of what it returned."""
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
        return [facts.progress_html(None, text), *self.refresh()]

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


def _named(controls: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(facts.BuildChoice.__dataclass_fields__, controls, strict=True))
