"""What the tab says, without a browser or gradio: words, numbers, and nothing unescaped."""

from __future__ import annotations

import html.parser

import pytest
from PIL import Image

from extension.errors import LibraryError, SettingError
from extension.library import Library
from extension.progress import Progress
from extension.room import Room
from extension.serving import Target
from extension.shapes import Shape
from extension.speed import Speed, record, recorded
from extension.ui import facts
from extension.ui.comparison import compare
from extension.ui.drawing import DrawJob, Drawn, lora_tags
from extension.wanted import Job
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


def choice(**fields):
    usual = {"width": 64, "height": 64, "scale": 1, "pictures": 1, "chunks": 1}
    return facts.BuildChoice(**{**usual, "guidance": False, "control": False, **fields})


def test_the_estimate_before_and_after_a_build(host):
    text = facts.estimate(host, choice(scale=1.5), baked=False)
    for words in ("64x64", "96x96", " s to build", "MB on disk", "MB of memory on the GPU"):
        assert words in text
    assert "MB of memory on the GPU" in facts.estimate(host, choice(), baked=True)
    host.room().tiers.provide(host.job(Shape(batch=1, height=8, width=8)))
    assert "there already" in facts.estimate(host, choice(), baked=False)
    assert "there already" not in facts.estimate(host, choice(), baked=True)
    table = facts.engines_html(host)
    for words in ("ready", "64x64", "any", "77 tokens", "just now"):
        assert words in table
    stem = facts.engine_rows(host)[0]["id"]
    record(host.room().library, stem, "cpu", Speed(host_ms=30.0, engine_ms=10.0))
    assert "3.00 x host" in facts.engines_html(host)
    assert "right; worst error" in facts.verify(host, stem)


def test_verifying_names_what_is_wrong(host):
    host.room().tiers.provide(host.job(Shape(batch=1, height=8, width=8)))
    stem = facts.engine_rows(host)[0]["id"]
    path = host.room().library.engine_path(stem)
    path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(LibraryError, match="damaged"):
        facts.verify(host, stem)


def test_a_speed_belongs_to_one_gpu(tmp_path):
    library, stem = Library(tmp_path), "ab" * 8
    record(library, stem, "cpu", Speed(host_ms=30.0, engine_ms=10.0))
    record(library, stem, "cpu", Speed(host_ms=40.0, engine_ms=10.0))
    state = library.read_state(stem)
    assert recorded(state, "CPU").ratio == 4.0
    assert len(state["speed"]) == 1
    assert recorded(state, "NVIDIA GeForce RTX 4090") is None
    for damaged in (None, 3, [3], [{"gpu": "CPU", "host_ms": "x", "engine_ms": 1}], [{}]):
        assert recorded({"speed": damaged}, "CPU") is None


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
        "key": None,
        "speed": None,
        "last_used": "<b>",
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


def test_the_controls_become_shapes():
    wide = choice(width=768, height=512, pictures=2, chunks=2, guidance=True).shapes()
    assert wide == [Shape(batch=4, height=64, width=96, tokens=154)]
    pair = choice(width=512.0, height=768.0, scale=1.5, control=True).shapes()
    assert [shape.pixels for shape in pair] == [(512, 768), (768, 1152)]
    assert pair[0].control
    odd = choice(width=520, height=520, scale=1.3).shapes()
    assert odd[1].pixels == (672, 672)
    bad = (
        {"width": 500},
        {"height": None},
        {"pictures": 0},
        {"pictures": 1.5},
        {"scale": 0.5},
        {"scale": None},
        {"scale": 100},
    )
    for fields in bad:
        with pytest.raises(SettingError):
            choice(**fields).shapes()


def test_every_preset_is_a_size_that_engines_take():
    for width, height, scale in facts.PRESETS.values():
        shapes = choice(width=width, height=height, scale=scale).shapes()
        assert len(shapes) == (1 if scale == 1 else 2)


def test_lora_tags():
    assert lora_tags(["a", "b c"], 0.8) == " <lora:a:0.8> <lora:b c:0.8>"
    assert lora_tags([], 1.0) == ""
    with pytest.raises(SettingError, match="a:b"):
        lora_tags(["a:b"], 1.0)


@pytest.mark.parametrize(
    ("when", "words"),
    [(None, "never"), ("nonsense", "never"), (0, "days ago"), (99e9, "just now")],
)
def test_times_read_well(when, words):
    assert words in facts.ago(when)


class Drawing(Host):
    """A host whose engines draw ``shift`` brighter, in a third of the time."""

    def __init__(self, folder, shift=0, served=4, by_host=0):
        super().__init__(folder)
        self.shift, self.calls, self.jobs = shift, (served, by_host), []

    def draw(self, job, *, engines):
        self.jobs.append((job.steps, engines))
        value = 100 + (self.shift if engines else 0)
        served, by_host = self.calls if engines else (0, 4)
        return Drawn(
            image=Image.new("RGB", (job.width, job.height), (value, value, value)),
            seconds=1.0 if engines else 3.0,
            served=served,
            host=by_host,
            engines={"ab" * 8: served} if served else {},
        )


def compared(host):
    *words, result = compare(host, DrawJob(prompt="x", width=64, height=64, steps=4))
    assert all(isinstance(text, str) for text in words)
    return result


def test_a_comparison_warms_up_and_keeps_the_speed(tmp_path):
    host = Drawing(tmp_path, shift=2)
    result = compared(host)
    assert host.jobs == [(2, False), (4, False), (2, True), (4, True)]
    assert "3.00 times as fast" in result.report
    assert result.difference.getpixel((0, 0)) == (20, 20, 20)
    assert recorded(host.room().library.read_state("ab" * 8), "CPU").ratio == 3.0


def test_a_comparison_without_engines_keeps_nothing(tmp_path):
    host = Drawing(tmp_path, served=0, by_host=4)
    assert "No call went through an engine" in compared(host).report
    half = Drawing(tmp_path, served=2, by_host=2)
    assert "2 of 4" in compared(half).report
    assert half.room().library.read_state("ab" * 8) == {}


@pytest.mark.parametrize("fields", [{"width": 63}, {"steps": 0}, {"steps": 9999}, {"height": 0}])
def test_jobs_that_cannot_be_drawn(fields):
    with pytest.raises(SettingError):
        DrawJob(prompt="x", **fields)
