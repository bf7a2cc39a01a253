"""Calls through real engines: split, padded, repeated, set aside; the host for everything else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from extension.building import BuildRequest, build_engine
from extension.engine import get_backend
from extension.engine_state import State
from extension.errors import EngineError, ParityError
from extension.library import Library
from extension.memory import shortfall
from extension.ops_torch import TorchUNet
from extension.routed import RoutedUNet
from extension.router import Reason
from extension.serving import (
    Target,
    build_shared,
    candidate_of,
    load_engine,
    serve_with,
    verify,
)
from extension.shapes import Shape
from tests.support_models import SMALL, control_of, random_inputs, random_weights, relative_l2

ARCH = SMALL["sdxl"]
TARGET = Target(device="cpu")
SHAPES = {
    "b2": Shape(batch=2, height=8, width=8, tokens=154),
    "control": Shape(batch=2, height=8, width=8, control=True),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    library = Library(tmp_path_factory.mktemp("library"))
    for shape in SHAPES.values():
        build_shared(library, ARCH, shape, TARGET)
    return library


class Served:
    """A routed UNet with the engines of ``names``, and what the host was asked."""

    def __init__(self, library, *names, wrap=lambda engine: engine, seed=0):
        self.weights = random_weights(ARCH, seed)
        self.asked = []
        exact = TorchUNet(ARCH, self.weights)

        def host(*args):
            self.asked.append(args)
            return exact(*args)

        self.exact = exact
        self.unet = RoutedUNet(ARCH, self.weights, host)
        for name in names:
            entry = library.find(TARGET.key(ARCH, SHAPES[name]))
            engine = wrap(load_engine(library, entry, TARGET))
            self.unet.add_engine(candidate_of(entry, TARGET, ready=True), engine)

    def call(self, shape, *, seed=1, **options):
        inputs = random_inputs(ARCH, shape, seed)
        args = [inputs[n] for n in ("x", "timesteps", "context", "y")] + [control_of(inputs)]
        return self.unet(*args, **options), self.exact(*args)

    def reasons(self):
        return {reason["code"] for reason in self.unet.counters.to_json()["reasons"]}


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("tokens", [77, 154])
def test_any_batch_and_every_divisor_of_the_tokens(library, batch, tokens):
    served = Served(library, "b2")
    out, expected = served.call(Shape(batch=batch, height=8, width=8, tokens=tokens))
    assert out.shape == expected.shape
    assert relative_l2(out, expected) <= 1e-5
    assert served.asked == []
    assert served.unet.counters.totals == (1, 0)


def test_results_do_not_share_a_buffer(library):
    """A caller may keep the result of one call over the next."""
    served = Served(library, "b2")
    shape = Shape(batch=2, height=8, width=8)
    first, expected = served.call(shape, seed=1)
    served.call(shape, seed=2)
    assert relative_l2(first, expected) <= 1e-5


@pytest.mark.parametrize(
    "shape",
    [
        Shape(batch=2, height=8, width=16),
        Shape(batch=2, height=16, width=8),
        Shape(batch=2, height=8, width=8, tokens=231),
        Shape(batch=2, height=8, width=8, control=True),
    ],
)
def test_what_no_engine_can_do_goes_to_the_host(library, shape):
    served = Served(library, "b2")
    out, expected = served.call(shape)
    assert torch.equal(out, expected)
    assert len(served.asked) == 1
    assert served.unet.counters.totals == (0, 1)
    assert "1 to the host" in served.unet.counters.sentence


def test_control_engines_serve_with_and_without_control(library):
    served = Served(library, "control")
    for control in (True, False):
        out, expected = served.call(Shape(batch=2, height=8, width=8, control=control))
        assert relative_l2(out, expected) <= 1e-5
    assert served.unet.counters.totals == (2, 0)


def test_control_moves_the_result_and_lists_are_left_as_they_were(library):
    served = Served(library, "control")
    inputs = random_inputs(ARCH, SHAPES["control"])
    control = control_of(inputs)
    args = [inputs[n] for n in ("x", "timesteps", "context", "y")]
    count = len(control.output)
    with_control, without = served.unet(*args, control), served.unet(*args, None)
    assert relative_l2(with_control, without) > 0.05
    assert len(control.output) == count
    # Missing and None entries are zeros, as hosts give them.
    partial = replace(control, input=[], output=[None, *control.output[1:]])
    out = served.unet(*args, partial)
    assert relative_l2(out, served.exact(*args, partial)) <= 1e-5


def test_active_features_go_to_the_host(library):
    served = Served(library, "b2")
    served.call(Shape(batch=2, height=8, width=8), features=["token merging"])
    assert served.unet.counters.totals == (0, 1)
    assert "token merging" in served.unet.counters.sentence


def test_a_lora_change_is_no_build(library):
    served = Served(library, "b2")
    shape = Shape(batch=2, height=8, width=8)
    a, _ = served.call(shape)
    other = random_weights(ARCH, seed=9)
    served.unet.set_weights(other, epoch=1)
    inputs = random_inputs(ARCH, shape)
    args = [inputs[n] for n in ("x", "timesteps", "context", "y")]
    b = served.unet(*args)
    assert relative_l2(b, TorchUNet(ARCH, other)(*args)) <= 1e-5
    assert relative_l2(b, a) > 0.1
    served.unet.set_weights(served.weights, epoch=2)
    assert torch.equal(served.unet(*args), a)


NO_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB of "
    "which 512.00 MiB is free. Of the allocated memory 7.1 GiB is allocated by PyTorch."
)


class Broken:
    """An engine that goes wrong in one way."""

    def __init__(self, engine, how):
        self._engine, self._how = engine, how

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def run(self, inputs):
        out = self._engine.run(inputs)
        if self._how == "nan":
            out = out.clone()
            out[1, 2, 3, 4] = float("nan")
        elif self._how == "inf":
            out = out.clone()
            out[0, 0, 0, 0] = float("-inf")
        elif self._how == "raises":
            raise EngineError("The launch failed.")
        elif self._how == "memory":
            raise torch.cuda.OutOfMemoryError(NO_MEMORY)
        elif self._how == "cuda":
            raise RuntimeError("CUDA error: an illegal memory access\nCompile with ...")
        return out


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("nan", Reason.NOT_FINITE),
        ("inf", Reason.NOT_FINITE),
        ("raises", Reason.ENGINE_FAILED),
        ("memory", Reason.MEMORY),
        ("cuda", Reason.ENGINE_FAILED),
    ],
)
def test_an_engine_that_fails_is_set_aside_and_the_host_serves_that_very_call(library, how, reason):
    served = Served(library, "b2", wrap=lambda engine: Broken(engine, how))
    shape = Shape(batch=2, height=8, width=8)
    out, expected = served.call(shape)
    assert torch.equal(out, expected)
    assert served.reasons() == {reason.value}
    served.call(shape)
    assert served.unet.counters.totals == (0, 2)
    assert len(served.asked) == 2


def test_how_much_memory_was_missing_is_said(library):
    served = Served(library, "b2", wrap=lambda engine: Broken(engine, "memory"))
    served.call(Shape(batch=2, height=8, width=8))
    assert "2.00 GiB more were needed, 512.00 MiB were free" in served.unet.counters.sentence
    bare = torch.cuda.OutOfMemoryError("CUDA out of memory")
    assert shortfall(bare) == "not enough GPU memory"


def test_copies_that_do_not_fit_are_given_back_and_the_host_serves(library):
    """Half of the copies must not hold memory for an engine that can never run."""
    served = Served(library, "b2")
    (candidate,) = served.unet.pool.candidates()
    engine = served.unet.pool.use(candidate.stem).engine
    served.weights = {name: weight.double() for name, weight in served.weights.items()}
    half = sum(4 * weight.numel() for weight in served.weights.values()) // 2
    served.unet.pool.add(candidate, engine, staging_budget=half)
    served.unet.set_weights(served.weights, epoch=1)
    shape = Shape(batch=2, height=8, width=8)
    for _ in range(2):
        served.call(shape)
    assert served.unet.counters.totals == (0, 2)
    assert Reason.MEMORY.value in served.reasons()
    assert served.unet.pool.nbytes == 0
    assert served.unet.pool.lacking == {candidate.stem}


def test_a_weight_that_is_gone_goes_to_the_host(library):
    served = Served(library, "b2")
    served.unet.set_weights({n: t for n, t in served.weights.items() if n != "out.2.bias"}, epoch=1)
    out, expected = served.call(Shape(batch=2, height=8, width=8))
    assert torch.equal(out, expected)
    assert "out.2.bias" in served.unet.counters.sentence


def test_close_releases_everything(library):
    served = Served(library, "b2")
    shape = Shape(batch=2, height=8, width=8)
    served.call(shape)
    served.unet.close()
    served.unet.close()
    served.call(shape)
    assert len(served.asked) == 1


# Serving from a library


def test_an_engine_is_verified_once_and_then_ready(tmp_path):
    library = Library(tmp_path)
    shape = Shape(batch=1, height=8, width=8)
    entry = build_shared(library, ARCH, shape, TARGET)
    assert library.entry(entry.stem, TARGET.machine).state is State.UNVERIFIED
    unet = serve_with(library, entry, ARCH, random_weights(ARCH), TARGET)
    assert library.entry(entry.stem, TARGET.machine).state is State.READY
    figures = library.read_state(entry.stem)["parity"]
    assert len(figures) == 1
    assert figures[0]["worst_relative_l2"] < 1e-5
    unet.close()


def test_an_engine_of_another_graph_never_serves(tmp_path):
    """Bytes that are whole and signed, but compute something else: the gate catches them."""
    library = Library(tmp_path)
    shape = Shape(batch=1, height=8, width=8)
    wrong = replace(ARCH, head_channels=32)
    entry = build_shared(library, wrong, shape, TARGET)
    with pytest.raises(ParityError, match=entry.stem):
        serve_with(library, entry, ARCH, random_weights(ARCH), TARGET)
    assert library.entry(entry.stem, TARGET.machine).state is State.DAMAGED


def test_verify_records_what_it_found(tmp_path):
    library = Library(tmp_path)
    shape = Shape(batch=1, height=8, width=8)
    entry = build_shared(library, ARCH, shape, TARGET)
    engine = load_engine(library, entry, TARGET)
    result = verify(library, entry, engine, ARCH, random_weights(ARCH), TARGET)
    assert result.passed
    item = library.read_state(entry.stem)["parity"][0]
    assert item["backend_version"] == get_backend("onnxruntime").version()
    assert item["limit"] == result.limit


def test_baked_engines_serve_their_own_weights_only(tmp_path):
    from extension.onnx_export import export_pair

    library, shape = Library(tmp_path / "library"), Shape(batch=1, height=8, width=8)
    weights = random_weights(ARCH)
    pair = export_pair(weights, ARCH, tmp_path / "pair", dtype="fp32")
    key = TARGET.key(ARCH, shape, fingerprint=pair.fingerprint)
    request = BuildRequest(key=key, architecture=ARCH, label="x", pair=tmp_path / "pair")
    entry = build_engine(library, request)
    unet = serve_with(library, entry, ARCH, weights, TARGET, fingerprint=pair.fingerprint)
    inputs = random_inputs(ARCH, shape)
    args = [inputs[n] for n in ("x", "timesteps", "context", "y")]
    assert relative_l2(unet(*args), TorchUNet(ARCH, weights)(*args)) <= 1e-5
    other = random_weights(ARCH, 5)
    for fingerprint in (None, "ab" * 32):
        unet.set_weights(other, epoch=fingerprint, fingerprint=fingerprint)
        unet(*args)
    assert unet.counters.totals == (1, 2)
    unet.close()
