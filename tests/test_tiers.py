"""The manager of tiers: missing engines are found, built, verified; failures stay failures."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from extension import pace
from extension.building import WORK_PREFIX, shortage
from extension.contest import HOST, kind_of
from extension.engine.scratch import Scratch
from extension.engine_state import State
from extension.errors import (
    BuildError,
    CancelledError,
    EngineError,
    MemoryShortError,
    OutputError,
    ParityError,
    SettingError,
    WorkerError,
)
from extension.failure_record import FILE_NAME
from extension.library import Library
from extension.memory import hwc8_bytes, require_free
from extension.ops_torch import TorchUNet
from extension.pool import EnginePool
from extension.progress import CancelToken
from extension.routed import RoutedUNet
from extension.router import Call, Candidate
from extension.serving import Target
from extension.shapes import Shape
from extension.tier_settings import TierSettings
from extension.tiers import TierManager
from extension.wanted import Job
from tests.support_models import SMALL, random_inputs, random_weights, relative_l2
from tests.test_pace import Mark

ROOT = Path(__file__).parent.parent
ARCH = SMALL["two-levels"]
SHAPE = Shape(batch=2, height=8, width=8)
JOB = Job(arch=ARCH, shape=SHAPE, target=Target(device="cpu", dtype="fp32"))


def call(shape=SHAPE, **fields):
    fields = {"dtype": "fp32", "device": "cpu", **fields}
    return Call(architecture=ARCH.for_shape(shape).id, shape=shape, **fields)


@pytest.fixture
def manager(tmp_path):
    events = []
    manager = TierManager(Library(tmp_path), EnginePool(), on_event=events.append)
    manager.events = events
    yield manager
    manager.cancel()
    manager.wait(30)
    manager.pool.close()


def kinds(manager):
    found = []
    for event in manager.events:
        if not found or found[-1] != event.kind:
            found.append(event.kind)
    return found


def test_a_build_after_enough_calls_then_ready(manager):
    for _ in range(manager.settings.after_calls - 1):
        assert manager.miss(ARCH, call()) is False
        assert manager.wanted == []
    assert manager.miss(ARCH, call()) is False
    assert manager.wait(60)
    assert [candidate.ready for candidate in manager.pool.candidates()] == [True]
    assert kinds(manager) == ["building", "loading", "ready"]
    stem = manager.key(JOB).stem
    assert manager.library.entry(stem, JOB.target.machine).state is State.READY
    manager.events.clear()
    assert manager.miss(ARCH, call()) is False
    assert manager.wait(5)
    assert manager.events == []


def test_what_is_on_disk_is_loaded_at_the_first_call(manager):
    manager.provide(JOB)
    manager.pool.close()
    manager.miss(ARCH, call(), policy="never")
    assert manager.wait(60)
    assert len(manager.pool.candidates()) == 1


def test_waiting_gives_an_engine_for_the_very_call(manager):
    assert manager.miss(ARCH, call(), policy="wait") is True
    assert len(manager.pool.candidates()) == 1


def test_never_means_never(manager):
    for _ in range(10):
        assert manager.miss(ARCH, call(), policy="never") is False
    assert manager.wanted == []
    assert manager.events == []


def test_a_failure_is_told_once_and_not_repeated(manager, monkeypatch):
    tries = []

    def fail(*args, **kwargs):
        tries.append(1)
        raise BuildError("The compiler refuses.")

    monkeypatch.setattr("extension.tiers.build_engine", fail)
    for _ in range(5):
        assert manager.miss(ARCH, call(), policy="wait") is False
    assert len(tries) == 1
    assert kinds(manager) == ["failed"]
    assert manager.failed == {manager.key(JOB).stem: "The compiler refuses."}


@pytest.mark.parametrize(
    ("error", "changes", "tried"),
    [
        (BuildError("The compiler refuses."), {}, False),
        (EngineError("The backend refuses it."), {}, False),
        (ParityError("It computes something else."), {}, False),
        (WorkerError("The worker was killed."), {}, True),
        (OutputError("The disk is full."), {}, True),
        (BuildError("The compiler refuses."), {"driver": "600.1"}, True),
        (BuildError("The compiler refuses."), {"gpu": "another"}, True),
    ],
)
def test_a_later_start_does_not_repeat_what_fails_again(
    tmp_path, monkeypatch, error, changes, tried
):
    tries = []

    def fail(*args, **kwargs):
        tries.append(1)
        raise error

    monkeypatch.setattr("extension.tiers.build_engine", fail)
    TierManager(Library(tmp_path), EnginePool()).miss(ARCH, call(), policy="wait")
    later = TierManager(Library(tmp_path), EnginePool())
    record, recall = later._record, later._record.recall
    record.recall = lambda stem, machine: recall(stem, replace(machine, **changes))
    for _ in range(3):
        assert later.miss(ARCH, call(), policy="wait") is False
        later.retry()
    assert (len(tries) > 1) == tried
    assert error.message in next(iter(later.failed.values()), error.message)
    assert later.provide(JOB) is False  # a person asks: it is tried
    assert len(tries) == (5 if tried else 2)
    monkeypatch.undo()
    assert later.provide(JOB)
    assert TierManager(Library(tmp_path), EnginePool()).miss(ARCH, call(), policy="wait")


@pytest.mark.parametrize("content", [b"", b"[]", b'{"failures": 3}', b'{"failures": {"S": 1}}'])
def test_a_damaged_record_of_failures_is_ignored(manager, content):
    stem = manager.key(JOB).stem
    (manager.library.folder / FILE_NAME).write_bytes(content.replace(b"S", stem.encode()))
    assert manager.miss(ARCH, call(), policy="wait") is True
    assert manager.library.entries()[0].stem == stem


@pytest.mark.parametrize(("short", "wanted"), [("the disk is nearly full", 0), ("", 1)])
def test_nothing_is_built_by_itself_below_the_floors(manager, monkeypatch, short, wanted):
    monkeypatch.setattr("extension.tiers.shortage", lambda folder: short)
    monkeypatch.setattr(manager, "provide", lambda *args, **options: time.sleep(0.2))
    for _ in range(3):
        manager.miss(ARCH, call())
    assert len(manager.wanted) == wanted
    assert short in manager.short
    manager.want(JOB)  # a person asks
    assert len(manager.wanted) == 1


def test_a_shortage_is_named(tmp_path, monkeypatch):
    folder = tmp_path / "not" / "made yet"
    assert shortage(folder) == ""
    monkeypatch.setattr("extension.building.free_ram", lambda: 10**9)
    assert shortage(folder) == "only 1.0 GB of memory are free"
    monkeypatch.setattr(
        "extension.files.shutil.disk_usage", lambda path: SimpleNamespace(free=5 * 10**8)
    )
    assert shortage(folder) == f"'{folder}' has only 0.50 GB free"
    assert not folder.exists()


def test_an_engine_that_computes_something_else_is_not_offered(manager, monkeypatch):
    """Whatever is on disk under the right name: it is compared before it serves."""
    wrong = replace(ARCH, num_heads=4)
    from extension.building import build_engine

    def build_wrong(library, request, **options):
        other = replace(request, architecture=wrong, key=replace(
            request.key, architecture=wrong.for_shape(SHAPE).id))  # fmt: skip
        return build_engine(library, other, **options)

    monkeypatch.setattr("extension.tiers.build_engine", build_wrong)
    assert manager.miss(ARCH, call(), policy="wait") is False
    assert manager.pool.candidates() == []
    assert "computes something else" in next(iter(manager.failed.values()))


def test_a_host_precision_that_no_engine_has(manager):
    assert manager.miss(ARCH, call(dtype="torch.float64"), policy="wait") is False
    assert "float64" in manager.unable


def test_cancel_ends_the_build_and_does_not_start_it_again(manager, monkeypatch):
    started = threading.Event()

    def slow(library, request, *, on_progress, cancel):
        started.set()
        while True:
            cancel.raise_if_cancelled()
            time.sleep(0.01)

    monkeypatch.setattr("extension.tiers.build_engine", slow)
    manager.want(JOB)
    manager.want(replace(JOB, shape=replace(SHAPE, batch=1)))
    assert started.wait(10)
    manager.cancel()
    assert manager.wait(5)
    assert len(manager.failed) == 2
    for _ in range(5):
        manager.miss(ARCH, call())
    assert manager.wanted == []


def test_the_host_is_timed_before_engines_are_made(manager, monkeypatch):
    """And not beside a build, which slows it."""
    monkeypatch.setattr(pace, "TIMED", ("cpu",))
    now = [0]
    monkeypatch.setattr(pace, "mark", lambda device: Mark(now[0]))
    noted, kind, device = manager.pool.pace, kind_of(call()), torch.device("cpu")
    for _ in range(pace.LEAST + 1):
        manager.miss(ARCH, call())
        assert manager.wanted == []
        noted.step(kind, HOST, device)
        now[0] += 30
    manager.miss(ARCH, call())
    assert len(manager.wanted) == 1
    while manager.wanted:
        now[0] += 1000
        noted.step(kind, HOST, device)
        time.sleep(0.01)
    assert noted.milliseconds(kind, HOST) == 30
    assert not noted.is_disturbed
    assert manager.pool.holds(manager.key(JOB).stem)


def test_cancelling_a_build_that_is_waited_for(manager, monkeypatch):
    token = CancelToken()
    token.cancel()
    with pytest.raises(CancelledError):
        manager.miss(ARCH, call(), policy="wait", cancel=token)


@pytest.mark.parametrize("behind", ["another build", "another program"])
def test_cancelling_what_waits_behind_another(manager, behind):
    asked = threading.Event()
    token = CancelToken(asked.is_set)
    stem = manager.key(JOB).stem
    other = manager._turn(None) if behind == "another build" else manager.library.lock(stem)
    timer = threading.Timer(0.3, asked.set)
    with other:
        timer.start()
        with pytest.raises(CancelledError):
            manager.provide(JOB, cancel=token)
    assert manager.provide(JOB)


def test_a_request_to_stop_is_kept():
    """A host clears its own as soon as something has noticed it."""
    asked = [True]
    token = CancelToken(lambda: asked[0])
    assert token.cancelled
    asked[0] = False
    assert token.cancelled
    with pytest.raises(CancelledError):
        token.raise_if_cancelled()
    assert not CancelToken().cancelled


def test_why_there_is_no_engine_yet(manager, monkeypatch):
    assert manager.explain(ARCH, call()) == ""
    stem = manager.key(JOB).stem
    manager.failed[stem] = "The compiler crashed."
    assert manager.explain(ARCH, call()) == "The compiler crashed."
    assert manager.explain(ARCH, call(modes=("baked",))) == ""
    manager.retry()
    with manager._turn(None):
        manager.want(JOB)
        assert manager.explain(ARCH, call()) == "it is being made ready"
        manager.cancel()
    assert manager.wait(10)
    manager.retry()
    monkeypatch.setattr("extension.tiers.shortage", lambda folder: "the disk is full")
    for _ in range(3):
        manager.miss(ARCH, call())
    assert "the disk is full" in manager.explain(ARCH, call())
    assert "float64" in manager.explain(ARCH, call(dtype="torch.float64"))


def test_settings_that_cannot_be():
    for fields in ({"policy": "sometimes"}, {"after_calls": 0}, {"after_calls": 10**6}):
        with pytest.raises(SettingError):
            TierSettings(**fields)


def test_copies_of_weights_only_where_memory_allows(manager, monkeypatch):
    """The key says which layout; without room the engine reads the weights as they are."""
    monkeypatch.setattr(Target, "key", lambda self, arch, shape: HWC8)
    need = hwc8_bytes(ARCH)
    for free, expected in ((need * 2, "hwc8"), (need, "linear"), (0, "linear")):
        manager.retry()
        monkeypatch.setattr("extension.weight_format.free_bytes", lambda device, free=free: free)
        assert manager.key(JOB).conv3x3_format == expected
        # An engine is asked for and made by one key, however much is free in between.
        monkeypatch.setattr("extension.weight_format.free_bytes", lambda device: 3 * need)
        assert manager.key(JOB).conv3x3_format == expected
    manager.settings = TierSettings(staging=False)
    monkeypatch.setattr("extension.weight_format.free_bytes", lambda device: need * 2)
    assert manager.key(JOB).conv3x3_format == "linear"


def test_where_copies_do_not_fit_after_all_the_engine_without_them_is_next(manager, monkeypatch):
    monkeypatch.setattr(Target, "key", lambda self, arch, shape: HWC8)
    monkeypatch.setattr("extension.weight_format.free_bytes", lambda device: 1 << 40)
    monkeypatch.setattr("extension.tiers.require_free", no_memory)
    on_disk = SimpleNamespace(key=HWC8, manifest=None, bytes_on_disk=0)
    monkeypatch.setattr(manager, "_entry", lambda *args: on_disk)
    assert not manager.provide(JOB)
    assert "Not enough GPU memory" in manager.failed[HWC8.stem]
    linear = manager.key(JOB)
    assert linear.conv3x3_format == "linear"
    assert not manager.knows(linear.stem)
    manager.retry()
    assert manager.key(JOB) == HWC8


def no_memory(device, needed):
    raise MemoryShortError("Not enough GPU memory.")


@pytest.mark.parametrize("needed", [0, 90, 91, 10**12])
def test_memory_is_looked_at_before_an_engine_is_loaded(monkeypatch, needed):
    """Windows spills where Linux fails."""
    monkeypatch.setattr("extension.memory.free_bytes", lambda device: 100)
    if needed <= 90:
        require_free("cuda:0", needed)
        return
    with pytest.raises(MemoryShortError, match="the engine needs"):
        require_free("cuda:0", needed)


HWC8 = replace(
    JOB.target.key(ARCH, SHAPE),
    backend="tensorrt_rtx",
    io_dtype="fp16",
    compute="fp16",
    conv3x3_format="hwc8",
)


# The pool


class Fake:
    """An engine that only counts."""

    def __init__(self):
        self.weights, self.activation_bytes, self.closed = {}, 0, 0
        self.cache_refused = False

    def close(self):
        self.closed += 1


def candidate(stem):
    return Candidate(
        stem=stem, architecture="a", shape=SHAPE, dtype="fp32", device="cpu", weights="shared"
    )


def test_the_least_recently_used_engine_goes_first():
    pool, engines = EnginePool(most=2), {name: Fake() for name in "abc"}
    pool.add(candidate("a"), engines["a"])
    pool.add(candidate("b"), engines["b"])
    pool.use("a")
    pool.add(candidate("c"), engines["c"])
    assert [c.stem for c in pool.candidates()] == ["a", "c"]
    assert [engines[n].closed for n in "abc"] == [0, 1, 0]
    with pytest.raises(KeyError):
        pool.use("b")
    assert pool.set_aside("a", "broken")
    assert not pool.set_aside("a", "again")
    assert [c.ready for c in pool.candidates()] == [False, True]
    assert engines["a"].closed == 1, "the host that serves instead gets the memory"
    assert pool.remove("a")
    assert not pool.remove("a")
    pool.close()
    assert all(engines[n].closed for n in "abc")


def test_memory_that_is_taken_back_comes_again():
    """Baked engines hold their weights and are unloaded; shared ones only lose their copies."""
    pool, shared, baked = EnginePool(), Fake(), Fake()
    pool.add(candidate("a"), shared)
    pool.add(candidate("b"), baked, resident_bytes=70)
    assert pool.nbytes == 70
    pool.release_weights()
    assert pool.nbytes == 70
    pool.release_memory()
    assert pool.nbytes == 0
    assert [c.stem for c in pool.candidates()] == ["a"]
    assert (shared.closed, baked.closed) == (0, 1)


def test_the_disk_budget_is_kept_after_a_build(manager):
    """What is loaded stays, however small the budget."""
    assert manager.provide(JOB)
    first = manager.key(JOB).stem
    manager.settings = replace(manager.settings, disk_budget=1)
    other = replace(JOB, shape=replace(SHAPE, batch=1))
    assert manager.provide(other)
    assert {e.stem for e in manager.library.entries()} == {first, manager.key(other).stem}
    manager.pool.remove(first)
    third = replace(JOB, shape=replace(SHAPE, batch=3))
    assert manager.provide(third)
    assert first not in {e.stem for e in manager.library.entries()}
    with pytest.raises(SettingError, match="cannot be negative"):
        TierSettings(disk_budget=-1)


# Scratch memory


class User:
    """Who promised itself scratch memory."""


def test_engines_share_one_block_as_large_as_the_largest_needs():
    scratch, users = Scratch(torch.device("cpu")), [User(), User()]
    scratch.join(users[0], 100)
    with scratch.claimed() as small:
        assert small.numel() == 100
    scratch.join(users[1], 300)
    scratch.join(users[0], 100)
    with scratch.claimed() as block:
        assert block.numel() == scratch.nbytes == 300
        assert block.data_ptr() != small.data_ptr()
    scratch.leave(users[1])
    assert scratch.nbytes == 0  # what is left needs less
    with scratch.claimed() as block:
        assert block.numel() == 100
    scratch.free()
    assert scratch.nbytes == 0
    del users[0]
    with scratch.claimed() as block:
        assert block.numel() == 1  # an engine that vanished without a word is forgotten


def test_calls_take_turns_with_the_block():
    scratch, order = Scratch(torch.device("cpu")), []

    def call(name):
        with scratch.claimed():
            order.append(f"{name} begins")
            threading.Event().wait(0.02)
            order.append(f"{name} ends")

    threads = [threading.Thread(target=call, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [line.split()[1] for line in order] == ["begins", "ends"] * 2


def test_scratch_memory_that_is_not_there_is_not_promised(monkeypatch):
    scratch, user = Scratch(torch.device("cpu")), User()

    def full(*args, **kwargs):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        scratch.join(user, 100)
    monkeypatch.undo()
    with scratch.claimed() as block:
        assert block.numel() == 1


def test_two_models_share_one_engine(manager):
    """Each sees its own weights, in any order of calls."""
    manager.provide(JOB)
    inputs = random_inputs(ARCH, SHAPE)
    args = [inputs[n] for n in ("x", "timesteps", "context")]
    models = []
    for seed in (0, 1):
        weights = random_weights(ARCH, seed)
        exact = TorchUNet(ARCH, weights)
        models.append((RoutedUNet(ARCH, weights, exact, pool=manager.pool), exact(*args)))
    for index in (0, 1, 0, 0, 1):
        unet, expected = models[index]
        assert relative_l2(unet(*args), expected) <= 1e-5
    assert [unet.counters.totals for unet, _ in models] == [(3, 0), (2, 0)]


def test_a_model_that_cannot_be_bound_leaves_the_engine_to_others(manager):
    manager.provide(JOB)
    inputs = random_inputs(ARCH, SHAPE)
    args = [inputs[n] for n in ("x", "timesteps", "context")]
    weights = random_weights(ARCH)
    exact = TorchUNet(ARCH, weights)
    broken = RoutedUNet(ARCH, {"only": torch.zeros(1)}, exact, pool=manager.pool)
    assert torch.equal(broken(*args), exact(*args))
    assert broken.counters.totals == (0, 1)
    good = RoutedUNet(ARCH, weights, exact, pool=manager.pool)
    good(*args)
    assert good.counters.totals == (1, 0)


def test_calls_from_many_threads(manager):
    manager.provide(JOB)
    inputs = random_inputs(ARCH, SHAPE)
    args = [inputs[n] for n in ("x", "timesteps", "context")]
    weights = random_weights(ARCH)
    expected = TorchUNet(ARCH, weights)(*args)
    unet = RoutedUNet(ARCH, weights, lambda *a: None, pool=manager.pool)
    wrong = []

    def work():
        for _ in range(5):
            if relative_l2(unet(*args), expected) > 1e-5:
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert unet.counters.totals == (20, 0)


EXIT = """
import sys, threading
from tests.test_tiers import *
reached = threading.Event()
manager = TierManager(
    Library(sys.argv[1]), EnginePool(), TierSettings(after_calls=1),
    on_event=lambda event: event.kind == sys.argv[2] and reached.set(),
)
manager.miss(ARCH, call(Shape(batch=4, height=64, width=64)))
assert reached.wait(60)
"""


@pytest.mark.parametrize("moment", ["building", "loading"])
def test_a_host_can_exit_at_any_moment(moment, tmp_path):
    """Python ends daemon threads inside native code at exit, which aborts the process."""
    command = [sys.executable, "-c", EXIT, str(tmp_path), moment]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert not list(tmp_path.glob(f"{WORK_PREFIX}*"))


def test_what_is_wanted_after_a_cancel_is_built(manager):
    manager.want(replace(JOB, shape=Shape(batch=4, height=64, width=64)))
    manager.cancel()
    stem = manager.want(JOB)
    assert manager.wait(60)
    assert [candidate.stem for candidate in manager.pool.candidates()] == [stem]
