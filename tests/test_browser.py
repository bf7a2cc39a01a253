"""The user interfaces in a real browser, in the real hosts; skipped where one is absent."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time

import pytest
from safetensors.torch import load_file, save_file

from extension.model import Model
from extension.packages import VARIABLE
from extension.synthetic import make_checkpoint
from extension.synthetic_lora import make_lora
from tests.support_comfyui import ComfyServer, free_port, link_packages
from tests.support_comfyui import write_models as write_comfy_models
from tests.support_gradio import PINS, gradio_environment
from tests.support_hosts import ROOT, require_host
from tests.support_webui import WebuiServer, distance, write_models
from tests.test_comfyui import WAIT, graph

# Each takes minutes where other tests keep the processor busy.
pytestmark = pytest.mark.timeout(1500)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PATIENCE = 300.0  # a build, of low priority: seconds alone, minutes beside other hosts and browsers


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def until(condition, what, instead=lambda: ""):
    """The first true value of ``condition``; what there is ``instead`` is told."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError(f"{what} did not happen {instead()}".strip())


@pytest.mark.parametrize("name", ["a1111", "forge"])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_tab_builds_refuses_and_deletes(browser, name, theme, tmp_path):
    """Gradio 3.41.2 and 4.40.0: progress to ready, one sentence for a wrong size, the table."""
    if theme == "dark" and name == "forge":
        pytest.skip("one dark theme is enough")
    server = WebuiServer(name, require_host(name), tmp_path)
    write_models(server.base)
    server.start()
    try:
        server.draw("off")
        page = browser.new_page(viewport={"width": 1200, "height": 1000})
        page.goto(f"{server.url}/?__theme={theme}", timeout=60_000)
        page.click("button:has-text('Build TRT engine')", timeout=60_000)
        until(lambda: "SD1.x" in page.inner_text("#engine_room_headline"), "the headline")
        build(page, 64, 72)
        said = until(
            lambda: "ready" in page.inner_text("#engine_room_progress"), "an engine for 64x72"
        )
        assert said
        until(lambda: "64x72" in page.inner_text("#engine_room_engines"), "a row in the table")
        assert len(server.get("/engine-room/status")["engines"]) == 1
        build(page, 70, 72)
        until(
            lambda: (
                "nearest valid values are 64 and 72" in page.inner_text("#engine_room_progress")
            ),
            "an error in words",
        )
        compare_and_bake(page, server)
        page.reload()
        page.click("button:has-text('Build TRT engine')", timeout=60_000)
        until(lambda: "64x72" in page.inner_text("#engine_room_engines"), "the table after F5")
        for left in (1, 0):
            page.click("#engine_room_delete")
            count = f"{left} engines"
            until(lambda: len(server.get("/engine-room/status")["engines"]) == left, count)  # noqa: B023
            time.sleep(1)
    finally:
        server.stop()


def compare_and_bake(page, server):
    """The host's own drawing both ways; an engine with a LoRA that serves that LoRA alone."""
    page.click("text=Compare: the same picture")
    for name, value in (("c_width", 64), ("c_height", 72), ("c_steps", 3)):
        set_number(page, name, value)
    page.click("#engine_room_compare")
    said(page, "Engines served 3 of 3 UNet calls", "#engine_room_comparison")
    assert "times as fast" in page.inner_text("#engine_room_comparison")
    page.click("text=Export ONNX, and LoRAs to merge")
    # A LoRA of the picture before is not in what is exported without one.
    server.draw("never", prompt="a boat <lora:loha:0.8>", width=64, height=72)
    page.click("#engine_room_export")
    said(page, "Written to")
    (pair,) = server.base.glob("**/engine-room/onnx/model/unet.safetensors")
    exported = load_file(pair)
    checkpoint = load_file(next(server.base.glob("**/a.safetensors")))
    prefix = "model.diffusion_model."
    for name, tensor in exported.items():
        whole = checkpoint[name if name in checkpoint else prefix + name]
        assert distance(tensor.float(), whole.float()) <= 1e-3, name
    page.click("#engine_room_loras input")
    page.click("#engine_room_loras >> text=loha")
    page.keyboard.press("Escape")
    set_number(page, "strength", 0.8)
    page.click("text=baked: this one only")
    build(page, 64, 72)
    said(page, "Baked a.safetensors")
    said(page, "loha x 0.8", "#engine_room_engines")
    engines = server.get("/engine-room/status")["engines"]
    (baked,) = [engine for engine in engines if engine["key"]["weights"] == "baked"]
    job = {"width": 64, "height": 72, "steps": 30}
    reference, _ = server.draw("off", prompt="a boat <lora:loha:0.8>", **job)

    def drawn_by_the_baked_engine():
        engine, infotext = server.draw("never", prompt="a boat <lora:loha:0.8>", **job)
        assert distance(engine, reference) <= 1e-3
        assert "30 of 30 UNet calls" in infotext
        engines = server.get("/engine-room/status")["engines"]
        return any(e["loaded"] for e in engines if e["id"] == baked["id"])

    # An engine is opened beside the sampling loop, so that on a busy machine another draws first.
    until(drawn_by_the_baked_engine, "a picture by the baked engine")
    server.draw("never", prompt="a boat <lora:loha:0.4>", **job)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    whole = make_checkpoint(folder / "whole.safetensors", family="sd15", size="tiny")
    # Without text encoders: transformers does not run beside the hosts' old pins.
    tensors = {n: t for n, t in load_file(whole).items() if not n.startswith("cond_stage_model")}
    save_file(tensors, folder / "tiny.safetensors")
    (folder / "loras").mkdir()
    with Model(folder / "tiny.safetensors") as model:
        arch = model.architecture
    make_lora(folder / "loras" / "paint.safetensors", architecture=arch, kind="lora", seed=1)
    return folder


@pytest.fixture(params=list(PINS))
def page_of_our_own(request, models, tmp_path):
    """``python -m extension ui`` under a host's gradio, with no host."""
    python, port = gradio_environment(request.param), free_port()
    command = [python, ROOT / "extension", "ui", models / "tiny.safetensors", "--port", str(port)]
    command += ["--no-browser", "--loras", models / "loras", "--library", tmp_path / "library"]
    packages = tmp_path / "packages"
    link_packages(packages, python)
    env = {**os.environ, "GRADIO_ANALYTICS_ENABLED": "False", VARIABLE: str(packages)}
    log = (tmp_path / "log.txt").open("wb")
    process = subprocess.Popen(
        command,
        stdout=log,
        stderr=log,
        env=env,
        cwd=tmp_path,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell may ignore it
    )
    text = tmp_path / "log.txt"
    until(lambda: "Ctrl+C" in text.read_text() or process.poll() is not None, "a start")
    assert process.poll() is None, text.read_text()[-2000:]
    yield f"http://127.0.0.1:{port}", tmp_path / "library", text
    process.send_signal(signal.SIGINT)
    assert process.wait(30) in (0, 130), text.read_text()[-2000:]


def said(page, words, where="#engine_room_progress"):
    until(lambda: words in page.inner_text(where), f"'{words}'", lambda: page.inner_text(where))


def test_the_tab_without_a_host(browser, page_of_our_own, tmp_path):
    """Build a hires pair with progress, cancel, verify, compare, export, bake, delete; doctor."""
    url, library, log = page_of_our_own
    page = browser.new_page(viewport={"width": 1200, "height": 1400})
    page.goto(url, timeout=60_000)
    said(page, "SD1.x", "#engine_room_headline")
    set_number(page, "width", 64)
    set_number(page, "height", 96)
    set_number(page, "scale", 1.5)
    said(page, "96x144", "#engine_room_estimate")
    page.click("#engine_room_build")
    said(page, "64x96, batch 2, 77 tokens: ready")
    said(page, "96x144, batch 2, 77 tokens: ready")
    table = page.inner_text("#engine_room_engines")
    assert "64x96" in table
    assert "96x144" in table
    assert "any" in table
    assert len(list(library.glob("*.engine"))) == 2
    page.click("#engine_room_verify")
    said(page, "right; worst error")

    page.click("text=Compare: the same picture")
    for name, value in (("c_width", 64), ("c_height", 96), ("c_steps", 4)):
        set_number(page, name, value)
    page.click("#engine_room_compare")
    said(page, "Engines served 4 of 4 UNet calls", "#engine_room_comparison")
    assert "PSNR" in page.inner_text("#engine_room_comparison")
    until(lambda: page.locator("img[src*='file'], img[src^='data:']").count() >= 3, "3 pictures")
    page.click("#engine_room_refresh")
    said(page, "x host", "#engine_room_engines")

    page.click("text=Export ONNX, and LoRAs to merge")
    page.click("#engine_room_loras input")
    page.click("text=paint")
    page.fill("#engine_room_folder textarea, #engine_room_folder input", "my model")
    page.click("button#engine_room_export")
    said(page, "Written to")
    assert (library / "onnx" / "my model" / "unet.onnx").exists()
    set_number(page, "scale", 1)
    page.click("text=baked: this one only")
    time.sleep(1)
    page.click("#engine_room_build")
    said(page, "Baked tiny.safetensors, paint x 1")
    said(page, "tiny.safetensors, paint x 1", "#engine_room_engines")
    assert len(list(library.glob("*.cal.safetensors"))) == 1

    page.click("text=Doctor >> nth=0")
    page.click("#engine_room_doctor")
    report = page.locator("#engine_room_report textarea")
    until(lambda: "all good" in report.input_value(), "the doctor")
    assert "stand-alone page" in report.input_value()
    page.reload()
    said(page, "64x96", "#engine_room_engines")
    page.click("#engine_room_delete")
    said(page, "Deleted")
    assert len(list(library.glob("*.engine"))) == 2
    assert "Traceback" not in log.read_text()


def test_a_build_is_shown_after_f5_and_can_be_cancelled(browser, page_of_our_own):
    url, library, _ = page_of_our_own
    page = browser.new_page()
    page.goto(url, timeout=60_000)
    said(page, "SD1.x", "#engine_room_headline")
    set_number(page, "width", 640)
    set_number(page, "height", 512)
    page.click("#engine_room_build")
    said(page, "640x512, batch")
    other = browser.new_page()
    other.goto(url, timeout=60_000)
    said(other, "being loaded and verified")
    other.click("#engine_room_cancel")
    said(page, "cancelled")
    said(other, "No engine is being built any more")
    assert list(library.glob(".build-*")) == []


def set_number(page, name, value):
    page.fill(f"#engine_room_{name} input", str(value))
    page.keyboard.press("Tab")
    time.sleep(0.5)


def build(page, width, height):
    for side, value in (("width", width), ("height", height)):
        page.fill(f"#engine_room_{side} input", str(value))
        page.keyboard.press("Tab")
    time.sleep(1)
    page.click("#engine_room_build")


def test_comfyui_shows_engines_and_loads_the_examples(browser, tmp_path):
    server = ComfyServer(require_host("comfyui"), tmp_path)
    write_comfy_models(server.base)
    server.start()
    try:
        server.run(graph(server.base / "x.safetensors", policy=WAIT))
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.goto(server.url, timeout=60_000)
        page.wait_for_function("window.app?.graph && window.app.extensionManager", timeout=60_000)
        time.sleep(4)
        for path in sorted((ROOT / "example_workflows").glob("*.json")):
            count = page.evaluate(
                "async (text) => { const flow = JSON.parse(text); await app.loadGraphData(flow);"
                " return [flow.nodes.length, app.graph._nodes.filter("
                "n => n.comfyClass || n.type).length,"
                " app.graph._nodes.filter(n => n.has_errors).length]; }",
                path.read_text(),
            )
            assert count[0] == count[1], path.name
            assert count[2] == 0, path.name
        page.keyboard.press("Escape")
        page.click(".engine-room-tab-button")
        panel = until(lambda: page.query_selector("#engine-room-panel"), "the panel")
        until(lambda: "engines served 3 of 3 UNet calls" in panel.inner_text(), "the counts")
        assert "Engines (1)" in panel.inner_text()
        page.click("#engine-room-panel button:has-text('Delete')")
        until(lambda: "Engines (0)" in panel.inner_text(), "the deletion")
    finally:
        server.stop()
