"""Backends on real graphs: ONNX Runtime computes, TensorRT-RTX builds without a GPU."""

from __future__ import annotations

import re
import weakref
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
import torch

from extension.architecture import FULL
from extension.binding import Binding
from extension.engine import BACKENDS, get_backend
from extension.engine.interface import BuildSpec
from extension.engine.trt_build import takes_hwc8
from extension.errors import BuildError, EngineError, SettingError
from extension.onnx_export import export_pair
from extension.onnx_graph import emit_graph
from extension.ops_torch import TorchUNet
from extension.parity import LEAST_LIMIT, TIMESTEPS, check, strong_weights
from extension.shapes import Shape
from tests.support_models import SMALL, control_of, random_inputs, random_weights, relative_l2

SHAPE = Shape(batch=2, height=8, width=8, control=True)
CPU = torch.device("cpu")


def emit(tmp_path, arch, shape=SHAPE, dtype="fp32"):
    path = tmp_path / "unet.onnx"
    onnx.save(emit_graph(arch, shape, dtype=dtype), path)
    return path


def build(tmp_path, backend, arch, *, dtype="fp32", shape=SHAPE, **spec):
    model = emit(tmp_path, arch, shape, dtype)
    out = tmp_path / "unet.engine"
    capabilities = spec.pop("capabilities", ("cpu",))
    fields = BuildSpec(
        weights="shared",
        capabilities=capabilities,
        io_dtype=dtype,
        weight_inputs=tuple(arch.parameters()),
        **spec,
    )
    seen = []
    result = get_backend(backend).build(model, fields, out, lambda f, text: seen.append((f, text)))
    assert [fraction for fraction, _ in seen] == sorted(fraction for fraction, _ in seen)
    return out, result


@pytest.fixture(scope="module")
def small_engine(tmp_path_factory):
    arch = SMALL["sdxl"]
    out, _ = build(tmp_path_factory.mktemp("engine"), "onnxruntime", arch)
    engine = get_backend("onnxruntime").load(out.read_bytes(), device="cpu")
    yield arch, engine
    engine.close()
    engine.close()


def test_onnxruntime_reads_torch_memory(small_engine):
    """A LoRA change is a pointer change: A, B, A gives A's result bit for bit."""
    arch, engine = small_engine
    inputs = random_inputs(arch, SHAPE)
    results = []
    for seed in (0, 1, 0):
        weights = random_weights(arch, seed)
        Binding(engine, CPU).refresh(weights, epoch=seed)
        results.append(engine.run(inputs).clone())
        expected = TorchUNet(arch, weights)(
            inputs["x"], inputs["timesteps"], inputs["context"], inputs["y"], control_of(inputs)
        )
        assert relative_l2(results[-1], expected) <= 1e-5
    assert torch.equal(results[0], results[2])
    assert relative_l2(results[1], results[0]) > 0.1


def test_weights_changed_in_place_are_seen_at_once(small_engine):
    arch, engine = small_engine
    weights, inputs = random_weights(arch), random_inputs(arch, SHAPE)
    Binding(engine, CPU).refresh(weights, epoch=0)
    before = engine.run(inputs).clone()
    weights["out.2.bias"] += 1.0
    assert relative_l2(engine.run(inputs), before) > 0.1


def test_every_declared_tensor(small_engine):
    arch, engine = small_engine
    assert {n: s.shape for n, s in engine.weights.items()} == arch.parameters()
    assert list(engine.inputs)[:4] == ["x", "timesteps", "context", "y"]
    assert engine.outputs["out"].shape == (2, 4, 8, 8)
    assert {spec.dtype for spec in engine.inputs.values()} == {"fp32"}


def test_unbound_weights_are_an_error(tmp_path):
    arch = SMALL["two-levels"]
    out, _ = build(tmp_path, "onnxruntime", arch)
    engine = get_backend("onnxruntime").load(out.read_bytes(), device="cpu")
    with pytest.raises(EngineError, match="weights are not bound"):
        engine.run(random_inputs(arch, SHAPE))


def test_parity_passes_and_catches_each_kind_of_damage(small_engine):
    arch, engine = small_engine
    weights = random_weights(arch)
    result = check(engine, arch, SHAPE, weights, dtype="fp32", device="cpu")
    assert result.passed
    assert result.worst < 1e-5
    # The reference of a model with one wrong constant: heads, attention scale, resize order.
    for wrong in (replace(arch, head_channels=32),):
        result = check(engine, wrong, SHAPE, weights, dtype="fp32", device="cpu")
        assert not result.passed


def test_parity_keeps_the_copies_that_the_engine_reads(small_engine):
    """Freed copies are read as whatever takes their place: on a GPU they were infinite."""
    arch, engine = small_engine

    class Watched:
        def __init__(self):
            self.bound = {}
            self.seen = 0

        def __getattr__(self, name):
            return getattr(engine, name)

        def bind(self, weights):
            self.bound.update({name: weakref.ref(tensor) for name, tensor in weights.items()})
            engine.bind(weights)

        def run(self, inputs):
            assert all(reference() is not None for reference in self.bound.values())
            self.seen += 1
            return engine.run(inputs)

    watched = Watched()
    # Another dtype than the engine's, so that every weight is a copy.
    weights = {name: tensor.half() for name, tensor in random_weights(arch).items()}
    result = check(watched, arch, SHAPE, weights, dtype="fp32", device="cpu")
    assert result.passed
    assert watched.seen == 2 * len(TIMESTEPS)
    assert watched.bound["out.2.bias"]() is None  # nothing is kept afterwards


def test_parity_notices_a_wrong_bias_or_scale(small_engine):
    """Whichever kind of vector a compiler drops, the random weights show it."""
    arch, engine = small_engine
    weights = strong_weights(arch, torch.float32, CPU)
    inputs = random_inputs(arch, SHAPE)
    Binding(engine, CPU).refresh(weights, epoch=0)
    right = engine.run(inputs).clone()
    vectors = {name.split(".", 1)[1] for name, t in weights.items() if t.ndim == 1}
    kinds = {re.sub(r"^.*transformer_blocks\.\d+\.|^[\d.]+", "", name) for name in vectors}
    assert len(kinds) > 20
    for suffix in sorted(kinds):
        value = 1.0 if re.search(r"(norm\d?|layers\.0|out\.0)\.weight$", suffix) else 0.0
        dropped = {
            n: torch.full_like(t, value) if n.endswith(suffix) else t for n, t in weights.items()
        }
        Binding(engine, CPU).refresh(dropped, epoch=suffix)
        assert relative_l2(engine.run(inputs), right) > 3 * LEAST_LIMIT, suffix


@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt_rtx"])
def test_a_graph_that_is_none_is_refused_in_words(tmp_path, backend):
    pytest.importorskip(backend)
    model, out = tmp_path / "unet.onnx", tmp_path / "unet.engine"
    graph = emit_graph(SMALL["two-levels"], SHAPE, dtype="fp32")
    graph.graph.node[3].op_type = "NoSuchOperator"
    onnx.save(graph, model)
    spec = BuildSpec(weights="shared", capabilities=("8.9",), io_dtype="fp32")
    with pytest.raises(BuildError, match="NoSuchOperator"):
        get_backend(backend).build(model, spec, out, lambda fraction, text: None)
    assert list(tmp_path.iterdir()) == [model]


@pytest.mark.parametrize(
    ("dtype", "conv_format"),
    [("fp16", "linear"), ("fp16", "hwc8"), ("bf16", "hwc8"), ("fp32", "linear")],
)
def test_tensorrt_rtx_builds_without_a_gpu(tmp_path, dtype, conv_format):
    pytest.importorskip("tensorrt_rtx")
    out, result = build(
        tmp_path,
        "tensorrt_rtx",
        SMALL["two-levels"],
        dtype=dtype,
        capabilities=("8.9", "12.0"),
        conv_format=conv_format,
    )
    assert out.stat().st_size > 10_000
    assert result.activation_bytes > 0


def test_tensorrt_rtx_reads_a_graph_by_a_plain_name(tmp_path, monkeypatch):
    """Windows opens no path beyond the code page, and a user's folder may be anywhere."""
    trt = pytest.importorskip("tensorrt_rtx")
    read, folder = [], tmp_path / "Ünïcode モデル"

    class Spy(trt.OnnxParser):
        def parse_from_file(self, name):
            read.append(name)
            return super().parse_from_file(name)

    monkeypatch.setattr(trt, "OnnxParser", Spy)
    folder.mkdir()
    before = Path.cwd()
    out, _ = build(folder, "tensorrt_rtx", SMALL["two-levels"], capabilities=("8.9",))
    assert out.stat().st_size > 10_000
    assert len(read) == 1 and read[0].isascii()
    assert Path.cwd() == before


@pytest.mark.parametrize("name", SMALL)
def test_tensorrt_rtx_takes_every_family_at_odd_sizes(tmp_path, name):
    pytest.importorskip("tensorrt_rtx")
    shape = Shape(batch=1, height=13, width=21, tokens=154, control=True)
    for resize in ("before", "after") if name == "sd15" else ("before",):
        arch = replace(SMALL[name], resize=resize)
        out, _ = build(
            tmp_path, "tensorrt_rtx", arch, shape=shape, dtype="fp16", capabilities=("8.9",)
        )
        assert out.stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_full_size_shared_engines_build_for_sm89_on_the_cpu(tmp_path, name):
    pytest.importorskip("tensorrt_rtx")
    side = 128 if name == "sdxl" else 64
    shape = Shape(batch=2, height=side, width=side)
    out, result = build(
        tmp_path,
        "tensorrt_rtx",
        FULL[name],
        shape=shape,
        dtype="fp16",
        capabilities=("8.9",),
        conv_format="hwc8",
    )
    # Without weights: 1.7 and 5.1 GB of them would not fit into this.
    assert 10e6 < out.stat().st_size < 60e6
    assert result.activation_bytes > 50e6


def test_hwc8_is_for_3x3_convolutions_of_whole_groups():
    assert takes_hwc8((320, 320, 3, 3))
    assert not takes_hwc8((320, 4, 3, 3))
    assert not takes_hwc8((320, 320, 1, 1))
    assert not takes_hwc8((320, 320))


def test_unknown_backends_devices_and_settings():
    with pytest.raises(SettingError, match="16-bit"):
        BuildSpec(weights="shared", capabilities=("8.9",), conv_format="hwc8", io_dtype="fp32")
    with pytest.raises(SettingError, match="int8"):
        BuildSpec(weights="shared", capabilities=("8.9",), io_dtype="int8")
    with pytest.raises(SettingError, match="openvino"):
        get_backend("openvino")
    with pytest.raises(EngineError, match="cuda:0"):
        get_backend("onnxruntime").load(b"", device="cuda:0")
    assert {get_backend(name).name for name in BACKENDS} == set(BACKENDS)


class Distinct(dict):
    """Tensors that share pools, made different, since a builder stores equal ones once."""

    def __getitem__(self, name):
        tensor = super().__getitem__(name)
        return tensor.flatten().roll(list(self).index(name)).view(tensor.shape)


@pytest.mark.slow
def test_a_full_size_baked_engine_builds_from_its_pair(tmp_path):
    """SD1.5 with its weights inside; views of few random pools keep the test itself small."""
    pytest.importorskip("tensorrt_rtx")
    arch = FULL["sd15"]
    weights = Distinct(strong_weights(arch, torch.float16, CPU))
    shape = Shape(batch=2, height=64, width=64)
    export_pair(weights, arch, tmp_path, dtype="fp16", shape=shape)
    spec = BuildSpec(weights="baked", capabilities=("8.9",), io_dtype="fp16")
    out = tmp_path / "unet.engine"
    backend = get_backend("tensorrt_rtx")
    backend.build(tmp_path / "unet.onnx", spec, out, lambda fraction, text: None)
    assert out.stat().st_size > sum(2 * t.numel() for t in weights.values()) * 0.98
