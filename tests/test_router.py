"""Which engine serves a call, how, and the reason when none does."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace

import pytest

from extension.router import Call, Candidate, Counters, Host, Part, Plan, Reason, route
from extension.shapes import Shape

SHAPE = Shape(batch=2, height=64, width=64)
CALL = Call(architecture="a", shape=SHAPE, dtype="fp16", device="cuda:0", fingerprint="f1")


def engine(batch=2, tokens=77, *, weights="shared", control=False, **changes):
    shape = replace(SHAPE, batch=batch, tokens=tokens, control=control)
    stem = changes.pop("stem", f"{weights}-b{batch}-t{tokens}{'-c' if control else ''}")
    fields = {"architecture": "a", "shape": shape, "dtype": "fp16", "device": "cuda:0"}
    return Candidate(stem=stem, weights=weights, **{**fields, **changes})


def call(batch=2, tokens=77, *, control=False, **changes):
    shape = replace(SHAPE, batch=batch, tokens=tokens, control=control)
    return replace(CALL, **{"shape": shape, **changes})


def test_an_exact_engine_serves():
    plan = route(CALL, [engine()])
    part = Part(stem="shared-b2-t77", start=0, stop=2, padding=0, repeats=1)
    assert plan == Plan(parts=(part,), weights="shared")


@pytest.mark.parametrize(
    ("candidate", "reason", "words"),
    [
        (None, Reason.NO_ENGINE, "no engine"),
        (engine(architecture="b"), Reason.NO_ENGINE, "no engine"),
        (engine(shape=replace(SHAPE, width=96)), Reason.SIZE, "512x512; there are 768x512"),
        (engine(dtype="fp32"), Reason.PRECISION, "fp16; the engine in fp32"),
        (engine(device="cuda:1"), Reason.DEVICE, "cuda:0; the engine on cuda:1"),
        (engine(tokens=154), None, ""),
        (engine(weights="baked", fingerprint="f2"), Reason.WEIGHTS, "baked in"),
        (engine(weights="baked"), Reason.WEIGHTS, "baked in"),
        (engine(ready=False), Reason.NOT_READY, "not verified"),
    ],
)
def test_reasons(candidate, reason, words):
    answer = route(CALL, [candidate] if candidate else [])
    if reason is None:
        assert isinstance(answer, Plan)
    else:
        assert isinstance(answer, Host)
        assert answer.reason is reason
        assert words in answer.text


def test_features_are_never_ignored():
    answer = route(replace(CALL, features=("FreeU", "token merging")), [engine()])
    assert answer == Host(reason=Reason.FEATURE, text="active in the UNet: FreeU, token merging")


def test_control_needs_control_inputs_and_may_do_without():
    answer = route(call(control=True), [engine()])
    assert isinstance(answer, Host)
    assert answer.reason is Reason.CONTROL
    assert isinstance(route(call(control=True), [engine(control=True)]), Plan)
    # Without residuals the engine that has no control inputs is preferred; else zeros are fed.
    both = route(CALL, [engine(control=True), engine()])
    assert [(p.stem, p.zero_control) for p in both.parts] == [("shared-b2-t77", False)]
    only = route(CALL, [engine(control=True)])
    assert only.parts[0].zero_control


@pytest.mark.parametrize(
    ("needed", "available", "repeats"),
    [(77, (77,), 1), (77, (154,), 2), (77, (231, 154), 2), (154, (462,), 3), (154, (231,), None)],
)
def test_contexts_by_exact_repetition(needed, available, repeats):
    answer = route(call(tokens=needed), [engine(tokens=t) for t in available])
    if repeats is None:
        assert isinstance(answer, Host)
        assert answer.reason is Reason.TOKENS
        assert "154 context rows; engines take 231" in answer.text
    else:
        assert answer.parts[0].repeats == repeats


@pytest.mark.parametrize("rows", range(1, 10))
@pytest.mark.parametrize("batches", [(1,), (2,), (4,), (1, 2), (2, 4), (3,), (1, 4, 8)])
def test_every_batch_is_covered_once_in_order(rows, batches):
    plan = route(call(batch=rows), [engine(batch=b) for b in batches])
    assert [part.start for part in plan.parts] == [0, *[p.stop for p in plan.parts[:-1]]]
    assert plan.parts[-1].stop == rows
    for part in plan.parts:
        size = int(part.stem.split("-")[1][1:])
        assert part.stop - part.start + part.padding == size
        assert part.stop > part.start
    assert all(part.padding == 0 for part in plan.parts[:-1])


def test_the_cover_is_the_cheapest():
    """Against every combination of up to four engine calls."""
    engines = [engine(batch=1), engine(batch=3), engine(batch=4)]
    for rows in range(1, 10):
        plan = route(call(batch=rows), engines)
        sizes = [int(part.stem.split("-")[1][1:]) for part in plan.parts]
        costs = [
            sum(size + 0.25 for size in combination)
            for count in range(1, 5)
            for combination in itertools.product((1, 3, 4), repeat=count)
            if sum(combination) >= rows
        ]
        assert sum(size + 0.25 for size in sizes) == min(costs)


def test_a_baked_engine_of_these_weights_comes_first_and_is_never_mixed():
    baked = engine(batch=2, weights="baked", fingerprint="f1")
    assert route(CALL, [engine(), baked]).weights == "baked"
    unknown = replace(CALL, fingerprint=None)
    assert route(unknown, [engine(), baked]).weights == "shared"
    mixed = route(call(batch=3), [engine(batch=1), baked])
    assert len({part.stem.split("-")[0] for part in mixed.parts}) == 1


def test_the_choice_does_not_depend_on_the_order_of_candidates():
    engines = [engine(batch=b, tokens=t) for b in (1, 2, 4) for t in (77, 154)]
    first = route(call(batch=5), engines)
    assert all(
        route(call(batch=5), order) == first
        for order in itertools.permutations(engines[:4] + engines[4:])
        if order[0] is engines[-1]
    )


def test_counters_tell_what_happened():
    counters = Counters()
    for _ in range(38):
        counters.count(route(CALL, [engine()]))
    for _ in range(2):
        counters.count(route(replace(CALL, features=("ControlNet tile patch",)), [engine()]))
    assert counters.totals == (38, 2)
    assert counters.sentence == (
        "engine served 38 of 40 calls; 2 to the host: active in the UNet: ControlNet tile patch"
    )
    assert counters.to_json()["engines"] == {"shared-b2-t77": 38}
    counters.reset()
    assert counters.totals == (0, 0)


def test_counters_lose_nothing_across_threads():
    counters = Counters()
    plan = route(CALL, [engine()])
    threads = [
        threading.Thread(target=lambda: [counters.count(plan) for _ in range(500)])
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.totals == (4000, 0)


def test_every_reason_has_a_stable_code():
    assert len({reason.value for reason in Reason}) == len(Reason)
