"""Pointers bound, copies accounted for, epochs respected, nothing kept alive."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from extension.binding import Binding, fits
from extension.engine.interface import TensorSpec
from extension.errors import EngineError

CPU = torch.device("cpu")


class RecordingEngine:
    """Keeps the pointers that it was told to read, as a real engine does."""

    def __init__(self, **specs):
        self.weights = specs
        self.pointers = {}
        self.binds = 0

    def bind(self, weights):
        self.binds += 1
        self.pointers.update({name: tensor.data_ptr() for name, tensor in weights.items()})


def spec(*shape, dtype="fp32", layout="linear"):
    return TensorSpec(dtype=dtype, shape=shape, format=layout)


def test_fitting_tensors_are_read_in_place():
    engine = RecordingEngine(a=spec(4, 3), b=spec(5))
    weights = {"a": torch.randn(4, 3), "b": torch.nn.Parameter(torch.randn(5))}
    binding = Binding(engine, CPU)
    report = binding.refresh(weights, epoch=0)
    assert (report.bound, report.staged, report.changed, report.staged_bytes) == (2, 0, 2, 0)
    assert engine.pointers == {name: tensor.data_ptr() for name, tensor in weights.items()}
    # Contents may change without notice: the pointer is the same memory.
    assert binding.refresh(weights, epoch=1).changed == 0
    assert engine.binds == 1


def test_a_replaced_tensor_is_bound_again_even_within_an_epoch():
    engine = RecordingEngine(a=spec(4))
    weights = {"a": torch.zeros(4)}
    binding = Binding(engine, CPU)
    binding.refresh(weights, epoch=0)
    weights["a"] = torch.ones(4)
    assert binding.refresh(weights, epoch=0).changed == 1
    assert engine.pointers["a"] == weights["a"].data_ptr()


@pytest.mark.parametrize(
    ("tensor", "wanted"),
    [
        (torch.zeros(4, 3).half(), spec(4, 3)),
        (torch.zeros(3, 4).t(), spec(4, 3)),
        (torch.zeros(8, 6)[:, ::2][::2], spec(4, 3)),
        (torch.zeros(2, 8, 3, 3), spec(2, 8, 3, 3, layout="hwc8")),
        (torch.zeros(4, 3, device="meta"), spec(4, 3)),
    ],
)
def test_what_does_not_fit(tensor, wanted):
    assert not fits(tensor, wanted, CPU)


def test_channels_last_is_hwc8():
    tensor = torch.randn(2, 8, 3, 3).to(memory_format=torch.channels_last)
    assert fits(tensor, spec(2, 8, 3, 3, layout="hwc8"), CPU)
    assert not fits(tensor, spec(2, 8, 3, 3), CPU)


def test_copies_follow_the_epoch_not_the_call():
    engine = RecordingEngine(a=spec(4, 3), b=spec(5))
    half = torch.randn(4, 3).half()
    weights = {"a": half, "b": torch.randn(5)}
    binding = Binding(engine, CPU)
    report = binding.refresh(weights, epoch=0)
    assert (report.bound, report.staged, report.staged_bytes) == (1, 1, 48)
    copy = binding._state.staged["a"].copy
    assert torch.equal(copy, half.float())
    half.mul_(2)
    binding.refresh(weights, epoch=0)
    assert torch.equal(copy * 2, half.float())  # the same epoch: still the old contents
    binding.refresh(weights, epoch=1)
    assert torch.equal(copy, half.float())  # refreshed in place, so the pointer stays
    assert engine.pointers["a"] == copy.data_ptr()


def test_a_replaced_source_is_staged_again_within_an_epoch():
    engine = RecordingEngine(a=spec(4))
    binding = Binding(engine, CPU)
    weights = {"a": torch.zeros(4).half()}
    binding.refresh(weights, epoch=0)
    weights["a"] = torch.ones(4).half()
    binding.refresh(weights, epoch=0)
    assert torch.equal(binding._state.staged["a"].copy, torch.ones(4))


def test_copies_go_when_a_fitting_tensor_comes():
    engine = RecordingEngine(a=spec(4))
    binding = Binding(engine, CPU)
    binding.refresh({"a": torch.zeros(4).half()}, epoch=0)
    tensor = torch.zeros(4)
    report = binding.refresh({"a": tensor}, epoch=0)
    assert (report.bound, report.staged_bytes) == (1, 0)
    assert engine.pointers["a"] == tensor.data_ptr()


def test_the_budget_for_copies_is_a_limit():
    engine = RecordingEngine(a=spec(4), b=spec(4))
    weights = {"a": torch.zeros(4).half(), "b": torch.zeros(4).half()}
    with pytest.raises(EngineError, match="'b'"):
        Binding(engine, CPU, staging_budget=16).refresh(weights, epoch=0)
    assert Binding(engine, CPU, staging_budget=32).refresh(weights, epoch=0).staged == 2


@pytest.mark.parametrize("weights", [{}, {"a": torch.zeros(5)}, {"a": torch.zeros(4, 1)}])
def test_missing_and_misshapen_weights_are_named(weights):
    with pytest.raises(EngineError, match="'a'"):
        Binding(RecordingEngine(a=spec(4)), CPU).refresh(weights, epoch=0)


def test_host_tensors_are_not_kept_alive():
    engine = RecordingEngine(a=spec(4), b=spec(4))
    weights = {"a": torch.zeros(4), "b": torch.zeros(4).half()}
    binding = Binding(engine, CPU)
    binding.refresh(weights, epoch=0)
    references = [weakref.ref(tensor) for tensor in weights.values()]
    weights.clear()
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    assert binding.staged_bytes == 16
    binding.release()
    assert binding.staged_bytes == 0


def test_copies_made_in_inference_mode_can_be_changed_outside_of_it():
    """Hosts differ, and switch it on and off: every order of modes works."""
    held = {}

    class Reading(RecordingEngine):
        def bind(self, weights):
            super().bind(weights)
            held.update(weights)

    binding = Binding(Reading(a=spec(4, 3)), CPU)
    source = torch.randn(4, 3).double()
    for epoch, inference in enumerate((True, False, True, False)):
        with torch.inference_mode(inference):
            source = source + 1
            binding.refresh({"a": source}, epoch)
        assert torch.equal(held["a"].double(), source.float().double())
