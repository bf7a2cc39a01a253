"""Faults that users have: killed programs, full, read-only and vanished folders, foreign files."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from extension import files, serving
from extension.building import WORK_PREFIX, BuildRequest, build_engine
from extension.engine_state import State
from extension.errors import EngineError, EngineRoomError, OutputError, SettingError, WorkerError
from extension.files import (
    TEMPORARY_SUFFIX,
    atomic_write,
    child_folder,
    ensure_folder,
    replace_file,
    sweep,
)
from extension.library import Library
from extension.onnx_export import export_pair
from extension.ops_torch import TorchUNet
from extension.pool import EnginePool
from extension.room import Room
from extension.routed import RoutedUNet
from extension.serving import load_engine
from extension.tiers import TierManager
from tests.support_models import random_inputs, random_weights, relative_l2
from tests.test_jobs import leftovers, request, workers
from tests.test_tiers import ARCH, JOB, ROOT, SHAPE, call

TARGET = JOB.target


@pytest.fixture
def mounted(tmp_path):
    """Mounts small disks of any size; needs root."""
    folders = []

    def mount(kilobytes, options=""):
        folder = tmp_path / f"disk{len(folders)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k{options}", "none", str(folder)]
        if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("mounting a small disk needs root")
        folders.append(folder)
        return folder

    yield mount
    for folder in folders:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def remount(folder, options):
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


@pytest.fixture
def manager(tmp_path):
    manager = TierManager(Library(tmp_path / "library"), EnginePool())
    yield manager
    manager.close()
    manager.pool.close()


def routed(manager):
    weights = random_weights(ARCH)
    unet = TorchUNet(ARCH, weights)
    return RoutedUNet(
        ARCH,
        weights,
        unet,
        pool=manager.pool,
        on_miss=lambda call, answer: manager.miss(ARCH, call),
    )


def assert_right(model):
    inputs = random_inputs(ARCH, SHAPE)
    args = [inputs[name] for name in ("x", "timesteps", "context")]
    exact = TorchUNet(ARCH, random_weights(ARCH))
    assert relative_l2(model(*args), exact(*args)) <= 1e-5


# Full disks


@pytest.mark.parametrize("seed", range(8))
def test_a_disk_that_fills_at_any_point_of_a_build(mounted, monkeypatch, seed):
    """Whatever fits, the result is a whole engine or one sentence and an empty folder."""
    monkeypatch.setattr("extension.building.check_free_space", lambda folder, needed: None)
    folder = mounted(random.Random(seed).randrange(4, 260, 4))
    try:
        entry = build_engine(Library(folder), request())
    except EngineRoomError as error:
        assert "disk is full" in str(error)
        assert leftovers(folder) == []
    else:
        assert Library(folder).read_engine(entry.stem)


@pytest.mark.parametrize("seed", range(6))
def test_a_disk_that_fills_at_any_point_of_an_export(mounted, monkeypatch, seed):
    monkeypatch.setattr("extension.safetensors_file.check_free_space", lambda folder, needed: None)
    weights = random_weights(ARCH)
    needed = sum(tensor.numel() for tensor in weights.values()) * 4 // 1024
    folder = mounted(random.Random(seed).randrange(8, needed + 300, 4))
    try:
        export_pair(weights, ARCH, folder, dtype="fp32")
    except OutputError as error:
        assert "disk is full" in str(error)
        assert not (folder / "unet.onnx").exists()
        assert [path.name for path in folder.glob(".*")] == []
    else:
        assert (folder / "unet.onnx").exists()


# Read-only, deleted and moved folders


def test_a_library_that_became_read_only_still_serves(mounted):
    folder = mounted(400_000)
    assert TierManager(Library(folder), EnginePool()).provide(JOB)
    remount(folder, "ro")
    manager = TierManager(Library(folder), EnginePool())
    assert manager.provide(JOB), manager.failed
    assert_right(routed(manager))
    other = replace(JOB, shape=replace(SHAPE, batch=1))
    assert manager.provide(other) is False
    assert "read-only" in manager.failed[manager.key(other).stem]
    manager.pool.close()
    remount(folder, "rw")


@pytest.mark.parametrize("how", ["deleted", "moved"])
def test_a_library_that_vanishes_during_use(manager, tmp_path, how):
    folder = manager.library.folder
    manager.provide(JOB)
    model = routed(manager)
    assert_right(model)
    if how == "deleted":
        shutil.rmtree(folder)
    else:
        folder.rename(tmp_path / "elsewhere")
    assert_right(model)
    assert model.counters.totals == (2, 0)
    assert manager.library.entries(TARGET.machine) == []
    manager.pool.close()
    assert manager.provide(JOB), manager.failed
    assert_right(model)


def test_a_folder_that_vanishes_during_a_build(tmp_path):
    library = Library(tmp_path / "library")

    def vanish(progress):
        shutil.rmtree(library.folder, ignore_errors=True)

    with pytest.raises(EngineRoomError) as caught:
        build_engine(library, request(), on_progress=vanish)
    assert caught.value.message
    assert build_engine(library, request()).manifest is not None


# Killed workers


@pytest.mark.parametrize("seed", range(5))
def test_a_worker_killed_at_any_moment(tmp_path, seed):
    """The host serves on, the reason is kept, and the next build works."""
    library, beats = Library(tmp_path), []
    wanted = random.Random(seed).randrange(1, 5)

    def kill(progress):
        beats.append(progress)
        if len(beats) >= wanted:
            for pid in workers():
                os.kill(pid, signal.SIGKILL)

    try:
        build_engine(library, request(), on_progress=kill)
    except WorkerError as error:
        assert "SIGKILL" in str(error)
        assert leftovers(tmp_path) == []
    assert build_engine(library, request()).manifest is not None


# Clocks


@pytest.mark.parametrize("jump", [-10 * 365 * 86400.0, 10 * 365 * 86400.0])
def test_clock_jumps_change_nothing(manager, monkeypatch, jump):
    real = time.time
    manager.provide(JOB)
    monkeypatch.setattr(time, "time", lambda: real() + jump)
    other = replace(JOB, shape=replace(SHAPE, batch=1))
    assert manager.provide(other), manager.failed
    manager.pool.close()
    assert manager.provide(JOB), manager.failed
    states = {entry.state for entry in manager.library.entries(TARGET.machine)}
    assert states == {State.READY}


def test_only_old_rests_are_swept(tmp_path):
    for name in (f"{WORK_PREFIX}old", f"{WORK_PREFIX}new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"x")
    for name in (f".x{TEMPORARY_SUFFIX}", ".theirs.tmp", "mine.txt"):
        (tmp_path / name).write_bytes(b"x")
    for name in (f"{WORK_PREFIX}old", f".x{TEMPORARY_SUFFIX}", ".theirs.tmp", "mine.txt"):
        os.utime(tmp_path / name, (0, 0))
    sweep(tmp_path, f"{WORK_PREFIX}*", f".*{TEMPORARY_SUFFIX}")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {f"{WORK_PREFIX}new", ".theirs.tmp", "mine.txt"}


# Engines from elsewhere


CRASH = """
import os, signal
def probe(self, data): os.kill(os.getpid(), signal.SIGSEGV)
"""


def foreign(tmp_path, data=None):
    """A library with an engine that another program built, and its entry."""
    built = Library(tmp_path)
    entry = build_engine(
        built, BuildRequest(key=TARGET.key(ARCH, SHAPE), architecture=ARCH, label="x")
    )
    if data is not None:
        manifest = replace(
            entry.manifest,
            engine_bytes=len(data),
            engine_sha256=hashlib.sha256(data).hexdigest(),
        )
        built.engine_path(entry.stem).write_bytes(data)
        atomic_write(built.manifest_path(entry.stem), manifest.to_bytes())
    library = Library(tmp_path)
    return library, library.entry(entry.stem, TARGET.machine)


def test_an_engine_from_elsewhere_is_tried_in_a_child_first(tmp_path, monkeypatch):
    jobs = []
    run_job = serving.run_job
    monkeypatch.setattr(serving, "run_job", lambda job, **k: jobs.append(job) or run_job(job, **k))
    library, entry = foreign(tmp_path)
    load_engine(library, entry, TARGET).close()
    assert [job["kind"] for job in jobs] == ["probe"]
    manager = TierManager(library, EnginePool())
    assert manager.provide(JOB)
    manager.pool.close()
    jobs.clear()
    assert manager.provide(JOB)
    assert jobs == []
    manager.pool.close()


@pytest.mark.parametrize("data", [b"", b"x" * 1000, bytes(range(256)) * 100])
def test_bytes_that_are_no_engine_never_reach_the_host(tmp_path, monkeypatch, data):
    """Their manifest fits, so only the child finds out; the host goes on without an engine."""
    library, _ = foreign(tmp_path, data)
    monkeypatch.setattr(
        "extension.engine.onnxruntime.OnnxRuntimeBackend.load",
        lambda *args, **kwargs: pytest.fail("the host loaded it"),
    )
    manager = TierManager(library, EnginePool())
    assert manager.provide(JOB) is False
    assert "cannot be loaded here" in manager.failed[manager.key(JOB).stem]
    assert_right(routed(manager))


def test_an_engine_that_crashes_its_reader_takes_only_the_child(tmp_path, monkeypatch):
    library, entry = foreign(tmp_path)
    core = tmp_path / "core" / "extension"
    shutil.copytree(files.__file__.rsplit(os.sep, 1)[0], core)
    path = core / "engine" / "onnxruntime.py"
    path.write_text(path.read_text() + CRASH + "OnnxRuntimeBackend.probe = probe\n")
    monkeypatch.setattr("extension.jobs.WORKER", core / "worker.py")
    with pytest.raises(EngineError, match="SIGSEGV"):
        load_engine(library, entry, TARGET)


def test_a_miss_after_a_failed_engine_stays_with_the_host(tmp_path):
    library, _ = foreign(tmp_path, b"no engine")
    manager = TierManager(library, EnginePool())
    for _ in range(5):
        manager.miss(ARCH, call())
    assert manager.wait(60)
    assert list(manager.failed) == [manager.key(JOB).stem]
    assert manager.miss(ARCH, call(), policy="wait") is False


def test_what_a_person_removes_is_built_again(tmp_path):
    """At once, and by a later start: the failure goes with the engine."""
    library, entry = foreign(tmp_path, b"no engine")
    for room in (Room(library.folder), Room(library.folder)):
        for _ in range(2):
            assert room.tiers.miss(ARCH, call(), policy="wait") is False
        assert entry.stem in room.tiers.failed
        room.close()
    room = Room(library.folder)
    assert room.tiers.miss(ARCH, call(), policy="wait") is False
    assert room.remove(entry.stem) > 0
    assert room.tiers.miss(ARCH, call(), policy="wait") is True
    room.close()


# Windows, by simulation


@pytest.fixture
def windows(monkeypatch):
    monkeypatch.setattr(files, "WINDOWS", True)
    monkeypatch.setattr(files, "BUSY_SECONDS", 0.5)


def busy(monkeypatch, times):
    """The next renames fail as they do on Windows while a target is open."""
    real, calls = files.Path.replace, []

    def replace_(self, target):
        calls.append(target)
        if len(calls) <= times:
            raise PermissionError(13, "The process cannot access the file", str(target))
        return real(self, target)

    monkeypatch.setattr(files.Path, "replace", replace_)
    return calls


def test_a_file_that_is_open_for_a_moment_is_replaced(tmp_path, windows, monkeypatch):
    calls = busy(monkeypatch, 3)
    atomic_write(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
    assert len(calls) == 4


def test_a_file_that_stays_open_is_named_and_kept(tmp_path, windows, monkeypatch):
    (tmp_path / "file").write_bytes(b"old")
    busy(monkeypatch, 10**6)
    with pytest.raises(OutputError, match="'file' is in use"):
        atomic_write(tmp_path / "file", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"


def test_without_windows_a_refusal_is_no_reason_to_wait(tmp_path, monkeypatch):
    calls = busy(monkeypatch, 10**6)
    with pytest.raises(OutputError, match="read-only"):
        replace_file(tmp_path / "a", tmp_path / "b")
    assert len(calls) == 1


def test_a_path_too_long_for_windows_is_said_at_once(tmp_path, windows):
    with pytest.raises(OutputError, match="too long for Windows"):
        ensure_folder(tmp_path / ("x" * 100) / ("y" * 100))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name",
    ["CON", "nul.txt", "a/COM1", "lpt9.x/b", "a:b", "what?", 'a"b', "a\\b|c", "tab\there", "end.",
     "end ", "x" * 101],
)  # fmt: skip
def test_names_that_windows_does_not_take(tmp_path, name):
    with pytest.raises(SettingError, match="cannot name a folder"):
        child_folder(tmp_path, name)


@pytest.mark.parametrize("name", ["model", "onnx/模型", "Ünïcödé 1.5", "a.b/c-d", "console", "./a"])
def test_names_that_every_system_takes(tmp_path, name):
    folder = ensure_folder(child_folder(tmp_path, name))
    atomic_write(folder / "file", b"x")


LIKE_WINDOWS = """
import importlib, os, pkgutil, signal, sys, types
sys.path.insert(0, {root!r})
import torch, onnx, onnxruntime, filelock
filelock.FileLock = filelock.SoftFileLock
import extension
for info in pkgutil.walk_packages(extension.__path__, "extension."):
    if not info.name.startswith(("extension.hosts", "extension.__main__", "extension.ui.")):
        importlib.import_module(info.name)
for name in ("fcntl", "resource", "pwd", "grp", "termios", "pty"):
    sys.modules[name] = None
absent = dict(
    os="fork forkpty nice getuid geteuid getgid killpg setsid chown mkfifo uname statvfs "
    "sched_getaffinity getloadavg WNOHANG register_at_fork O_NOFOLLOW O_CLOEXEC getpgid".split(),
    signal="SIGKILL SIGHUP SIGALRM SIGUSR1 alarm setitimer pthread_kill".split(),
)
for module in [m for n, m in sys.modules.items() if n.startswith("extension")]:
    for name, missing in absent.items():
        if hasattr(module, name):
            like = types.ModuleType(name)
            like.__dict__.update(
                (k, v) for k, v in vars(sys.modules[name]).items() if k not in missing
            )
            setattr(module, name, like)
"""
USE = """
from extension.library import Library
from extension.onnx_export import export_pair
from extension.pool import EnginePool
from extension.serving import Target
from extension.shapes import Shape
from extension.tiers import TierManager
from extension.wanted import Job
from tests.support_models import SMALL, random_weights
arch = SMALL["two-levels"]
target = Target(device="cpu", dtype="fp32")
job = Job(arch=arch, shape=Shape(batch=2, height=8, width=8), target=target)
manager = TierManager(Library({folder!r}), EnginePool())
assert manager.provide(job), manager.failed
export_pair(random_weights(arch), arch, {folder!r} + "/pair", dtype="fp16")
assert manager.library.remove(manager.key(job).stem)
"""


def test_no_call_that_only_posix_has(tmp_path):
    """Everything that hosts use runs where our modules see only what Windows has.

    filelock chooses its lock when it is imported; its soft lock stands for Windows' own.
    """
    code = LIKE_WINDOWS.format(root=str(ROOT)) + USE.format(folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
