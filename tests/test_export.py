"""The ONNX pair: one pair of files, read by everything that reads either."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from safetensors import safe_open

from extension.checkpoint import open_checkpoint
from extension.engine import get_backend
from extension.engine.interface import BuildSpec
from extension.errors import (
    BadFileError,
    CancelledError,
    OutputError,
    SettingError,
    WorkerError,
)
from extension.lora import MergedWeights, read_lora
from extension.onnx_export import export_pair
from extension.ops_torch import TorchUNet
from extension.progress import CancelToken
from extension.shapes import Shape
from extension.synthetic_lora import make_lora
from tests.support_models import SMALL, random_inputs, random_weights, relative_l2

ARCH = SMALL["two-levels"]
SHAPE = Shape(batch=2, height=9, width=12)
NUMPY = {"fp32": np.float32, "fp16": np.float16}
FILES = ["unet.onnx", "unet.safetensors"]


def merged(tmp_path):
    path = make_lora(tmp_path / "lora.safetensors", architecture=ARCH, seed=2)
    return MergedWeights(random_weights(ARCH), [(read_lora(path).match(ARCH), 0.8)])


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("shape", [SHAPE, None])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_the_pair_is_an_onnx_model_and_a_checkpoint(tmp_path, dtype, shape):
    weights, out = merged(tmp_path), tmp_path / "out"
    seen = []
    origin = {"checkpoint": "some model", "lora_0": "lora x 0.8"}
    result = export_pair(
        weights, ARCH, out, dtype=dtype, shape=shape, origin=origin, on_progress=seen.append
    )
    assert names(out) == FILES
    onnx.checker.check_model(str(out / "unet.onnx"))
    props = {
        p.key: p.value
        for p in onnx.load(out / "unet.onnx", load_external_data=False).metadata_props
    }
    assert props["engine_room.checkpoint"] == "some model"
    assert props["engine_room.architecture"] == ARCH.id
    assert props["engine_room.weights"] == result.fingerprint
    with safe_open(out / "unet.safetensors", "pt") as file:
        assert file.metadata()["engine_room.lora_0"] == "lora x 0.8"
        assert {n.removeprefix("model.diffusion_model.") for n in list(file.keys())} == set(weights)
    with open_checkpoint(out / "unet.safetensors") as checkpoint:
        assert checkpoint.architecture == ARCH
        assert checkpoint.fingerprint() == result.fingerprint
        for name in weights:
            kind = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
            assert torch.equal(checkpoint[name], weights[name].to(kind))
    fractions = [moment.fraction for moment in seen]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1


@pytest.mark.parametrize("size", [(9, 12), (16, 8), (5, 7)])
def test_onnx_runtime_computes_the_merged_unet(tmp_path, size):
    weights, out = merged(tmp_path), tmp_path / "out"
    export_pair(weights, ARCH, out, dtype="fp32")
    session = onnxruntime.InferenceSession(str(out / "unet.onnx"))
    inputs = random_inputs(ARCH, Shape(batch=2, height=size[0], width=size[1]))
    actual = session.run(None, {n: t.numpy() for n, t in inputs.items()})[0]
    args = [inputs[n] for n in ("x", "timesteps", "context")]
    expected = TorchUNet(ARCH, dict(weights))(*args)
    without = TorchUNet(ARCH, random_weights(ARCH))(*args)
    assert relative_l2(without, expected) > 20e-5
    assert relative_l2(torch.from_numpy(actual), expected) <= 1e-5


def test_tensorrt_rtx_builds_from_the_pair(tmp_path):
    pytest.importorskip("tensorrt_rtx")
    out = tmp_path / "out"
    export_pair(merged(tmp_path), ARCH, out, dtype="fp16", shape=SHAPE)
    spec = BuildSpec(weights="baked", capabilities=("8.9",), io_dtype="fp16")
    backend = get_backend("tensorrt_rtx")
    backend.build(out / "unet.onnx", spec, tmp_path / "e.engine", lambda fraction, text: None)
    # The weights are inside.
    weights = sum(2 * t.numel() for t in random_weights(ARCH).values())
    assert (tmp_path / "e.engine").stat().st_size > 0.9 * weights


def test_data_starts_at_a_page(tmp_path):
    export_pair(random_weights(ARCH), ARCH, tmp_path, dtype="fp16")
    data = (tmp_path / "unet.safetensors").read_bytes()
    header = int.from_bytes(data[:8], "little")
    assert (8 + header) % 4096 == 0


def test_exporting_again_replaces_the_pair_and_is_deterministic(tmp_path):
    digests = []
    for seed in (0, 1, 0):
        export_pair(random_weights(ARCH, seed), ARCH, tmp_path, dtype="fp16")
        digests.append([hashlib.sha256((tmp_path / n).read_bytes()).hexdigest() for n in FILES])
        assert names(tmp_path) == FILES
    assert digests[0] == digests[2] != digests[1]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named_and_nothing_is_left(tmp_path, value):
    weights = random_weights(ARCH)
    weights["middle_block.0.in_layers.2.weight"][3, 1, 0, 0] = value
    with pytest.raises(BadFileError, match=r"middle_block\.0\.in_layers\.2\.weight"):
        export_pair(weights, ARCH, tmp_path / "out", dtype="fp16")
    assert names(tmp_path / "out") == []


def test_weights_too_large_for_fp16_are_named(tmp_path):
    weights = random_weights(ARCH)
    weights["out.2.bias"][0] = 1e6
    with pytest.raises(BadFileError, match=r"out\.2\.bias.*too large") as caught:
        export_pair(weights, ARCH, tmp_path, dtype="fp16")
    assert "bf16" in caught.value.hint
    assert names(tmp_path) == []
    export_pair(weights, ARCH, tmp_path, dtype="bf16")


def test_a_cancelled_export_leaves_nothing(tmp_path):
    token = CancelToken()
    with pytest.raises(CancelledError):
        export_pair(
            random_weights(ARCH),
            ARCH,
            tmp_path,
            dtype="fp16",
            cancel=token,
            on_progress=lambda progress: token.cancel(),
        )
    assert names(tmp_path) == []


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_earlier_pair_outlives_a_failed_export(tmp_path):
    export_pair(random_weights(ARCH), ARCH, tmp_path, dtype="fp16")
    before = contents(tmp_path)
    weights = random_weights(ARCH, 1)
    weights["out.2.bias"][0] = float("nan")
    with pytest.raises(BadFileError):
        export_pair(weights, ARCH, tmp_path, dtype="fp16")
    assert contents(tmp_path) == before


def test_no_mixed_pair_after_a_failure(tmp_path, monkeypatch):
    """The ONNX file of an earlier export does not stay beside other weights."""
    export_pair(random_weights(ARCH), ARCH, tmp_path, dtype="fp16")

    def fail(*args, **kwargs):
        raise WorkerError("The worker is gone.")

    monkeypatch.setattr("extension.onnx_export.run_job", fail)
    with pytest.raises(WorkerError):
        export_pair(random_weights(ARCH, 1), ARCH, tmp_path, dtype="fp16")
    assert names(tmp_path) == ["unet.safetensors"]


def test_a_full_disk_is_said_first(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("extension.files.shutil.disk_usage", lambda folder: usage)
    with pytest.raises(OutputError, match="are needed"):
        export_pair(random_weights(ARCH), ARCH, tmp_path, dtype="fp16")
    assert names(tmp_path) == []


def test_the_folder_must_be_one(tmp_path):
    (tmp_path / "file").write_text("keep")
    with pytest.raises(OutputError, match="file"):
        export_pair(random_weights(ARCH), ARCH, tmp_path / "file", dtype="fp16")
    assert (tmp_path / "file").read_text() == "keep"
    with pytest.raises(SettingError, match="int8"):
        export_pair(random_weights(ARCH), ARCH, tmp_path, dtype="int8")


@pytest.mark.skipif(os.name == "nt" or os.geteuid() != 0, reason="needs a second user")
def test_a_read_only_folder(tmp_path):
    """Root may write anywhere, so the export runs as nobody."""
    folder = tmp_path / "out"
    folder.mkdir(mode=0o555)
    for parent in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        parent.chmod(0o755)
    code = (
        "import os\n"
        "from extension.onnx_export import *; from extension.errors import OutputError\n"
        "from tests.support_models import SMALL, random_weights\n"
        "a = SMALL['two-levels']; os.setuid(65534)\n"
        f"try: export_pair(random_weights(a), a, {str(folder)!r}, dtype='fp16')\n"
        "except OutputError as e: print(e)\n"
    )
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert "read-only" in out.stdout, out.stderr[-300:]


MEMORY = """
import json, resource, sys, torch
from dataclasses import replace
from extension.architecture import SD15
from extension.onnx_export import export_pair
arch = replace(SD15, model_channels=192)
def rss():
    return int(open('/proc/self/statm').read().split()[1]) * 4096
weights = {n: torch.zeros(s, dtype=torch.float16) for n, s in arch.parameters().items()}
for t in weights.values(): t.fill_(0.01)
before, most = rss(), 0
def watch(progress):
    global most
    most = max(most, rss())
export_pair(weights, arch, sys.argv[1], dtype='fp16', on_progress=watch)
print(json.dumps({'extra': most - before, 'size': sum(t.numel() * 2 for t in weights.values())}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_model(tmp_path):
    """A 620 MB model is written with less than 100 MB above the loaded tensors."""
    out = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True, check=True
    )
    facts = json.loads(out.stdout.splitlines()[-1])
    assert facts["size"] > 5e8
    assert facts["extra"] < 1e8
