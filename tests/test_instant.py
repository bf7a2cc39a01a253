"""The instant tier on a CPU, where its engine runs plainly; its graph is in test_gpu.py."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from extension import instant
from extension.engine.torch_graph import TorchGraphEngine
from extension.errors import EngineError, MissingPackageError
from extension.library import Library
from extension.ops_torch import TorchUNet
from extension.pool import EnginePool
from extension.routed import RoutedUNet
from extension.shapes import Shape
from extension.tier_settings import TierSettings
from extension.tiers import TierManager
from tests.support_models import SMALL, control_of, random_inputs, random_weights, relative_l2

ARCH = SMALL["sdxl"]
SHAPE = Shape(batch=2, height=8, width=8)
AUTO = ("shared", "baked", "instant")


class Scene:
    """A model whose engines are never built, unless a test says so."""

    def __init__(self, folder, **settings):
        self.weights = random_weights(ARCH)
        self.asked = 0
        self.pool = EnginePool()
        chosen = TierSettings(**{"policy": "never", **settings})
        self.tiers = TierManager(Library(folder), self.pool, chosen)
        self.unet = RoutedUNet(ARCH, self.weights, self.host, pool=self.pool, on_miss=self.miss)
        self.unet.modes = AUTO

    def host(self, *args):
        self.asked += 1
        return TorchUNet(ARCH, self.weights)(*args)

    def miss(self, call, answer):
        return self.tiers.miss(ARCH, call)

    def call(self, shape=SHAPE, seed=1):
        """One call, checked; what served it: ``instant``, ``built`` or ``host``."""
        inputs = random_inputs(ARCH, shape, seed)
        args = [inputs[n] for n in ("x", "timesteps", "context", "y")] + [control_of(inputs)]
        served = self.unet.counters.to_json()["engines"]
        out = self.unet(*args)
        assert relative_l2(out, TorchUNet(ARCH, self.weights)(*args)) <= 1e-5
        now = self.unet.counters.to_json()["engines"]
        used = [stem for stem in now if now[stem] != served.get(stem, 0)]
        self.tiers.instant.wait(60)
        if not used:
            return "host"
        return "instant" if used[0].startswith(instant.INSTANT) else "built"


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(instant, "DEVICES", ("cpu",))


@pytest.fixture
def scene(tmp_path):
    made = Scene(tmp_path)
    yield made
    made.tiers.close()
    made.pool.close()


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("control", [False, True])
def test_the_engine_is_the_torch_unet(name, control):
    arch, shape = SMALL[name], replace(SHAPE, height=16, width=24, control=control)
    engine = TorchGraphEngine(arch, shape, dtype="fp32", device="cpu")
    inputs = random_inputs(arch, shape)
    args = [inputs.get(n) for n in ("x", "timesteps", "context", "y")] + [control_of(inputs)]
    for seed in (0, 1):
        weights = random_weights(arch, seed)
        engine.bind(weights)
        assert torch.equal(engine.run(inputs), TorchUNet(arch, weights)(*args))


def test_it_serves_from_the_third_call_of_a_shape_on(scene):
    assert [scene.call() for _ in range(4)] == ["host", "host", "instant", "instant"]
    assert scene.call(replace(SHAPE, batch=3)) == "instant"  # in two runs
    assert scene.call(replace(SHAPE, height=16)) == "host"
    assert scene.asked == 3
    assert scene.tiers.library.entries() == []


def test_weights_may_change_in_any_way(scene):
    for _ in range(3):
        scene.call()
    with torch.no_grad():
        scene.weights["out.2.bias"] += 1
    assert scene.call() == "instant"
    scene.weights.update(random_weights(ARCH, 5))
    assert scene.call() == "instant"


def test_an_engine_that_was_built_takes_over_and_the_memory_is_freed(scene):
    for _ in range(3):
        scene.call()
    scene.tiers.settings = TierSettings(after_calls=2)
    scene.call()
    assert scene.call() == "instant"
    assert scene.tiers.wait(60)
    assert scene.call() == "built"
    assert [candidate.weights for candidate in scene.pool.candidates()] == ["shared"]


@pytest.mark.parametrize("modes", [("shared", "baked"), ("shared",), ("baked",)])
def test_only_where_it_is_allowed(scene, modes):
    scene.unet.modes = modes
    assert [scene.call() for _ in range(3)] == ["host"] * 3


def test_switched_off(tmp_path):
    scene = Scene(tmp_path, instant=False)
    assert [scene.call() for _ in range(3)] == ["host"] * 3


def test_instant_alone_builds_nothing(tmp_path):
    scene = Scene(tmp_path, policy="background", after_calls=1)
    scene.unet.modes = ("instant",)
    assert [scene.call() for _ in range(3)] == ["host", "host", "instant"]
    assert scene.tiers.wanted == []
    assert scene.tiers.library.entries() == []


def test_without_any_backend(scene, monkeypatch):
    def missing(call):
        raise MissingPackageError("No TensorRT here.")

    monkeypatch.setattr("extension.tiers.target_of", missing)
    assert [scene.call() for _ in range(3)] == ["host", "host", "instant"]
    assert "No TensorRT here." in scene.tiers.unable


@pytest.mark.parametrize("fault", ["no backend", "no build", "asked for alone"])
def test_who_would_wait_for_a_build_is_served_where_none_can_be_had(tmp_path, monkeypatch, fault):
    def failing(*args, **settings):
        raise MissingPackageError("No TensorRT here.")

    scene = Scene(tmp_path, policy="wait")
    if fault == "no backend":
        monkeypatch.setattr("extension.tiers.target_of", failing)
    elif fault == "no build":
        monkeypatch.setattr("extension.tiers.build_engine", failing)
    else:
        scene.unet.modes = ("instant",)
    assert "instant" in [scene.call() for _ in range(4)]
    assert scene.call() == "instant"
    assert scene.tiers.library.entries() == []


def test_who_waits_for_a_build_gets_it_at_once(tmp_path):
    scene = Scene(tmp_path, policy="wait")
    assert [scene.call() for _ in range(3)] == ["built"] * 3
    assert len(scene.pool.candidates()) == 1


def test_too_little_memory_is_said_and_not_tried_again(scene, monkeypatch):
    monkeypatch.setattr(instant, "free_bytes", lambda device: 10_000_000)
    monkeypatch.setattr(instant, "instant_bytes", lambda *args: 7_000_000)
    assert [scene.call() for _ in range(4)] == ["host"] * 4
    (why,) = scene.tiers.instant.failed.values()
    assert "needs 7 MB" in why
    assert "10 MB are free" in why
    monkeypatch.undo()
    monkeypatch.setattr(instant, "DEVICES", ("cpu",))
    scene.tiers.retry()
    assert scene.call() == "host"
    assert scene.call() == "instant"


def test_one_that_computes_something_else_never_serves(scene, monkeypatch):
    compute = TorchGraphEngine._compute

    def wrong(engine):
        compute(engine)
        engine._out *= 1.01

    monkeypatch.setattr(TorchGraphEngine, "_compute", wrong)
    assert [scene.call() for _ in range(4)] == ["host"] * 4
    (why,) = scene.tiers.instant.failed.values()
    assert "computes something else" in why


def test_a_few_are_kept_and_one_that_comes_back_is_not_verified_again(scene, monkeypatch):
    shapes = [replace(SHAPE, width=8 * n) for n in range(1, instant.MOST + 2)]
    for shape in shapes:
        for _ in range(2):
            scene.call(shape)
    assert len(scene.pool.candidates()) == instant.MOST
    monkeypatch.setattr(instant, "check", None)
    assert scene.call(shapes[0]) == "host"
    assert scene.call(shapes[0]) == "instant"


def test_it_keeps_no_weight_alive():
    weights = random_weights(ARCH)
    engine = TorchGraphEngine(ARCH, SHAPE, dtype="fp32", device="cpu")
    engine.bind(weights)
    watched = weakref.ref(weights["out.2.weight"])
    weights.clear()
    gc.collect()
    assert watched() is None
    with pytest.raises(EngineError, match="is gone"):
        engine.run(random_inputs(ARCH, SHAPE))
    engine.close()
    with pytest.raises(EngineError, match="not bound"):
        engine.run(random_inputs(ARCH, SHAPE))
