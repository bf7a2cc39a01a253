"""The order in which engines are made ready, and what is forgotten."""

from __future__ import annotations

import threading

import pytest

from extension import wishes
from extension.wishes import Wishes


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(wishes.time, "monotonic", lambda: now[0])
    return now


def drained(queue):
    found = []
    while (wish := queue.take()) is not None:
        found.append(wish.stem)
        queue.done()
    return found


def test_what_a_person_asked_for_then_what_most_calls_missed():
    queue = Wishes()
    for stem, calls in (("rare", 1), ("often", 5), ("first", 2), ("second", 2)):
        for _ in range(calls):
            queue.miss(stem)
        queue.add(stem, stem, asked=False)
    for stem in ("asked", "asked later"):
        queue.add(stem, stem, asked=True)
    for _ in range(9):
        queue.miss("asked later")
    order = ["asked", "asked later", "often", "first", "second", "rare"]
    assert queue.stems == order
    assert drained(queue) == order
    assert queue.stems == []


def test_what_is_being_made_stays_first_and_is_not_wanted_twice():
    queue = Wishes()
    queue.add("a", "job", asked=False)
    assert queue.take().job == "job"
    queue.add("a", "another job", asked=True)
    queue.add("b", "b", asked=True)
    assert queue.stems == ["a", "b"]
    assert "a" in queue
    queue.done()
    assert queue.stems == ["b"]


def test_a_person_may_ask_for_what_calls_have_missed():
    queue = Wishes()
    for stem in ("a", "b"):
        queue.add(stem, stem, asked=False)
    queue.add("b", "b", asked=True)
    queue.add("b", "b", asked=False)
    assert drained(queue) == ["b", "a"]


@pytest.mark.parametrize(
    ("asked", "again", "kept"), [(False, False, []), (True, False, ["a"]), (False, True, ["a"])]
)
def test_what_no_call_has_missed_for_an_hour_is_forgotten(clock, asked, again, kept):
    queue = Wishes()
    queue.miss("a")
    queue.add("a", "a", asked=asked)
    queue.add("never missed", "its weights are baked in", asked=False)
    clock[0] = 3000.0
    if again:
        queue.miss("a")
    clock[0] = 3700.0
    assert drained(queue) == kept
    assert queue.miss("a") == (1 if not kept else 2 + again)


def test_cancel_ends_what_is_being_made_and_drops_the_rest():
    queue = Wishes()
    for stem in ("a", "b", "c"):
        queue.add(stem, stem, asked=True)
    taken = queue.take()
    assert queue.cancel() == ["b", "c"]
    assert taken.cancel.cancelled
    assert queue.stems == ["a"]
    assert queue.wait(0.01) is False
    threading.Timer(0.05, queue.done).start()
    assert queue.wait(10) is True
