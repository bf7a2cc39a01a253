"""Baked engines in a host: recognised by the content of live weights, verified without them."""

from __future__ import annotations

import shutil
import time

import pytest
import torch

from extension.baking import LiveFingerprint, bake, fingerprint_of
from extension.engine_state import State
from extension.errors import CancelledError, EngineError
from extension.library import Library
from extension.onnx_export import export_pair
from extension.ops_torch import TorchUNet
from extension.progress import CancelToken
from extension.room import Room
from extension.serving import Target, load_engine, verify
from extension.shapes import Shape
from tests.support_ldm import ldm_unet
from tests.support_models import SMALL, random_inputs, random_weights, relative_l2

ARCH = SMALL["sd15"]
SHAPE = Shape(batch=1, height=8, width=8)
TARGET = Target(device="cpu", dtype="fp32")
TOLERANCE = 1e-4  # fp32 sums in another order, through strong weights


@pytest.fixture(scope="module")
def baked(tmp_path_factory):
    library = Library(tmp_path_factory.mktemp("baked"))
    entry = bake(
        library, ARCH, random_weights(ARCH), SHAPE, TARGET, label="a", source={"checkpoint": "a"}
    )
    return library, entry


@pytest.fixture
def room(tmp_path, baked):
    shutil.copytree(baked[0].folder, tmp_path / "library")
    room = Room(tmp_path / "library")
    yield room
    room.close()


def serve(served, epoch):
    inputs = random_inputs(ARCH, SHAPE)
    args = [inputs[name] for name in ("x", "timesteps", "context")]
    return served.serve(*args, None, None, epoch=epoch, features=[])


def until_served(served, epoch):
    """Calls of one epoch until an engine serves; what it computed."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        out = serve(served, epoch)
        if out is not None:
            return out
        time.sleep(0.05)
    raise AssertionError(served.sentence)


def exact(weights):
    inputs = random_inputs(ARCH, SHAPE)
    return TorchUNet(ARCH, weights)(*(inputs[n] for n in ("x", "timesteps", "context")))


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_live_weights_have_the_fingerprint_of_their_export(tmp_path, dtype):
    weights = random_weights(ARCH)
    pair = export_pair(weights, ARCH, tmp_path, dtype=dtype)
    kind = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    assert fingerprint_of(weights, kind) == pair.fingerprint
    live = dict(ldm_unet(ARCH, weights).named_parameters())
    assert fingerprint_of({name: live[name] for name in weights}, kind) == pair.fingerprint
    weights["out.2.bias"] = weights["out.2.bias"] + 1
    assert fingerprint_of(weights, kind) != pair.fingerprint


def test_it_serves_the_weights_that_it_holds_and_no_others(room):
    unet = ldm_unet(ARCH, random_weights(ARCH))
    served = room.model(unet)
    served.policy = "never"
    assert relative_l2(until_served(served, 1), exact(random_weights(ARCH))) <= TOLERANCE
    assert room.library.entries(TARGET.machine)[0].state is State.READY
    with torch.no_grad():
        unet.out[2].bias += 1
    for _ in range(5):
        assert serve(served, 2) is None
        time.sleep(0.05)
    with torch.no_grad():
        unet.out[2].bias -= 1
    unet.load_state_dict(random_weights(ARCH))
    assert relative_l2(until_served(served, 3), exact(random_weights(ARCH))) <= TOLERANCE


def test_a_tier_keeps_to_its_engines(room):
    unet = ldm_unet(ARCH, random_weights(ARCH))  # only weakly held by what serves it
    served = room.model(unet)
    served.policy, served.tier = "wait", "baked"
    until_served(served, 1)
    assert len(room.library.entries(TARGET.machine)) == 1
    served.tier = "shared"
    assert serve(served, 1) is not None
    used = served.routed.counters.to_json()["engines"]
    assert len(used) == 2
    room.pool.remove(next(s for s in used if room.library.entry(s, None).key.weights == "shared"))
    served.policy = "never"
    room.tiers.failed.update(dict.fromkeys(used, "not now"))
    assert serve(served, 1) is None
    assert "no engine" in served.sentence


def test_an_engine_of_other_weights_does_not_keep_a_shared_one_away(room):
    unet = ldm_unet(ARCH, random_weights(ARCH))
    served = room.model(unet)
    served.policy = "never"
    until_served(served, 1)
    other = ldm_unet(ARCH, random_weights(ARCH, 5))
    served = room.model(other)
    served.policy = "wait"
    assert relative_l2(serve(served, 1), exact(random_weights(ARCH, 5))) <= TOLERANCE


def test_the_folder_is_read_again_only_when_it_changed(room, monkeypatch):
    """Some epochs last one call: a call must not cost a walk over the library."""
    unet, walks = ldm_unet(ARCH, random_weights(ARCH)), []
    entries = Library.entries
    monkeypatch.setattr(Library, "entries", lambda *a: walks.append(1) or entries(*a))
    served = room.model(unet)
    served.policy = "never"
    for epoch in range(5):
        serve(served, epoch)
    assert len(walks) == 1
    bake(room.library, ARCH, random_weights(ARCH, 3), SHAPE, TARGET, label="b", source={})
    serve(served, 9)
    assert len(walks) == 2
    assert len(served._baked) == 2


def test_epochs_of_one_call_start_nothing():
    weights = random_weights(ARCH)
    live = LiveFingerprint(weights)
    for epoch in range(5):
        assert live.get(epoch, torch.float32) is None
        assert live._thread is None


def test_weights_that_change_while_they_are_read_have_no_fingerprint_of_either():
    """A new epoch stops the computation for the old one."""
    weights, reads = random_weights(ARCH), []

    class Slow(dict):
        def __getitem__(self, name):
            reads.append(name)
            time.sleep(0.002)
            return weights[name]

    live = LiveFingerprint(Slow(weights))
    live.get(1, torch.float32)
    live.get(1, torch.float32)
    live.get(2, torch.float32)
    time.sleep(0.1)
    done = len(reads)
    time.sleep(0.1)
    assert len(reads) == done < len(weights)
    assert live.get(2, torch.float32) is None


def copied(baked, folder):
    library = Library(folder)
    shutil.copytree(baked[0].folder, folder)
    return library, library.entry(baked[1].stem, TARGET.machine)


def test_verified_without_its_weights_and_refused_when_wrong(baked, tmp_path):
    library, entry = copied(baked, tmp_path / "copy")
    engine = load_engine(library, entry, TARGET)
    result = verify(library, entry, engine, ARCH, None, TARGET)
    assert 0 < result.worst <= TOLERANCE
    run = engine.run
    engine.run = lambda inputs: run(inputs) * 1.1
    assert not verify(library, entry, engine, ARCH, None, TARGET).passed
    engine.close()


@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "another engine's"])
def test_without_references_it_stays_out_of_service(room, damage, tmp_path):
    path = next(room.library.folder.glob("*.cal.safetensors"))
    if damage == "missing":
        path.unlink()
    elif damage == "another engine's":
        other = Library(tmp_path / "other")
        shape = Shape(batch=2, height=8, width=8)
        entry = bake(other, ARCH, random_weights(ARCH), shape, TARGET, label="a", source={})
        shutil.copy(other.calibration_path(entry.stem), path)
    else:
        path.write_bytes(path.read_bytes()[: 0 if damage == "empty" else 1000])
    unet = ldm_unet(ARCH, random_weights(ARCH))  # only weakly held by what serves it
    served = room.model(unet)
    served.policy = "never"
    deadline = time.monotonic() + 60
    while not room.tiers.failed:
        assert serve(served, 1) is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert serve(served, 1) is None
    (reason,) = room.tiers.failed.values()
    assert "references" in reason


def test_a_cancelled_bake_leaves_nothing(tmp_path):
    library, token = Library(tmp_path), CancelToken()
    with pytest.raises(CancelledError):
        bake(
            library, ARCH, random_weights(ARCH), SHAPE, TARGET, label="a", source={},
            on_progress=lambda progress: token.cancel(), cancel=token,
        )  # fmt: skip
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == []


def test_removal_takes_the_references_too(room):
    stem = room.library.entries(TARGET.machine)[0].stem
    room.library.remove(stem)
    assert not list(room.library.folder.glob(f"{stem}*"))


def test_baking_again_finds_the_engine_and_mends_its_references(baked, tmp_path):
    library, entry = copied(baked, tmp_path / "copy")
    before = library.engine_path(entry.stem).stat().st_mtime_ns
    library.calibration_path(entry.stem).unlink()
    again = bake(library, ARCH, random_weights(ARCH), SHAPE, TARGET, label="a", source={})
    assert again.stem == entry.stem
    assert library.engine_path(entry.stem).stat().st_mtime_ns == before
    assert library.calibration_path(entry.stem).exists()


def test_an_engine_without_references_says_what_to_do(baked, tmp_path):
    copy, entry = copied(baked, tmp_path / "copy")
    copy.calibration_path(entry.stem).unlink()
    engine = load_engine(copy, entry, TARGET)
    with pytest.raises(EngineError, match="build it again"):
        verify(copy, entry, engine, ARCH, None, TARGET)
    engine.close()
