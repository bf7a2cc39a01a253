"""The ONNX interpreter against the torch one, through ONNX Runtime."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, numpy_helper

from extension.architecture import FULL, SD15, SDXL, TINY
from extension.errors import SettingError
from extension.onnx_graph import ExternalTensor, ExternalWeights, emit_graph
from extension.ops_torch import TorchUNet
from extension.shapes import Shape
from tests.support_models import SMALL, control_of, random_inputs, random_weights, relative_l2

# Both sides compute in fp32 and differ in the order of sums only: measured 1e-6 to 2e-6.
TOLERANCE = 1e-5
STATIC = (
    Shape(batch=2, height=16, width=24),
    Shape(batch=3, height=13, width=21, tokens=154, control=True),
)


def _session(model):
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def _run(session, inputs, weights):
    feeds = {name: tensor.numpy() for name, tensor in {**inputs, **weights}.items()}
    return torch.from_numpy(session.run(["out"], feeds)[0])


def _reference(arch, weights, inputs):
    return TorchUNet(arch, weights)(
        inputs["x"], inputs["timesteps"], inputs["context"], inputs.get("y"), control_of(inputs)
    )


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("shape", STATIC, ids=str)
@pytest.mark.parametrize("resize", ["before", "after"])
def test_static_graph_equals_torch(name, shape, resize):
    arch = replace(SMALL[name], resize=resize)
    weights, inputs = random_weights(arch), random_inputs(arch, shape)
    model = emit_graph(arch, shape, dtype="fp32")
    onnx.checker.check_model(model, full_check=True)
    actual = _run(_session(model), inputs, weights)
    assert relative_l2(actual, _reference(arch, weights, inputs)) <= TOLERANCE


@pytest.mark.parametrize("name", ["sd15", "sdxl", "no-middle"])
@pytest.mark.parametrize("resize", ["before", "after"])
def test_one_symbolic_graph_serves_every_size(name, resize):
    arch = replace(SMALL[name], resize=resize)
    weights = random_weights(arch)
    model = emit_graph(arch, dtype="fp32", control=True)
    onnx.checker.check_model(model, full_check=True)
    session = _session(model)
    for batch, height, width, tokens in ((1, 8, 8, 77), (3, 13, 21, 154), (2, 9, 32, 231)):
        shape = Shape(batch=batch, height=height, width=width, tokens=tokens, control=True)
        inputs = random_inputs(arch, shape)
        actual = _run(session, inputs, weights)
        assert relative_l2(actual, _reference(arch, weights, inputs)) <= TOLERANCE


def test_weights_in_a_safetensors_file(tmp_path):
    """External data by offset and length: ONNX Runtime computes with the file's bytes."""
    from safetensors.torch import save_file

    arch, shape = SMALL["sd15"], STATIC[0]
    weights, inputs = random_weights(arch), random_inputs(arch, shape)
    path = tmp_path / "weights.safetensors"
    save_file(weights, path)
    header_size = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + header_size])
    tensors = {
        name: ExternalTensor(
            offset=8 + header_size + header[name]["data_offsets"][0],
            nbytes=header[name]["data_offsets"][1] - header[name]["data_offsets"][0],
        )
        for name in weights
    }
    external = ExternalWeights(location=path.name, tensors=tensors)
    model = emit_graph(arch, shape, dtype="fp32", external=external)
    onnx.save(model, tmp_path / "unet.onnx")
    onnx.checker.check_model(str(tmp_path / "unet.onnx"))
    session = ort.InferenceSession(str(tmp_path / "unet.onnx"), providers=["CPUExecutionProvider"])
    actual = _run(session, inputs, {})
    assert relative_l2(actual, _reference(arch, weights, inputs)) <= TOLERANCE
    with pytest.raises(SettingError, match=r"lacks the weight 'out.2.bias'"):
        tensors.pop("out.2.bias")
        emit_graph(arch, shape, dtype="fp32", external=external)


@pytest.mark.parametrize("arch", [*FULL.values(), *TINY.values()], ids=lambda a: a.label)
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_full_size_graphs_are_valid_and_hold_no_weight(arch, dtype):
    model = emit_graph(arch, Shape(batch=2, height=64, width=64, control=True), dtype=dtype)
    onnx.checker.check_model(model, full_check=True)
    assert model.ByteSize() < 2_000_000
    names = [value.name for value in model.graph.input]
    assert names[:3] == ["x", "timesteps", "context"]
    assert set(arch.parameters()) <= set(names)
    assert ("y" in names) == bool(arch.adm_channels)
    kinds = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
    assert kinds.pop("timesteps") == TensorProto.FLOAT
    assert len(set(kinds.values())) == 1


def test_every_parameter_is_used_once_by_name():
    """Equal parameters stay apart: each has its own input, in the description's order."""
    model = emit_graph(SDXL, Shape(batch=1, height=8, width=8), dtype="fp16")
    names = [v.name for v in model.graph.input if "." in v.name]
    assert names == list(SDXL.parameters())
    known = set(names)
    uses = [name for node in model.graph.node for name in node.input if name in known]
    assert sorted(uses) == sorted(names)


def test_constants_are_in_full_precision():
    """1/sqrt(40) is no fp16 number: it must not be rounded to one."""
    model = emit_graph(SD15, Shape(batch=1, height=8, width=8), dtype="fp16")
    floats = {
        t.name: numpy_helper.to_array(t)
        for t in model.graph.initializer
        if t.data_type == TensorProto.FLOAT
    }
    scales = [float(v) for v in floats.values() if v.ndim == 0]
    assert sorted(scales) == sorted(float(np.float32(width**-0.5)) for width in (40, 80, 160))


def test_emitting_is_deterministic_and_sizes_do_not_leak():
    shape = Shape(batch=2, height=64, width=64)
    first, second = (emit_graph(SD15, shape, dtype="fp16").SerializeToString() for _ in range(2))
    assert first == second
    assert (
        emit_graph(replace(SD15, resize="after"), shape, dtype="fp16").SerializeToString() == first
    )


def test_metadata_and_bad_precision():
    model = emit_graph(SD15, None, dtype="fp16", metadata={"source": "test"})
    found = {p.key: p.value for p in model.metadata_props}
    assert found["engine_room.architecture"] == SD15.id
    assert found["engine_room.source"] == "test"
    with pytest.raises(SettingError, match="fp8"):
        emit_graph(SD15, None, dtype="fp8")


def test_the_interpreter_needs_neither_torch_nor_a_host():
    code = """
        import sys
        for name in ("torch", "comfy", "modules", "safetensors"):
            sys.modules[name] = None
        from extension.architecture import SDXL
        from extension.onnx_graph import emit_graph
        emit_graph(SDXL, None, dtype="fp16")
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
