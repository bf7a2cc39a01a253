"""The private folder: filled by pip for real, used by the worker, invisible to the environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from extension import packages
from extension.errors import MissingPackageError, OutputError
from extension.kernel_cache import KernelCache

ROOT = Path(__file__).resolve().parents[1]


def freeze():
    out = subprocess.run(
        [sys.executable, "-m", "pip", "freeze", "--all"], capture_output=True, text=True, check=True
    )
    return out.stdout


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """onnx for the worker and ONNX Runtime as a backend, by the command a user types."""
    folder = tmp_path_factory.mktemp("private") / "packages"
    before = freeze()
    command = [sys.executable, "-m", "extension", "install", "onnxruntime", "--into", str(folder)]
    out = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if out.returncode == MissingPackageError.exit_code:
        pytest.skip(f"no package index: {out.stderr[-200:]}")
    assert out.returncode == 0, out.stderr
    assert freeze() == before
    return folder


def test_the_folders_are_named_for_python_backend_and_version(filled):
    tag = packages.python_tag()
    names = sorted(path.name for path in filled.iterdir())
    assert names[1] == f"worker-{tag}"
    assert names[0].startswith(f"tensorrt-{tag}-onnxruntime-1.")
    assert len(names) == 2


def test_a_second_install_does_nothing(filled):
    before = {path: path.stat().st_mtime_ns for path in filled.iterdir()}
    assert packages.install("onnxruntime", filled, cuda=13) == []
    assert {path: path.stat().st_mtime_ns for path in filled.iterdir()} == before


BUILD = """
import sys
sys.path.insert(0, {root!r})
from tests.test_tiers import *
manager = TierManager(Library({folder!r}), EnginePool())
assert manager.provide(JOB), manager.failed
import onnxruntime
print(onnxruntime.__file__)
assert not [p for p in sys.path if 'private' in p]
assert 'onnx' not in sys.modules or not sys.modules['onnx'].__file__.startswith({private!r})
"""


def test_the_worker_and_the_host_use_it_and_nothing_else(filled, tmp_path):
    """The worker runs without the environment's packages; the host imports the backend alone."""
    code = BUILD.format(root=str(ROOT), folder=str(tmp_path / "library"), private=str(filled))
    env = {**os.environ, packages.VARIABLE: str(filled)}
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=ROOT
    )
    assert out.returncode == 0, out.stderr[-1500:]
    assert out.stdout.strip().startswith(str(filled))


def test_a_failure_names_the_command_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("extension.packages.WORKER_PACKAGES", ("no-such-package-of-engine-room",))
    with pytest.raises(MissingPackageError, match="no-such-package") as caught:
        packages.install("onnxruntime", tmp_path / "p", cuda=13)
    assert packages.install_command() in caught.value.hint
    assert "pip download no-such-package" in caught.value.hint
    assert list((tmp_path / "p").iterdir()) == []


def test_a_full_disk_is_said_before_anything_is_downloaded(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("extension.files.shutil.disk_usage", lambda folder: usage)
    with pytest.raises(OutputError, match="are needed"):
        packages.install("onnxruntime", tmp_path / "p", cuda=13)


@pytest.mark.parametrize("cuda", [12, 13])
def test_packages_follow_the_cuda_version(cuda):
    assert packages.backend_packages("tensorrt_rtx", cuda) == (
        "tensorrt-rtx",
        f"tensorrt-rtx-cu{cuda}",
        f"tensorrt-rtx-cu{cuda}-libs",
        f"tensorrt-rtx-cu{cuda}-bindings",
    )
    assert packages.backend_packages("tensorrt", cuda)[0] == f"tensorrt-cu{cuda}"


# Kernels between starts


def test_kernels_are_kept_and_damage_is_nothing(tmp_path):
    cache = KernelCache(tmp_path, "NVIDIA GeForce RTX 4090", "1.7.1.116")
    assert cache.path.name == "kernels-NVIDIA-GeForce-RTX-4090-1.7.1.116.cache"
    assert cache.read() == b""
    cache.write(b"kernels")
    assert KernelCache(tmp_path, "NVIDIA GeForce RTX 4090", "1.7.1.116").read() == b"kernels"
    assert KernelCache(tmp_path, "NVIDIA GeForce RTX 4090", "1.8.0.1").read() == b""
    cache.write(b"less")
    assert cache.read() == b"kernels"
    whole = cache.path.read_bytes()
    for damaged in (b"", whole[:-1], whole[::-1], whole + b"x", b"x" * 100):
        cache.path.write_bytes(damaged)
        assert cache.read() == b""
    cache.write(b"new")
    assert cache.read() == b"new"


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    KernelCache(tmp_path / "file", "gpu", "1").write(b"kernels")


def test_a_hostile_gpu_name_stays_in_the_folder(tmp_path):
    assert KernelCache(tmp_path, "../../etc/x", "1").path.parent == tmp_path
