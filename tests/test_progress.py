"""Progress: one fraction that never falls, whatever the builder does."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extension.build_history import DEFAULTS, FILE_NAME, BuildHistory
from extension.errors import CancelledError
from extension.progress import ALMOST, CancelToken, Phase, Timeline

PHASES = [
    Phase(name="graph", seconds=1.0),
    Phase(name="compiling", seconds=20.0),
    Phase(name="writing", seconds=1.0),
]


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_a_job_that_takes_as_long_as_expected():
    clock = Clock()
    timeline = Timeline(PHASES, clock)
    assert timeline.now().fraction == 0
    assert timeline.now().remaining == pytest.approx(22)
    clock.now += 1
    timeline.enter("compiling")
    clock.now += 10
    halfway = timeline.now()
    assert halfway.fraction == pytest.approx(11 / 22)
    assert halfway.remaining == pytest.approx(11)
    assert (halfway.phase, halfway.elapsed) == ("compiling", pytest.approx(11))
    clock.now += 10
    timeline.enter("writing", "22 MB")
    assert timeline.now().detail == "22 MB"
    done = timeline.done()
    assert (done.fraction, done.remaining) == (1.0, 0.0)
    assert timeline.now().fraction == 1.0


def test_an_overrun_keeps_moving_and_never_claims_the_end():
    clock = Clock()
    timeline = Timeline(PHASES, clock)
    timeline.enter("compiling")
    shown = []
    for _ in range(12):
        clock.now += 5
        shown.append(timeline.now())
    fractions = [moment.fraction for moment in shown]
    assert all(b > a for a, b in itertools.pairwise(fractions))
    assert fractions[-1] < 21 / 22
    assert all(moment.remaining > 0 for moment in shown)


@given(
    st.lists(
        st.one_of(
            st.floats(0, 100), st.sampled_from(["graph", "compiling", "writing", "tactic 3 of 9"])
        ),
        max_size=40,
    )
)
def test_the_fraction_never_falls_and_ends_only_with_the_job(steps):
    clock = Clock()
    timeline = Timeline(PHASES, clock)
    last = 0.0
    for step in steps:
        if isinstance(step, str):
            timeline.enter(step)
        else:
            clock.now += step
        moment = timeline.now()
        assert last <= moment.fraction <= ALMOST
        assert moment.remaining >= 0
        assert moment.elapsed >= 0
        last = moment.fraction
    assert timeline.done().fraction == 1


def test_unknown_phases_change_the_words_only():
    timeline = Timeline(PHASES, Clock())
    timeline.enter("Building Engine")
    moment = timeline.now()
    assert (moment.phase, moment.detail, moment.fraction) == ("graph", "Building Engine", 0)


def test_going_back_to_an_earlier_phase_loses_nothing():
    clock = Clock()
    timeline = Timeline(PHASES, clock)
    timeline.enter("writing")
    before = timeline.now().fraction
    timeline.enter("graph")
    assert timeline.now().fraction == before
    assert timeline.now().phase == "writing"


def test_phases_without_any_time():
    timeline = Timeline([Phase(name="a", seconds=0), Phase(name="b", seconds=0)], Clock())
    assert timeline.now().fraction == 0
    timeline.enter("b")
    assert timeline.now().remaining == 0


def test_cancel():
    token = CancelToken()
    token.raise_if_cancelled()
    token.cancel()
    with pytest.raises(CancelledError):
        token.raise_if_cancelled()


def test_history_learns_this_machines_times(tmp_path):
    history = BuildHistory(tmp_path)
    facts = ("tensorrt_rtx", "shared", 686, 1)
    default = history.expect(*facts)
    constant, each = DEFAULTS["tensorrt_rtx", "shared"]
    assert default == pytest.approx(constant + each * 686 * 3)
    for seconds in (10.0, 30.0, 31.0, 32.0, 33.0, 300.0):
        history.record(*facts, seconds)
    assert history.expect(*facts) == 32.0  # the median of the last five
    assert BuildHistory(tmp_path).expect(*facts) == 32.0
    assert history.expect("tensorrt_rtx", "baked", 686, 1) != 32.0


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b'{"seconds": 3}', b'{"seconds": {"a": [null, -1, "x"]}}']
)
def test_a_damaged_history_is_no_history(tmp_path, data):
    history = BuildHistory(tmp_path)
    (tmp_path / FILE_NAME).write_bytes(data)
    assert history.expect("onnxruntime", "shared", 10, 1) > 0
    history.record("onnxruntime", "shared", 10, 1, 4.0)
    assert history.expect("onnxruntime", "shared", 10, 1) == 4.0


def test_a_history_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    BuildHistory(tmp_path / "file").record("onnxruntime", "shared", 10, 1, 4.0)
