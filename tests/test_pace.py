"""Steps are measured as pictures are made, and the faster of several serves; a clock of our own."""

from __future__ import annotations

import pytest
import torch

from extension import pace
from extension.contest import PATIENCE, host_is_timed, kind_of
from extension.engine.torch_graph import TorchGraphEngine
from extension.ops_torch import TorchUNet
from extension.pace import LEAST
from extension.pool import EnginePool
from extension.routed import RoutedUNet
from extension.router import INSTANT, Candidate, Reason
from extension.serving import Target
from extension.shapes import Shape
from extension.speed import in_service
from tests.support_models import SMALL, random_inputs, random_weights, relative_l2

ARCH = SMALL["two-levels"]
SHAPE = Shape(batch=2, height=8, width=8)
CPU = torch.device("cpu")


class Mark:
    """A moment, which a device has reached once it is in ``reached`` (None: at once)."""

    def __init__(self, at, reached=None):
        self.at, self.reached = at, reached

    def query(self):
        return self.reached is None or self.at in self.reached

    def elapsed_time(self, end):
        return float(end.at - self.at)


class Timed(TorchGraphEngine):
    """An engine whose calls take a given time."""

    def __init__(self, scene, name):
        super().__init__(ARCH, SHAPE, dtype="fp32", device="cpu")
        self.scene, self.name = scene, name

    def run(self, inputs):
        self.scene.spend(self.name)
        return super().run(inputs)


class Scene:
    """A host and engines that take the milliseconds of ``costs``."""

    def __init__(self, **costs):
        self.costs, self.now, self.log = costs, 0.0, []
        self.weights = random_weights(ARCH)
        self.pool = EnginePool()
        self.unet = RoutedUNet(ARCH, self.weights, self.host, pool=self.pool)
        self.unet.modes = ("shared", "baked", INSTANT)
        self.exact = TorchUNet(ARCH, self.weights)
        self.inputs = random_inputs(ARCH, SHAPE, 1)
        self.args = [self.inputs[name] for name in ("x", "timesteps", "context")]
        self.expected = self.exact(*self.args)
        self.call = self.unet.describe(self.args[0], self.args[2], False)

    def spend(self, name):
        self.now += self.costs[name]
        self.log.append(name)

    def host(self, *args):
        self.spend("host")
        return self.exact(*args)

    def add(self, weights):
        candidate = Candidate(
            stem=f"{weights}-engine",
            architecture=ARCH.for_shape(SHAPE).id,
            shape=SHAPE,
            dtype="fp32",
            device="cpu",
            weights=weights,
        )
        self.pool.add(candidate, Timed(self, weights))

    def steps(self, count, **options):
        """Who served each of so many steps; every result is checked."""
        self.log.clear()
        for _ in range(count):
            out = self.unet(*self.args, **options)
            assert relative_l2(out, self.expected) <= 1e-5
        return list(self.log)

    def milliseconds(self, server):
        return self.pool.pace.milliseconds(kind_of(self.call), server)


@pytest.fixture
def scene(monkeypatch):
    scenes = []

    def make(**costs):
        scenes.append(Scene(**costs))
        monkeypatch.setattr(pace, "TIMED", ("cpu",))
        monkeypatch.setattr(pace, "mark", lambda device: Mark(scenes[0].now))
        return scenes[0]

    yield make
    scenes[0].pool.close()


def test_the_median_of_the_last_steps(scene):
    made = scene(host=30)
    made.steps(5)
    assert made.milliseconds("host") is None  # four steps have an end
    made.now += 60_000  # between two jobs
    made.steps(2)
    assert made.milliseconds("host") == pytest.approx(30)
    made.costs["host"] = 50
    made.steps(6)
    assert made.milliseconds("host") == pytest.approx(50)


@pytest.mark.parametrize("features", [("FreeU",), ()])
def test_only_usual_calls_of_the_host_count(scene, features):
    """With a patch in its UNet the host is slower; the engine is not compared with that."""
    made = scene(host=30)
    made.steps(8, features=features)
    assert (made.milliseconds("host") is None) == bool(features)


def test_the_speed_that_user_interfaces_show(scene):
    made = scene(host=30, shared=12)
    key = Target(device="cpu", dtype="fp32").key(ARCH, SHAPE)
    made.steps(8)
    made.add("shared")
    assert in_service(made.pool, key, "cpu") is None
    made.steps(8)
    assert in_service(made.pool, key, "cpu").ratio == pytest.approx(2.5)
    assert in_service(made.pool, key, "cuda:0") is None


def test_another_size_is_another_kind(scene):
    made = scene(host=30)
    other = random_inputs(ARCH, Shape(batch=1, height=8, width=8), 1)
    for _ in range(8):
        made.steps(1)
        made.unet(other["x"], other["timesteps"], other["context"])
    assert made.milliseconds("host") is None


def test_nothing_is_measured_on_a_cpu(scene, monkeypatch):
    made = scene(host=1, shared=100)
    monkeypatch.undo()
    made.steps(8)
    made.add("shared")
    assert made.steps(20) == ["shared"] * 20


@pytest.mark.parametrize(
    ("shared", "instant", "wins"), [(40, 44, "shared"), (44, 40, INSTANT), (40, 39.5, "shared")]
)
@pytest.mark.parametrize("order", [(INSTANT, "shared"), ("shared", INSTANT)])
def test_the_faster_of_a_built_engine_and_the_instant_one(scene, shared, instant, wins, order):
    """Whichever was ready first: an engine on disk is there before the instant one."""
    made = scene(host=90, shared=shared, instant=instant)
    made.add(order[0])
    assert made.steps(8) == [order[0]] * 8
    made.add(order[1])
    assert set(made.steps(30)[8:]) == {wins}
    assert made.pool.holds("shared-engine")
    assert made.pool.holds("instant-engine") == (wins == INSTANT)
    made.pool.remove("instant-engine")  # such as for its memory
    assert set(made.steps(5)) == {"shared"}


def test_an_engine_slower_than_the_host_is_set_aside(scene):
    made = scene(host=30, shared=35)
    made.steps(8)
    made.add("shared")
    assert made.steps(40)[20:] == ["host"] * 20
    (candidate,) = made.pool.candidates()
    assert not candidate.ready
    assert candidate.problem == "slower than the host (35 ms a step instead of 30)"
    codes = {reason["code"] for reason in made.unet.counters.to_json()["reasons"]}
    assert Reason.SLOWER.value in codes


def test_a_slow_moment_of_the_whole_machine_is_no_fault_of_the_engine(scene):
    """Another program takes the GPU: the host is timed again, and the engine goes on."""
    made = scene(host=30, shared=12)
    made.steps(8)
    made.add("shared")
    made.steps(12)
    made.costs.update(host=90, shared=36)
    assert set(made.steps(60)[-20:]) == {"shared"}
    made.costs.update(host=30, shared=12)
    assert set(made.steps(20)) == {"shared"}


def test_memory_that_spills_is_noticed_without_an_old_time_of_the_host(scene):
    """Windows moves GPU memory out instead of failing: the engine becomes slower than the host."""
    made = scene(host=30, shared=12)
    made.add("shared")
    made.steps(20)
    made.costs["shared"] = 300
    assert made.steps(60)[-30:] == ["host"] * 30
    assert "300 ms" in made.pool.candidates()[0].problem


def test_marks_that_the_device_has_not_reached_wait(monkeypatch):
    reached = []
    made, times = pace.Pace(), iter(range(0, 1000, 10))
    monkeypatch.setattr(pace, "TIMED", ("cpu",))
    monkeypatch.setattr(pace, "mark", lambda device: Mark(next(times), reached))
    for _ in range(8):
        made.step("kind", "shared", CPU)
    assert made.milliseconds("kind", "shared") is None
    reached.extend(range(0, 1000, 10))
    made.step("kind", "shared", CPU)
    assert made.milliseconds("kind", "shared") == 10
    made.rest()
    made.step("kind", "shared", CPU)
    made.forget("kind", "shared")
    assert (made.milliseconds("kind", "shared"), made.best("kind", "shared")) == (None, None)


def test_what_is_slowed_by_a_build_does_not_count(scene):
    """An instant engine that was slow beside a build is not beaten by that."""
    made = scene(host=30, shared=14, instant=12)
    made.steps(8)
    made.add(INSTANT)
    with made.pool.pace.disturbed():
        made.costs.update(host=45, instant=25)
        made.steps(20)
        made.add("shared")
    made.costs.update(host=30, instant=12)
    assert set(made.steps(40)[-10:]) == {INSTANT}
    assert made.milliseconds("host") == pytest.approx(30)
    assert made.milliseconds(INSTANT) == pytest.approx(12)


def test_no_step_reaches_from_before_a_build_to_after_it(scene):
    made = scene(host=30)
    made.steps(3)
    with made.pool.pace.disturbed():
        made.now += 60_000
    made.steps(4)
    assert made.milliseconds("host") == pytest.approx(30)


def test_the_host_does_not_serve_a_whole_build_to_be_timed(scene):
    made = scene(host=30, shared=12)
    made.add("shared")
    made.steps(20)
    made.costs["shared"] = 300
    made.steps(7)
    with made.pool.pace.disturbed():
        assert set(made.steps(50)[2:]) == {"shared"}
    assert made.steps(60)[-30:] == ["host"] * 30


@pytest.mark.parametrize("alternating", [False, True])
def test_the_host_is_timed_before_an_engine_is_made(scene, alternating):
    """Unless it cannot be: calls whose size changes each time have no steps."""
    made, other = scene(host=30), random_inputs(ARCH, Shape(batch=1, height=8, width=8), 1)
    asked = []
    made.unet._on_miss = lambda call, answer: asked.append(host_is_timed(made.pool, call))
    for _ in range(PATIENCE + 2):
        made.steps(1)
        if alternating:
            made.unet(other["x"], other["timesteps"], other["context"])
    each = asked[::2] if alternating else asked
    first = each.index(True)
    assert first == (PATIENCE if alternating else LEAST + 1)
    assert all(each[first:])


def test_a_cpu_has_nothing_to_wait_for(scene, monkeypatch):
    made = scene(host=30)
    monkeypatch.undo()
    assert host_is_timed(made.pool, made.call)
