"""The tab's controls, in the part of gradio that 3.41 and 4.40 share."""

from __future__ import annotations

import inspect
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

from ..doctor import diagnose
from ..errors import CancelledError, EngineRoomError
from ..progress import CancelToken, Progress
from ..status import status
from . import facts

POLL_SECONDS = 0.3
INTRODUCTION = (
    "An engine makes the UNet faster for one picture size. It holds no weights: the same engine "
    "serves every checkpoint and LoRA of this kind, at any strength. Engines are built in the "
    "background; until one is ready, and wherever none can help, pictures come as always."
)


def copyable(textbox: Any) -> dict[str, bool]:
    """The argument for a copy button, where this gradio has one."""
    known = inspect.signature(textbox.__init__).parameters
    return {"show_copy_button": True} if "show_copy_button" in known else {}


class Tab:
    """Builds the tab for one host and answers its events."""

    def __init__(self, host: facts.UiHost) -> None:
        self.host = host
        self._export = CancelToken()

    def build(self) -> Any:
        """The gradio Blocks."""
        import gradio as gr

        with gr.Blocks(analytics_enabled=False) as blocks:
            gr.Markdown(INTRODUCTION)
            headline = gr.Markdown(elem_id="engine_room_headline")
            with gr.Row():
                shape = self._shape_controls(gr)
                with gr.Column():
                    progress = gr.HTML(elem_id="engine_room_progress")
                    build = gr.Button(
                        "Build engine", variant="primary", elem_id="engine_room_build"
                    )
                    cancel = gr.Button("Cancel", elem_id="engine_room_cancel")
                    folder = gr.Textbox("model", label="Name of the ONNX folder")
                    export = gr.Button("Export ONNX", elem_id="engine_room_export")
            engines = gr.HTML(elem_id="engine_room_engines")
            with gr.Row():
                chosen = gr.Dropdown([], label="Engine", elem_id="engine_room_chosen")
                delete = gr.Button("Delete engine", elem_id="engine_room_delete")
                refresh = gr.Button("Refresh", elem_id="engine_room_refresh")
            install = gr.Button(
                "Install TensorRT into the extension's private folder (up to 1 GB)",
                elem_id="engine_room_install",
            )
            report = gr.Textbox(
                label="Everything a bug report needs",
                lines=4,
                elem_id="engine_room_report",
                **copyable(gr.Textbox),
            )
            doctor = gr.Button("Doctor: examine this machine", elem_id="engine_room_doctor")
            shown = [headline, engines, chosen]
            build.click(self.run_build, shape, [progress, *shown])
            cancel.click(self.cancel, None, progress)
            export.click(self.run_export, folder, progress)
            delete.click(self.delete, chosen, [progress, *shown])
            refresh.click(self.refresh, None, shown)
            doctor.click(self.report, None, report)
            install.click(self.run_install, None, progress)
            blocks.load(self.refresh, None, shown)
        return blocks

    def _shape_controls(self, gr: Any) -> list[Any]:
        with gr.Column():
            preset = gr.Dropdown(list(facts.PRESETS), label="Usual sizes", value="512 x 512")
            with gr.Row():
                width = gr.Number(512, label="Width", precision=0, elem_id="engine_room_width")
                height = gr.Number(512, label="Height", precision=0, elem_id="engine_room_height")
            with gr.Row():
                pictures = gr.Number(1, label="Pictures at once", precision=0)
                chunks = gr.Number(1, label="Prompt blocks of 75 tokens", precision=0)
            guidance = gr.Checkbox(True, label="With a negative prompt (CFG above 1)")
            control = gr.Checkbox(
                False, label="With inputs for ControlNet", visible=self.host.has_control
            )
            text = gr.Markdown()
        controls = [width, height, pictures, guidance, chunks, control]
        preset.change(lambda name: facts.PRESETS.get(name, (512, 512)), preset, [width, height])
        for control_ in controls:
            control_.change(self.estimate, controls, text)
        return controls

    def refresh(self) -> list[Any]:
        """Headline, table, ids."""
        import gradio as gr

        ids = [row["id"] for row in facts.engine_rows(self.host)]
        picker = gr.update(choices=ids, value=ids[0] if ids else None)
        return [facts.headline(self.host), facts.engines_html(self.host), picker]

    def estimate(self, *controls: Any) -> str:
        """What a build would take, or what is wrong with the size."""
        try:
            return facts.estimate(self.host, facts.shape_of(*controls))
        except EngineRoomError as error:
            return str(error)

    def run_build(self, *controls: Any) -> Iterator[list[Any]]:
        """Build in the background and show how far it is."""
        try:
            job = self.host.job(facts.shape_of(*controls))
        except EngineRoomError as error:
            yield [facts.progress_html(None, str(error)), *self.refresh()]
            return
        tiers = self.host.room().tiers
        label = f"{job.arch.label}, {job.shape.label}"
        tiers.failed.pop(tiers.key(job).stem, None)
        stem = tiers.want(job)
        shown = self.refresh()
        while stem in tiers.wanted:
            event = self.host.room().events.get(stem)
            progress = event.progress if event else None
            yield [facts.progress_html(progress, event.text or label if event else label), *shown]
            time.sleep(POLL_SECONDS)
        failed = tiers.failed.get(stem)
        text = f"{label}: {failed}" if failed else f"{label}: ready"
        yield [facts.progress_html(None, text), *self.refresh()]

    def cancel(self) -> str:
        """Cancel what is being built or exported."""
        self.host.room().tiers.cancel()
        self._export.cancel()
        return facts.progress_html(None, "Cancelled.")

    def run_export(self, name: str) -> Iterator[str]:
        """Export the loaded model with its LoRAs."""
        self._export = cancel = CancelToken()
        latest: list[Progress] = []
        outcome: list[str] = []

        def work() -> None:
            try:
                outcome.append(f"Written to {self.host.export(name, latest.append, cancel)}")
            except CancelledError:
                outcome.append("Cancelled; nothing was left behind.")
            except EngineRoomError as error:
                outcome.append(str(error))
            except Exception as error:
                outcome.append(f"The export failed: {error}")

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        while thread.is_alive():
            yield facts.progress_html(latest[-1] if latest else None, "Export")
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

    def delete(self, stem: str | None) -> list[Any]:
        """Delete the chosen engine."""
        text = "Choose an engine first."
        if stem:
            try:
                self.host.room().pool.remove(stem)
                freed = self.host.room().library.remove(stem)
                text = f"Deleted {stem}: {freed / 1e6:.1f} MB are free again."
            except EngineRoomError as error:
                text = str(error)
        return [facts.progress_html(None, text), *self.refresh()]

    def report(self) -> Iterator[str]:
        """What the doctor says, then the status as JSON."""
        yield "Examining this machine; a test engine takes some seconds ..."
        room, device = self.host.room(), self.host.device()
        found = diagnose(room.library, device, host=self.host.facts())
        yield "\n".join([*found.lines, "", json.dumps(status(room, device), indent=1)])
