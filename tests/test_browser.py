"""The user interfaces in a real browser, in the real hosts; skipped where one is absent."""

from __future__ import annotations

import shutil
import time

import pytest

from tests.support_comfyui import ComfyServer
from tests.support_comfyui import write_models as write_comfy_models
from tests.support_hosts import ROOT, require_host
from tests.support_webui import WebuiServer, write_models
from tests.test_comfyui import WAIT, graph

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PATIENCE = 60.0


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def until(condition, what):
    """The first true value of ``condition``."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError(f"{what} did not happen")


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
        page.reload()
        page.click("button:has-text('Build TRT engine')", timeout=60_000)
        until(lambda: "64x72" in page.inner_text("#engine_room_engines"), "the table after F5")
        page.click("#engine_room_delete")
        until(lambda: "Deleted" in page.inner_text("#engine_room_progress"), "the deletion")
        assert server.get("/engine-room/status")["engines"] == []
    finally:
        server.stop()


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
