"""What the tab says, without a browser or gradio: words, numbers, and nothing unescaped."""

from __future__ import annotations

import html.parser

import pytest

from extension.errors import SettingError
from extension.progress import Progress
from extension.room import Room
from extension.serving import Target
from extension.shapes import Shape
from extension.tiers import Job
from extension.ui import facts
from tests.support_models import SMALL

ARCH = SMALL["two-levels"]


class Host:
    """A host with one model on the CPU."""

    has_control = True

    def __init__(self, folder, loaded=True):
        self._room, self.loaded = Room(folder), loaded

    def room(self):
        return self._room

    def device(self):
        return "cpu"

    def checkpoint(self):
        return "model <b>.safetensors" if self.loaded else ""

    def job(self, shape):
        if not self.loaded:
            raise SettingError("No checkpoint is loaded yet.", hint="Draw one picture first.")
        return Job(arch=ARCH, shape=shape, target=Target(device="cpu", dtype="fp32"))


@pytest.fixture
def host(tmp_path):
    return Host(tmp_path)


def test_the_headline(host, tmp_path):
    text = facts.headline(host)
    for words in ("SD1.x", "fp32", "CPU", "onnxruntime", "none yet"):
        assert words in text
    assert "No checkpoint is loaded yet" in facts.headline(Host(tmp_path, loaded=False))


def test_the_estimate_before_and_after_a_build(host):
    shape = Shape(batch=1, height=8, width=8)
    assert "64x64" in facts.estimate(host, shape)
    assert " s to build" in facts.estimate(host, shape)
    host.room().tiers.provide(host.job(shape))
    assert "there already" in facts.estimate(host, shape)
    table = facts.engines_html(host)
    assert "ready" in table
    assert "64x64" in table


def test_no_engines_is_said(host):
    assert "No engines yet" in facts.engines_html(host)


class Tags(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        self.found.append(tag)


def test_names_from_files_cannot_become_markup(host):
    row = {
        "label": "<script>alert(1)</script>",
        "text": "<img src=x onerror=alert(1)>",
        "bytes": 1,
        "build_seconds": None,
        "loaded": False,
        "id": "0" * 16,
    }
    tags = Tags()
    tags.feed(facts._cells(row) + facts.progress_html(None, "<script>x</script>"))
    assert set(tags.found) == {"td", "p"}


def test_progress_reads_well():
    progress = Progress(fraction=0.5, phase="compiling", elapsed=4.0, remaining=4.2)
    shown = facts.progress_html(progress, "SD1.x, 512x512")
    for words in ("aria-valuenow='50'", "compiling", "50 %", "4 s so far", "about 4 s left"):
        assert words in shown


def test_the_controls_become_a_shape():
    shape = facts.shape_of(768, 512, 2, True, 2, False)
    assert shape == Shape(batch=4, height=64, width=96, tokens=154)
    assert facts.shape_of(512.0, 512.0, 1, False, 1, True).batch == 1
    for bad in ((500, 512, 1, True, 1, False), (512, None, 1, True, 1, False),
                (512, 512, 0, True, 1, False), (512, 512, 1.5, True, 1, False)):  # fmt: skip
        with pytest.raises(SettingError):
            facts.shape_of(*bad)
