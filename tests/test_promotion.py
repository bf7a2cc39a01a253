"""Weights that have served for long get an engine with them baked in, where a user wants that."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import pytest
import torch

from extension.baking import UNKNOWN, bake
from extension.errors import CancelledError
from extension.library import Library
from extension.live import LiveWeights
from extension.room import Room
from extension.serving import Target, load_engine, verify
from extension.tier_settings import TierSettings
from extension.worker_tasks import SAFETENSORS
from tests.support_ldm import ldm_unet
from tests.support_models import random_weights, relative_l2
from tests.test_baking import ARCH, SHAPE, TOLERANCE, exact, serve, until_served

AFTER = 6


def calls(served, epoch, count):
    """Results of calls, with time for what they begin in the background."""
    found = []
    for _ in range(count):
        found.append(serve(served, epoch))
        time.sleep(0.02)
    return found


@pytest.fixture
def make(tmp_path):
    rooms = []

    def room(**settings):
        rooms.append(Room(tmp_path, TierSettings(after_calls=1, instant=False, **settings)))
        return rooms[0]

    yield room
    rooms[0].close()


def baked(room):
    """Whole engines: one that is being published has no manifest yet."""
    whole = [entry for entry in room.library.entries() if entry.manifest is not None]
    return [entry for entry in whole if entry.key.weights == "baked"]


def until_baked(room, served, epoch):
    """Calls until a baked engine is there and nothing is on its way; every result."""
    deadline, found = time.monotonic() + 120, []
    while not baked(room) or room.tiers.wanted:
        assert time.monotonic() < deadline, room.tiers.failed
        found += calls(served, epoch, 1)
    return found


def test_weights_that_serve_for_long_are_baked_in(make):
    room, weights = make(promote_after=AFTER), random_weights(ARCH)
    unet = ldm_unet(ARCH, weights)
    served = room.model(unet)
    until_served(served, 1)
    expected = exact(weights)
    assert all(relative_l2(out, expected) <= TOLERANCE for out in until_baked(room, served, 1))
    (entry,) = baked(room)
    room.counters.reset()
    assert relative_l2(serve(served, 1), expected) <= TOLERANCE
    assert room.counters.to_json()["engines"] == {entry.stem: 1}
    assert entry.manifest.source == {"promoted": True}
    assert entry.manifest.model["prediction"] == UNKNOWN

    unet.out[2].bias.data.add_(1)  # a LoRA: the shared engine serves, without a build
    out = serve(served, 2)
    assert relative_l2(out, expected) > 100 * TOLERANCE
    assert relative_l2(out, exact({**weights, "out.2.bias": unet.out[2].bias})) <= TOLERANCE
    assert room.counters.to_json()["engines"][entry.stem] == 1


@pytest.mark.parametrize("settings", [{}, {"promote_after": 10_000}])
def test_no_weights_are_baked_in_without_being_asked_for(make, settings):
    room = make(**settings)
    unet = ldm_unet(ARCH, random_weights(ARCH))  # only weakly held by what serves it
    served = room.model(unet)
    until_served(served, 1)
    calls(served, 1, 3 * AFTER)
    assert room.tiers.wait(60)
    assert baked(room) == []


@pytest.mark.parametrize("why", ["policy", "memory", "disk"])
def test_nothing_is_baked_where_it_must_not(make, monkeypatch, why):
    room = make(promote_after=AFTER)
    unet = ldm_unet(ARCH, random_weights(ARCH))  # only weakly held by what serves it
    served = room.model(unet)
    until_served(served, 1)
    assert room.tiers.wait(60)
    if why == "policy":
        room.tiers.settings = TierSettings(policy="never", promote_after=AFTER)
    elif why == "memory":
        monkeypatch.setattr("extension.promotion.free_bytes", lambda device: 1000)
    else:
        monkeypatch.setattr("extension.tiers.shortage", lambda folder: "no room")
    assert None not in calls(served, 1, 3 * AFTER)
    assert room.tiers.wait(60)
    assert baked(room) == []


def test_weights_that_change_while_they_are_exported_are_baked_later(make, monkeypatch):
    room, weights = make(promote_after=AFTER), random_weights(ARCH)
    unet = ldm_unet(ARCH, weights)
    served = room.model(unet)
    until_served(served, 1)
    assert room.tiers.wait(60)
    real, changed = bake, []

    def beside_the_host(*args, **options):
        if not changed:
            changed.append(True)
            with torch.no_grad():
                unet.out[2].bias.add_(1)
            try:
                return real(*args, **options)
            finally:
                unet.load_state_dict(weights)
        return real(*args, **options)

    monkeypatch.setattr("extension.promotion.bake", beside_the_host)
    deadline = time.monotonic() + 60
    while not changed or room.tiers.wanted:
        assert time.monotonic() < deadline
        calls(served, 1, 1)
    assert baked(room) == []
    assert room.tiers.failed == {}
    until_baked(room, served, 1)


def test_a_model_that_is_gone_is_no_failure(make, monkeypatch):
    room = make(promote_after=AFTER)
    unet = ldm_unet(ARCH, random_weights(ARCH))
    served = room.model(unet)
    until_served(served, 1)
    assert room.tiers.wait(60)
    real, asked = bake, []

    def after_the_end(library, arch, weights, *args, **options):
        asked.append(True)
        return real(library, arch, LiveWeights(torch.nn.Module(), arch), *args, **options)

    monkeypatch.setattr("extension.promotion.bake", after_the_end)
    while not asked:
        calls(served, 1, 1)
    assert room.tiers.wait(60)
    assert (room.tiers.failed, baked(room)) == ({}, [])


class Restless(dict):
    """Weights that another LoRA replaces as soon as they were read."""

    def __init__(self, weights):
        super().__init__(weights)
        self.read = set()

    def __getitem__(self, name):
        tensor = super().__getitem__(name)
        if name in self.read:
            return tensor + 1
        self.read.add(name)
        return tensor


def test_an_engine_is_verified_by_what_was_baked_in(tmp_path):
    library, target = Library(tmp_path), Target(device="cpu", dtype="fp32")
    weights = random_weights(ARCH)
    entry = bake(library, ARCH, Restless(weights), SHAPE, target, label="a", source={})
    engine = load_engine(library, entry, target)
    result = verify(library, entry, engine, ARCH, None, target)
    result.require(entry.stem)
    engine.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_exported_pair_is_closed_before_it_is_deleted(tmp_path, monkeypatch):
    """Windows deletes no mapped file: a cancelled job would leave as much as a checkpoint."""
    mapped = {}

    def cancelled(path, arch, weights, shape, **settings):
        assert next(iter(weights.values())).numel()
        mapped["read"] = SAFETENSORS in Path("/proc/self/maps").read_text()
        raise CancelledError("stop")

    def delete(folder, **settings):
        mapped["deleted"] = SAFETENSORS in Path("/proc/self/maps").read_text()
        rmtree(folder, **settings)

    rmtree = shutil.rmtree
    monkeypatch.setattr("extension.baking.write_calibration", cancelled)
    monkeypatch.setattr("extension.baking.shutil.rmtree", delete)
    target = Target(device="cpu", dtype="fp32")
    with pytest.raises(CancelledError):
        bake(Library(tmp_path), ARCH, random_weights(ARCH), SHAPE, target, label="a", source={})
    assert mapped == {"deleted": False, "read": True}
