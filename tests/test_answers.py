"""What the tab answers to its events."""

from __future__ import annotations

import contextlib
import threading

import pytest

from extension.errors import SettingError
from extension.shapes import Shape
from extension.ui import facts
from extension.ui.answers import BAKED, SHARED, Answers
from extension.ui.facts import LiveModel
from tests.support_models import random_weights
from tests.test_ui import ARCH, Host

CONTROLS = (64, 64, 1, 1, 1, False, False)


class Merging(Host):
    """A host that says which LoRAs it was to merge, and may be held while it does."""

    def __init__(self, folder):
        super().__init__(folder)
        self.folder, self.asked = folder, []
        self.weights = random_weights(ARCH)
        self.go = threading.Event()
        self.go.set()

    @contextlib.contextmanager
    def merged(self, loras, strength):
        self.asked.append((list(loras), strength))
        self.go.wait(60)
        yield LiveModel(
            arch=ARCH,
            weights=self.weights,
            folder=self.folder / "onnx",
            source={},
            model={"prediction": "v"},
        )


@pytest.fixture
def host(tmp_path):
    return Merging(tmp_path)


@pytest.fixture
def answers(host):
    return Answers(host, lambda **changes: changes)


def two_engines(host):
    tiers = host.room().tiers
    for batch in (1, 2):
        assert tiers.provide(host.job(Shape(batch=batch, height=8, width=8)))
    return [row["id"] for row in facts.engine_rows(host)]


def test_what_was_chosen_stays_chosen(host, answers):
    """Verify and Delete must never hit another engine than the one that a person chose."""
    newest, other = two_engines(host)
    assert answers.refresh()[2] == {"choices": [newest, other], "value": newest}
    assert answers.refresh(other)[2]["value"] == other
    assert answers.verify(other)[-1]["value"] == other
    for shown in answers.run_build(other, SHARED, None, 1.0, 72, *CONTROLS[1:]):
        assert "value" not in shown[3], "a build beside it changes nothing"
    assert f"Deleted {other}" in answers.delete(other)[0]
    left = [row["id"] for row in facts.engine_rows(host)]
    assert newest in left
    assert other not in left


def test_the_first_engine_is_chosen_when_it_is_there(host, answers):
    *beside, last = answers.run_build(None, SHARED, None, 1.0, *CONTROLS)
    assert all("value" not in shown[3] for shown in beside)
    assert last[3]["value"] == facts.engine_rows(host)[0]["id"]


@pytest.mark.parametrize("loras", [[], None, ["paint"]])
def test_an_export_holds_the_chosen_loras_and_no_others(host, answers, loras):
    said = [text for text, _ in answers.run_export("model", loras, 0.5)]
    assert "Written to" in said[-1]
    assert host.asked == [(loras or [], 0.5)]


def test_a_baked_pair_of_sizes_reads_the_weights_once(host, answers):
    """A picture between two readings could have changed them."""
    shown = list(answers.run_build(None, BAKED, ["paint"], 0.5, 64, 64, 1.5, *CONTROLS[3:]))
    assert shown[-1][0].count("64x64") == 1
    assert host.asked == [(["paint"], 0.5)]
    entries = host.room().library.entries()
    assert {entry.key.weights for entry in entries} == {"baked"}
    assert len({entry.key.fingerprint for entry in entries}) == 1
    assert len(entries) == 2
    assert {entry.manifest.model["prediction"] for entry in entries} == {"v"}
    assert "paint x 0.5" in entries[0].manifest.label


def test_cancel_says_what_it_did(host, answers):
    assert "Nothing is being built" in answers.cancel()
    host.go.clear()
    running = answers.run_export("model", None, 1.0)
    next(running)
    second = list(answers.run_export("second", None, 1.0))
    assert "at a time" in second[-1][0]
    assert "Cancelled" in answers.cancel()
    host.go.set()
    assert "Cancelled" in list(running)[-1][0]
    assert not [path for path in (host.folder / "onnx").rglob("*") if path.is_file()]
    assert "Nothing is being built" in answers.cancel()


def test_a_host_that_cannot_merge_says_so(host, answers, monkeypatch):
    def refuse(loras, strength):
        raise SettingError("The host drew no picture.")

    monkeypatch.setattr(host, "merged", refuse)
    assert "drew no picture" in list(answers.run_export("model", None, 1.0))[-1][0]
