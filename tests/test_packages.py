"""The private folder: filled by pip for real, used by the worker, invisible to the environment."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from extension import packages
from extension.driver import gpus
from extension.errors import (
    MissingPackageError,
    OutputError,
    SettingError,
    UnsupportedMachineError,
)
from extension.kernel_cache import KernelCache
from tests.support_gradio import PINS, gradio_environment, snapshot

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


PINNED = """
import sys
sys.path.insert(0, {root!r})
import gradio, google.protobuf, numpy
from tests.test_tiers import *
manager = TierManager(Library({folder!r}), EnginePool())
assert manager.provide(JOB), manager.failed
import onnxruntime
assert onnxruntime.__file__.startswith({private!r}), onnxruntime.__file__
assert "onnx" not in sys.modules
print(gradio.__version__, google.protobuf.__version__, numpy.__version__)
"""


@pytest.mark.parametrize("version", list(PINS))
def test_a_host_with_its_pins_stays_as_it_is(version, tmp_path):
    """Protobuf 3.20.0 and numpy 1.26.2, as A1111 and Forge pin them, do not notice us."""
    python, private = gradio_environment(version), tmp_path / "packages"
    before = snapshot(python)
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", packages.VARIABLE: str(private)}
    command = [python, ROOT / "extension", "install", "onnxruntime"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-1500:]
    code = PINNED.format(root=str(ROOT), folder=str(tmp_path / "l"), private=str(private))
    out = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, env=env, cwd=tmp_path
    )
    assert out.returncode == 0, out.stderr[-1500:]
    assert out.stdout.split() == [version, "3.20.0", "1.26.2"]
    assert snapshot(python) == before


OFFLINE = {
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
    "PIP_EXTRA_INDEX_URL": "",
    "PIP_FIND_LINKS": "",
    "PIP_RETRIES": "0",
    "PIP_NO_CACHE_DIR": "1",
}


def test_offline_is_one_sentence_with_the_command(tmp_path):
    command = [sys.executable, ROOT / "extension", "install", "onnxruntime", "--into", tmp_path]
    env = {**os.environ, **OFFLINE}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.returncode == MissingPackageError.exit_code
    error, hint = done.stderr.strip().splitlines()[-2:]
    assert "is this computer online?" in error
    assert f'"{ROOT / "extension"}" install' in hint
    assert "--wheels" in hint
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_wheels_from_a_folder_need_no_network(tmp_path, filled):
    wheels = tmp_path / "wheels"
    for flags, name in ((["--no-deps"], "onnxruntime"), ([], "onnx")):
        command = [sys.executable, "-m", "pip", "download", "-q", *flags, "-d", wheels, name]
        subprocess.run(command, check=True, capture_output=True)
    command = [sys.executable, ROOT / "extension", "install", "onnxruntime", "--into"]
    command += [tmp_path / "p", "--wheels", wheels]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **OFFLINE})
    assert done.returncode == 0, done.stderr[-1500:]
    names = {path.name for path in filled.iterdir()}
    assert {path.name for path in (tmp_path / "p").iterdir()} == names


def test_a_private_folder_that_is_read_only(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("extension.files.tempfile.mkdtemp", refuse)
    with pytest.raises(OutputError, match="read-only") as caught:
        packages.install("onnxruntime", tmp_path, cuda=13)
    assert str(tmp_path) in caught.value.message


@pytest.mark.parametrize("arguments", [["--wheels", "nowhere"], []])
def test_settings_that_cannot_be(tmp_path, arguments, monkeypatch):
    monkeypatch.delenv(packages.VARIABLE, raising=False)
    into = ["--into", str(tmp_path)] if arguments else []
    command = [sys.executable, ROOT / "extension", "install", "onnxruntime", *into, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == SettingError.exit_code
    assert "Give" in done.stderr


def test_no_gpu_is_said_before_anything_is_downloaded(tmp_path):
    if gpus():
        pytest.skip("this machine has a GPU")
    command = [sys.executable, ROOT / "extension", "install", "--into", tmp_path / "p"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == UnsupportedMachineError.exit_code
    assert "No NVIDIA" in done.stderr
    assert not (tmp_path / "p").exists()


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


def test_kernels_that_the_driver_refuses_are_replaced_by_fewer(tmp_path):
    """After a step back to an older driver, every start would compile them anew."""
    cache = KernelCache(tmp_path, "gpu", "1")
    cache.write(b"many kernels of a newer driver")
    kept = cache.read()
    cache.write(b"few", instead=kept)
    assert cache.read() == b"few"
    cache.write(b"many kernels of another program")
    cache.write(b"small", instead=kept)
    assert cache.read() == b"many kernels of another program"


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    KernelCache(tmp_path / "file", "gpu", "1").write(b"kernels")


def test_a_hostile_gpu_name_stays_in_the_folder(tmp_path):
    assert KernelCache(tmp_path, "../../etc/x", "1").path.parent == tmp_path
