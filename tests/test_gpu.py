"""TensorRT-RTX on a real GPU, with small models: ``pytest -m gpu``. Times are in benchmarks."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch

from extension.backend_choice import choose, surroundings
from extension.baking import bake
from extension.contest import PATIENCE, kind_of
from extension.dispatch import engine_inputs
from extension.doctor import diagnose
from extension.driver import driver_cuda, gpus
from extension.engine.scratch import free_scratch, scratch_of
from extension.engine.torch_graph import TorchGraphEngine
from extension.engine_state import State
from extension.errors import EngineRoomError
from extension.full_precision import reference_math
from extension.library import Library
from extension.ops_torch import TorchUNet
from extension.pace import WINDOW
from extension.parity import MOST_LIMIT, cast_inputs, check
from extension.pool import EnginePool
from extension.progress import CancelToken
from extension.room import Room
from extension.routed import RoutedUNet
from extension.router import Reason
from extension.serving import Target, build_shared, candidate_of, load_engine, verify
from extension.shapes import Shape
from extension.tier_settings import TierSettings
from extension.tiers import TierManager
from extension.wanted import Job
from tests.support_models import (
    SMALL,
    control_of,
    module_of,
    random_inputs,
    random_weights,
    relative_l2,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]
DEVICE = "cuda:0"
ARCH = SMALL["sd15"]
SHAPE = Shape(batch=2, height=32, width=32)
WIDE = Shape(batch=2, height=48, width=64)
# fp16 rounding through strong weights; the parity gate compares with torch's own rounding.
TOLERANCE = 2e-2
CYCLES = int(os.environ.get("ENGINE_ROOM_CYCLES", "24"))


@pytest.fixture(scope="module")
def target():
    pytest.importorskip("tensorrt_rtx")
    return Target(device=DEVICE)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return Library(tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="module")
def entries(library, target):
    return {shape: build_shared(library, ARCH, shape, target) for shape in (SHAPE, WIDE)}


@pytest.fixture(scope="module")
def engines(library, target, entries):
    loaded = {shape: load_engine(library, entry, target) for shape, entry in entries.items()}
    yield loaded
    for engine in loaded.values():
        engine.close()


class Shared:
    """An engine that outlives the pools of single tests."""

    def __init__(self, engine):
        self._engine = engine

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def close(self):
        pass


@pytest.fixture
def pool(engines, entries, target):
    pool = EnginePool()
    for shape, engine in engines.items():
        pool.add(candidate_of(entries[shape], target, ready=True), Shared(engine))
    yield pool
    pool.close()


def on_gpu(weights, dtype=torch.float16):
    return {name: tensor.to(DEVICE, dtype) for name, tensor in weights.items()}


def arguments(shape=SHAPE, seed=1, dtype=torch.float16):
    inputs = {n: t.to(DEVICE) for n, t in random_inputs(ARCH, shape, seed).items()}
    half = cast_inputs(inputs, dtype)
    return [half[n] for n in ("x", "timesteps", "context")] + [None, control_of(half)]


def routed(weights, pool, **options):
    host = TorchUNet(ARCH, weights, torch.float16)
    return RoutedUNet(ARCH, weights, host, pool=pool, **options)


def exact(weights, args):
    return TorchUNet(ARCH, weights)(*args)


def refusing(*args):
    raise AssertionError("the host was asked")


@pytest.mark.parametrize(
    ("name", "control", "dtype"),
    [
        ("sd15", False, "fp16"),
        ("sd15", True, "fp16"),
        ("sdxl", False, "fp16"),
        ("sdxl", True, "bf16"),
        ("sd21", False, "fp16"),
        ("sd15", False, "fp32"),
    ],
)
def test_engines_are_the_model(tmp_path, name, control, dtype):
    target = Target(device=DEVICE, dtype=dtype, backend="tensorrt_rtx")
    arch, shape = SMALL[name], replace(SHAPE, control=control, height=33)
    library = Library(tmp_path)
    entry = build_shared(library, arch, shape, target)
    engine = load_engine(library, entry, target)
    weights = on_gpu(random_weights(arch), target.torch_dtype)
    result = verify(library, entry, engine, arch, weights, target)
    engine.close()
    result.require(entry.stem)
    assert library.entry(entry.stem, target.machine).state is State.READY


def test_weights_change_without_a_build(pool):
    """Other pointers, the same pointers with other contents, and back, through a captured graph."""
    first, second = (on_gpu(random_weights(ARCH, seed)) for seed in (0, 1))
    args = arguments()
    unet = routed(first, pool)
    unet.host = refusing
    for epoch, weights in enumerate((first, second, first)):
        unet.set_weights(weights, epoch=epoch)
        for _ in range(3):
            assert relative_l2(unet(*args), exact(weights, args)) <= TOLERANCE
    for name, tensor in first.items():
        tensor.copy_(second[name])
    unet.set_weights(first, epoch=9)
    assert relative_l2(unet(*args), exact(second, args)) <= TOLERANCE
    assert unet.counters.totals == (10, 0)


def test_streams_and_threads(pool):
    """Plain call, capture and replay; on the default stream and on others; from two threads."""
    weights, args = on_gpu(random_weights(ARCH)), arguments()
    unet = routed(weights, pool)
    unet.host = refusing
    expected = unet(*args).clone()
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            for _ in range(3):
                out = unet(*args)
        stream.synchronize()
        assert torch.equal(out, expected)
    wrong = []

    def work(shape):
        mine = arguments(shape)
        known = None
        for _ in range(20):
            torch.empty(1 << 20, device=DEVICE)
            out = unet(*mine)
            known = out if known is None else known
            if not torch.equal(out, known):
                wrong.append(shape)

    threads = [threading.Thread(target=work, args=(shape,)) for shape in (SHAPE, WIDE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_engines_share_their_scratch_memory(pool, engines):
    weights = on_gpu(random_weights(ARCH))
    unet = routed(weights, pool)
    unet.host = refusing
    outs = {shape: unet(*arguments(shape)).clone() for shape in (SHAPE, WIDE)}
    scratch = scratch_of(torch.device(DEVICE))
    assert scratch.nbytes == max(engine.activation_bytes for engine in engines.values())
    for _ in range(3):
        for shape, expected in outs.items():
            assert torch.equal(unet(*arguments(shape)), expected)
    free_scratch()
    assert scratch.nbytes == 0
    for _ in range(3):
        for shape, expected in outs.items():
            assert torch.equal(unet(*arguments(shape)), expected)


def test_not_finite_goes_to_the_host_and_sets_the_engine_aside(pool):
    weights, args = on_gpu(random_weights(ARCH)), arguments()
    weights["out.2.bias"] = torch.full_like(weights["out.2.bias"], torch.nan)
    unet, asked = routed(weights, pool), []
    unet.host = lambda *call: asked.append(call) or torch.zeros(1)
    unet(*args)
    unet(*args)
    assert len(asked) == 2
    reasons = [reason for reason, _ in unet.counters.host]
    assert Reason.NOT_FINITE in reasons


@pytest.mark.parametrize("at", [0, 7])
def test_a_job_with_a_bad_output_is_done_again(pool, at):
    """The flag is read a call later, or at the end; weights turn bad in mid-run."""
    good, args = on_gpu(random_weights(ARCH)), arguments()
    bad = {**good, "out.2.bias": torch.full_like(good["out.2.bias"], torch.inf)}
    unet, asked = routed(good, pool), []
    expected = exact(good, args)
    unet.host = lambda *call: asked.append(call) or expected

    def job():
        drawn = torch.rand(1, device=DEVICE)
        for step in range(8):
            unet.set_weights(bad if step == at else good, epoch=step)
            out = unet(*args)
        return out, drawn

    torch.manual_seed(4)
    first = torch.rand(1, device=DEVICE)
    torch.manual_seed(4)
    out, drawn = unet.whole_job(job, torch.device(DEVICE))
    assert torch.equal(drawn, first)
    assert torch.equal(out, expected)
    assert unet.counters.totals == (0, 8)
    assert len(asked) == 8


def test_steps_are_timed_on_the_gpus_clock(pool):
    """Nothing waits for the GPU meanwhile, and what is found is what a wait would have found."""
    weights, args = on_gpu(random_weights(ARCH)), arguments()
    unet, count = routed(weights, pool), 3 * WINDOW
    for _ in range(3):
        unet(*args)
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        unet(*args)
    end.record()
    torch.cuda.synchronize()
    unet(*args)
    call = unet.describe(args[0], args[2], False)
    found = pool.pace.milliseconds(kind_of(call), "shared")
    assert 0.5 < found / (start.elapsed_time(end) / count) < 2


def test_an_instant_engine_replays_the_torch_unet(tmp_path):
    """Captured and replayed; under the host's autocast and inference mode; with other pointers."""
    first, second = (on_gpu(random_weights(ARCH, seed)) for seed in (0, 1))
    args = arguments()
    manager = TierManager(Library(tmp_path), EnginePool(), TierSettings(policy="never"))
    unet = routed(first, manager.pool, on_miss=lambda call, answer: manager.miss(ARCH, call))
    unet.modes = ("instant",)
    for _ in range(PATIENCE + 3):
        unet(*args)
    manager.instant.wait(60)
    assert manager.instant.failed == {}
    unet.host = refusing
    exacts = {0: exact(first, args), 1: exact(second, args)}
    with torch.inference_mode(), torch.autocast("cuda"):
        for which, weights in enumerate((first, second)):
            unet.set_weights(weights, epoch=which)
            for _ in range(4):
                manager.pool.pace.rest()  # comparing is no part of a step
                assert relative_l2(unet(*args), exacts[which]) <= TOLERANCE
    second["out.2.bias"].add_(1)
    manager.pool.pace.rest()
    assert relative_l2(unet(*args), exact(second, args)) <= TOLERANCE
    (held,) = manager.pool.candidates()
    assert manager.pool.nbytes >= manager.pool.use(held.stem).engine.activation_bytes > 0
    manager.pool.close()


def test_instant_engines_leave_no_memory():
    weights, args = on_gpu(random_weights(ARCH)), arguments()
    inputs = engine_inputs(*args)
    used = []
    for _ in range(6):
        engine = TorchGraphEngine(ARCH, SHAPE, dtype="fp16", device=DEVICE)
        engine.bind(weights)
        for _ in range(3):
            engine.run(inputs)
        engine.close()
        del engine
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        used.append(torch.cuda.memory_reserved(DEVICE))
    assert used[-1] <= used[1], used


def test_copies_that_do_not_fit_go_to_the_host(engines, entries, target):
    pool = EnginePool()
    pool.add(candidate_of(entries[SHAPE], target, ready=True), Shared(engines[SHAPE]),
             staging_budget=1000)  # fmt: skip
    weights, args = on_gpu(random_weights(ARCH)), arguments()
    unet = routed(weights, pool)
    assert relative_l2(unet(*args), exact(weights, args)) <= TOLERANCE
    assert [reason for reason, _ in unet.counters.host] == [Reason.WEIGHTS]


def test_an_engine_from_elsewhere_is_tried_in_a_child(library, target, entries, tmp_path):
    entry = entries[WIDE]
    for suffix in (".engine", ".json"):
        source = library.folder / f"{entry.stem}{suffix}"
        (tmp_path / source.name).write_bytes(source.read_bytes())
    found = Library(tmp_path)
    engine = load_engine(found, found.entry(entry.stem, target.machine), target)
    engine.close()
    data = bytearray((tmp_path / f"{entry.stem}.engine").read_bytes())
    data[len(data) // 3 :] = b"\x5a" * (len(data) - len(data) // 3)
    (tmp_path / f"{entry.stem}.engine").write_bytes(data)
    manifest = json.loads((tmp_path / f"{entry.stem}.json").read_text())
    manifest["engine_sha256"] = hashlib.sha256(data).hexdigest()
    (tmp_path / f"{entry.stem}.json").write_text(json.dumps(manifest))
    found = Library(tmp_path)
    with pytest.raises(EngineRoomError, match="cannot be loaded here"):
        load_engine(found, found.entry(entry.stem, target.machine), target)


def test_a_baked_engine_is_right_with_and_without_its_weights(tmp_path, target):
    library, weights = Library(tmp_path), on_gpu(random_weights(ARCH))
    entry = bake(library, ARCH, weights, SHAPE, target, label="a", source={})
    engine = load_engine(library, entry, target)
    verify(library, entry, engine, ARCH, weights, target).require(entry.stem)
    verify(library, entry, engine, ARCH, None, target).require(entry.stem)
    pool = EnginePool()
    pool.add(candidate_of(entry, target, ready=True), engine)
    unet = routed(weights, pool, fingerprint=entry.key.fingerprint)
    args = arguments()
    assert relative_l2(unet(*args), exact(weights, args)) <= TOLERANCE
    unet.set_weights(weights, epoch=1, fingerprint="another")
    unet(*args)
    assert unet.counters.totals == (1, 1)
    pool.close()


def test_the_gate_refuses_what_was_miscompiled(tmp_path):
    """A constant bias before the split of GEGLU; the emitter's own form is right."""
    baking = pytest.importorskip("benchmarks.baking")
    arch, shape, _ = baking.CASES["small"]
    baking.export_pair(baking.random_unet(arch), arch, tmp_path / "pair", dtype="fp16")
    weights = on_gpu(baking.random_unet(arch))
    results = {}
    for variant in ("inputs: none", "inputs: none; early_bias"):
        engine, _ = baking.build(arch, shape, variant, tmp_path / "pair")
        results[variant] = check(engine, arch, shape, weights, dtype="fp16", device=DEVICE)
        engine.close()
    right, early = results.values()
    assert right.passed, right
    if early.worst <= early.limit:
        pytest.skip(f"this TensorRT compiles it rightly here: {early}")
    assert early.worst > MOST_LIMIT


def test_tiers_build_verify_and_serve(tmp_path, target):
    manager = TierManager(Library(tmp_path), EnginePool())
    weights, args = on_gpu(random_weights(ARCH)), arguments()
    unet = RoutedUNet(
        ARCH,
        weights,
        TorchUNet(ARCH, weights, torch.float16),
        pool=manager.pool,
        on_miss=lambda call, answer: manager.miss(ARCH, call),
    )
    for _ in range(PATIENCE + 3):
        assert relative_l2(unet(*args), exact(weights, args)) <= TOLERANCE
    assert manager.wait(120)
    assert manager.failed == {}
    before = unet.counters.totals[0]
    for _ in range(3):
        assert relative_l2(unet(*args), exact(weights, args)) <= TOLERANCE
    assert unet.counters.totals[0] == before + 3
    assert list(tmp_path.glob("kernels-*.cache"))
    manager.close()
    again = TierManager(Library(tmp_path), EnginePool())
    assert again.provide(Job(arch=ARCH, shape=SHAPE, target=target), cancel=CancelToken())
    again.close()
    again.pool.close()
    manager.pool.close()


def test_the_reference_is_full_fp32_whatever_the_host_allows(pool):
    """TF32 rounds to 11 bits: such a reference would hide as much of an engine's error."""
    weights, args = on_gpu(random_weights(ARCH), torch.float32), arguments(dtype=torch.float32)
    double = {name: tensor.double() for name, tensor in weights.items()}
    wide = [a.double() if torch.is_tensor(a) else a for a in args]
    expected = TorchUNet(ARCH, double, torch.float64)(*wide)
    settings = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [setting.allow_tf32 for setting in settings]
    try:
        for setting in settings:
            setting.allow_tf32 = True
        rounded = relative_l2(exact(weights, args), expected)
        with reference_math(torch.device(DEVICE)):
            full = relative_l2(exact(weights, args), expected)
        assert [setting.allow_tf32 for setting in settings] == [True, True]
    finally:
        for setting, value in zip(settings, before, strict=True):
            setting.allow_tf32 = value
    # The timesteps' embedding is fp32 in all of them.
    assert full < 1e-4 < rounded, (full, rounded)


def test_weights_that_serve_for_long_get_a_baked_engine(tmp_path, target):
    room = Room(tmp_path, TierSettings(after_calls=1, instant=False, promote_after=20))
    weights, args = on_gpu(random_weights(ARCH)), arguments()
    unet = module_of(weights)
    served, expected = room.model(unet), exact(weights, args)

    def call(epoch):
        out = served.serve(*args, epoch=epoch, features=[])
        room.pool.pace.rest()
        assert out is None or relative_l2(out, expected) <= TOLERANCE
        return room.counters.to_json()["engines"]

    def baked():
        return [e.stem for e in room.library.entries() if e.manifest and e.key.weights == "baked"]

    deadline = time.monotonic() + 120
    while not set(call(1)) & set(baked()):
        assert time.monotonic() < deadline, (room.tiers.failed, room.counters.sentence)
        time.sleep(0.01)
    (stem,) = baked()
    before = room.counters.to_json()["engines"][stem]
    weights["out.2.bias"].add_(1)
    expected = exact(weights, args)
    assert call(2)[stem] == before
    room.close()


def test_memory_is_asked_for_before_an_engine_is_loaded(tmp_path, target, monkeypatch):
    """All but some megabytes are taken by others; the host serves, and is told how much lacks."""
    manager = TierManager(Library(tmp_path), EnginePool(), TierSettings(after_calls=1))
    weights, args = on_gpu(random_weights(ARCH)), arguments()
    job = Job(arch=ARCH, shape=SHAPE, target=target)
    monkeypatch.setattr("extension.tiers.needed_bytes", lambda entry: 4 << 30)
    free, _ = torch.cuda.mem_get_info(DEVICE)
    taken = [torch.empty(free - (96 << 20), dtype=torch.uint8, device=DEVICE)]
    try:
        assert not manager.provide(job)
        (text,) = manager.failed.values()
        assert re.search(r"needs 4\.29 GB, 0\.\d\d GB are free", text)
        unet = routed(weights, manager.pool, on_miss=lambda call, answer: manager.miss(ARCH, call))
        assert relative_l2(unet(*args), exact(weights, args)) <= TOLERANCE
        assert unet.counters.totals == (0, 1)
    finally:
        taken.clear()
        torch.cuda.empty_cache()
    monkeypatch.undo()
    manager.retry()
    assert manager.provide(job)
    manager.close()
    manager.pool.close()


@pytest.mark.parametrize("damage", ["cut", "bytes of another kind"])
def test_kernels_that_are_refused_are_compiled_again_and_kept(tmp_path, target, damage):
    library = Library(tmp_path)
    entry = build_shared(library, ARCH, SHAPE, target)
    load_engine(library, entry, target).close()
    (path,) = tmp_path.glob("kernels-*.cache")
    kept = path.read_bytes()
    if damage == "cut":
        path.write_bytes(kept[: len(kept) // 2])
    else:
        body = b"no kernels" * 1000
        path.write_bytes(hashlib.sha256(body).digest() + body)
    engine = load_engine(library, entry, target)
    verify(library, entry, engine, ARCH, None, target).require(entry.stem)
    engine.close()
    again = path.read_bytes()
    assert len(again) >= 0.9 * len(kept)
    assert hashlib.sha256(again[32:]).digest() == again[:32]


def test_a_host_may_wait_for_the_device_while_engines_are_made(tmp_path, target):
    """Such a wait fails, in the host's own thread, while any other captures a graph."""
    manager = TierManager(Library(tmp_path), EnginePool(), TierSettings(after_calls=1))
    weights, args = on_gpu(random_weights(ARCH)), arguments()
    unet = routed(weights, manager.pool, on_miss=lambda call, answer: manager.miss(ARCH, call))
    unet.host, unet.modes = TorchUNet(ARCH, weights, torch.float16), ("shared", "instant")
    expected, after = exact(weights, args), 0
    while after < 40:
        assert relative_l2(unet(*args), expected) <= TOLERANCE
        torch.cuda.synchronize()
        after += unet.counters.totals[0] > 0 and not manager.wanted
    assert (manager.failed, manager.instant.failed) == ({}, {})
    manager.close()
    manager.pool.close()


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="others use this GPU's memory")
def test_load_and_release_leave_nothing(library, entries, target):
    used = []
    for count in range(CYCLES):
        engine = load_engine(library, entries[SHAPE], target)
        engine.close()
        if count >= 3:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info()
            used.append(total - free)
    # A leak of one small engine's context would be as many times some MB.
    assert used[-1] - used[0] <= 8 << 20, used


def test_the_driver_says_what_torch_says():
    name, capability = torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0)
    found = gpus()[0]
    assert (found.name, found.capability) == (name, "{}.{}".format(*capability))
    assert float(driver_cuda()) >= float(torch.version.cuda)
    choice = choose(surroundings())
    assert choice.cuda in (12, 13)


def test_the_doctor_runs_an_engine_on_the_gpu(tmp_path, target):
    found = diagnose(Library(tmp_path), DEVICE)
    assert found.facts["tensorrt_rtx"].endswith("ran it: right")


def test_bench_compares_with_torch(tmp_path, target):
    def run(*words):
        command = [sys.executable, "-m", "extension", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    model = tmp_path / "a.safetensors"
    run("make-checkpoint", "--family", "sd15", str(model))
    out = run("bench", str(model), "--size", "256x256", "--baked", "--rounds", "2",
              "--library", str(tmp_path / "library"))  # fmt: skip
    assert "shared engine" in out
    assert "baked engine" in out
    assert "computes something else" not in out
