"""The tab's controls, in the part of gradio that 3.41 and 4.40 share."""

from __future__ import annotations

import inspect
from typing import Any

from . import facts
from .answers import BAKED, SHARED, Answers

INTRODUCTION = (
    "An engine makes the UNet faster for one picture size. It holds no weights: the same engine "
    "serves every checkpoint and LoRA of this kind, at any strength. Engines are built in the "
    "background; until one is ready, and wherever none can help, pictures come as always."
)


TOGETHER = {"concurrency_limit": None}  # several pages may wait in such an event


def known(function: Any, **options: Any) -> dict[str, Any]:
    """Those of ``options`` that ``function`` takes in this gradio."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if name in parameters}


class Tab:
    """Builds the tab for one host.

    Args:
        gr: the module gradio of the process; the core imports none.
    """

    def __init__(self, host: facts.UiHost, gr: Any) -> None:
        self._host, self._gr = host, gr
        self._answers = Answers(host, gr.update)

    def build(self) -> Any:
        """The gradio Blocks."""
        gr, answers = self._gr, self._answers
        with gr.Blocks(analytics_enabled=False) as blocks:
            gr.Markdown(INTRODUCTION)
            headline = gr.Markdown(elem_id="engine_room_headline")
            progress = gr.HTML(elem_id="engine_room_progress")
            with gr.Row():
                controls, weights, estimate = self._shape_controls()
                loras, strength, buttons = self._build_controls()
            with gr.Accordion("Log", open=False):
                log = gr.Textbox(show_label=False, lines=8, elem_id="engine_room_log")
            engines = gr.HTML(elem_id="engine_room_engines")
            shown = [headline, engines, *self._engine_controls(progress, headline, engines)]
            chosen = shown[2]
            self._compare_controls()
            self._doctor_controls(progress)
            accelerate, cancel, export, folder = buttons
            picked = [chosen, weights, loras, strength]
            accelerate.click(
                answers.run_build,
                [*picked, *controls],
                [progress, *shown, log],
                **known(accelerate.click, **TOGETHER),
            )
            # Not in gradio's queue, where it would wait for what it is to cancel.
            cancel.click(answers.cancel, None, progress, queue=False)
            export.click(answers.run_export, [folder, loras, strength], [progress, log])
            blocks.load(answers.refresh, None, [headline, engines, chosen])
            blocks.load(answers.estimate, [weights, *controls], estimate)
            blocks.load(answers.list_loras, None, loras)
            blocks.load(
                answers.watch, chosen, [progress, *shown, log], **known(blocks.load, **TOGETHER)
            )
        return blocks

    def _shape_controls(self) -> tuple[list[Any], Any, Any]:
        gr = self._gr
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
                False, label="With inputs for ControlNet", visible=self._host.has_control
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
            control_.change(self._answers.estimate, [weights, *controls], text)
        return controls, weights, text

    def _build_controls(self) -> tuple[Any, Any, tuple[Any, ...]]:
        gr = self._gr
        with gr.Column():
            accelerate = gr.Button(
                "Accelerate this checkpoint", variant="primary", elem_id="engine_room_build"
            )
            cancel = gr.Button("Cancel", elem_id="engine_room_cancel")
            with gr.Accordion("Export ONNX, and LoRAs to merge", open=False):
                loras = gr.Dropdown(
                    self._host.loras(),
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

    def _engine_controls(self, progress: Any, headline: Any, engines: Any) -> list[Any]:
        gr = self._gr
        with gr.Row():
            chosen = gr.Dropdown([], label="Engine", elem_id="engine_room_chosen")
            verify = gr.Button("Verify engine", elem_id="engine_room_verify")
            delete = gr.Button("Delete engine", elem_id="engine_room_delete")
            refresh = gr.Button("Refresh", elem_id="engine_room_refresh")
        shown = [headline, engines, chosen]
        verify.click(self._answers.verify, chosen, [progress, *shown])
        delete.click(self._answers.delete, chosen, [progress, *shown])
        refresh.click(self._answers.refresh, chosen, shown)
        return [chosen]

    def _compare_controls(self) -> None:
        gr = self._gr
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
        start.click(self._answers.run_compare, inputs, [report, *pictures])

    def _doctor_controls(self, progress: Any) -> None:
        gr = self._gr
        with gr.Accordion("Doctor", open=False):
            report = gr.Textbox(
                label="Everything a bug report needs",
                lines=4,
                elem_id="engine_room_report",
                **known(gr.Textbox.__init__, show_copy_button=True),
            )
            doctor = gr.Button("Examine this machine", elem_id="engine_room_doctor")
            install = gr.Button(
                "Install TensorRT into the extension's private folder (up to 1 GB)",
                elem_id="engine_room_install",
            )
        doctor.click(self._answers.report, None, report)
        install.click(self._answers.run_install, None, progress)
