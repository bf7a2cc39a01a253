"""The worker and its jobs: real processes, killed, hung, cancelled, out of space, raced."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import onnx
import pytest

from extension.building import WORK_PREFIX, BuildRequest, build_engine
from extension.engine import get_backend
from extension.engine_state import State
from extension.errors import (
    CancelledError,
    EngineRoomError,
    OutputError,
    SettingError,
    WorkerError,
    all_error_types,
)
from extension.jobs import WORKER, Limits, WorkerSetup, run_job
from extension.key import EngineKey
from extension.library import Library
from extension.progress import CancelToken
from extension.shapes import Shape
from tests.support_models import SMALL

ROOT = Path(__file__).resolve().parents[1]
ARCH = SMALL["two-levels"]
SHAPE = Shape(batch=1, height=8, width=8)


def request(arch=ARCH, shape=SHAPE, **fields):
    backend = fields.pop("backend", "onnxruntime")
    key = EngineKey(
        architecture=arch.for_shape(shape).id,
        shape=shape,
        io_dtype=fields.pop("io_dtype", "fp32"),
        weights="shared",
        backend=backend,
        backend_version=get_backend(backend).version(),
        capabilities=fields.pop("capabilities", ("cpu",)),
        **fields,
    )
    return BuildRequest(key=key, architecture=arch, label="test")


def slow_request():
    """A build that takes many seconds: a full-size UNet by TensorRT-RTX."""
    from extension.architecture import SD15

    pytest.importorskip("tensorrt_rtx")
    shape = Shape(batch=2, height=64, width=64)
    return request(
        SD15, shape, backend="tensorrt_rtx", io_dtype="fp16", capabilities=("8.9", "12.0")
    )


def leftovers(folder):
    """What lies in a library besides its locks."""
    return sorted(path.name for path in Path(folder).iterdir() if path.suffix != ".lock")


def workers():
    """Process ids of live workers of this test process."""
    out = subprocess.run(
        ["ps", "--ppid", str(os.getpid()), "-o", "pid=,args="], capture_output=True, text=True
    ).stdout
    return [int(line.split()[0]) for line in out.splitlines() if "worker.py" in line]


# Emitting and the protocol


def test_emit_writes_a_graph_without_torch(tmp_path):
    out = tmp_path / "unet.onnx"
    job = {"kind": "emit", "architecture": ARCH.to_json(), "dtype": "fp16", "out": str(out)}
    result = run_job(job)
    assert result["bytes"] == out.stat().st_size
    onnx.checker.check_model(str(out))
    assert leftovers(tmp_path) == ["unet.onnx"]


@pytest.mark.parametrize(
    ("job", "kind", "words"),
    [
        ({"kind": "juggle"}, WorkerError, "juggle"),
        ({"kind": "emit", "architecture": ARCH.to_json(), "dtype": "int4", "out": "x"}, None, ""),
        ({"kind": "emit", "architecture": {"no": 1}, "dtype": "fp16", "out": "x"}, None, ""),
        ({"kind": "emit"}, WorkerError, "architecture"),
    ],
)
def test_bad_jobs_come_back_as_errors(job, kind, words):
    with pytest.raises(kind or EngineRoomError, match=words) as caught:
        run_job(job)
    assert caught.value.message


def test_an_error_crosses_the_process_border_whole(tmp_path):
    job = {"kind": "emit", "architecture": ARCH.to_json(), "dtype": "int4", "out": "x"}
    with pytest.raises(SettingError) as caught:
        run_job(job)
    assert "int4" in caught.value.message
    assert "fp16" in caught.value.hint


def test_every_error_code_is_unique_and_known():
    types = all_error_types()
    assert len({kind.code for kind in types.values()}) == len(types)
    assert types["setting"] is SettingError


def run_raw(tmp_path, text, **options):
    path = tmp_path / "job.json"
    path.write_text(text)
    return subprocess.run(
        [sys.executable, "-I", str(WORKER), str(path)],
        stdin=subprocess.PIPE if options.pop("hold", False) else subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        **options,
    )


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', "\0"])
def test_a_job_file_that_is_none_gives_one_error_event(tmp_path, text):
    job = tmp_path / "job.json"
    job.write_text(text)
    process = subprocess.Popen(
        [sys.executable, "-I", str(WORKER), str(job)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    line = process.stdout.readline()
    assert process.wait(30) == 1
    assert json.loads(line)["event"] == "error"
    process.stdin.close()


def test_the_worker_ends_when_its_parent_does(tmp_path):
    """Standard input at its end means the parent is gone."""
    build = slow_request()
    job = {
        "format": 1,
        "kind": "build",
        "key": build.key.to_json(),
        "architecture": build.architecture.to_json(),
        "folder": str(tmp_path),
        "out": str(tmp_path / "x.engine"),
    }
    started = time.monotonic()
    result = run_raw(tmp_path, json.dumps(job))
    assert result.returncode == 75
    assert time.monotonic() - started < 5


def fake_worker(tmp_path, monkeypatch, body):
    """Run jobs in a script of our own in place of the worker."""
    script = tmp_path / "fake.py"
    script.write_text("import sys, time, os, json\n" + body)
    monkeypatch.setattr("extension.jobs.WORKER", script)


def test_whatever_a_library_prints_is_a_log_line(tmp_path, monkeypatch, caplog):
    fake_worker(
        tmp_path,
        monkeypatch,
        'sys.stdout.buffer.write(b\'\\xff\\xfe garbage\\n[1, 2]\\n\\n{"event": "what"}\\n\')\n'
        "sys.stdout.buffer.write(b'x' * 3_000_000 + b'\\n')\n"
        "print(json.dumps({'event': 'progress', 'fraction': 7, 'phase': 'p'}))\n"
        "print(json.dumps({'event': 'done', 'result': {'a': 1}}), flush=True)\n",
    )
    seen = []
    assert run_job({"kind": "x"}, on_progress=seen.append) == {"a": 1}
    assert [moment.fraction for moment in seen] == [1.0]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("sys.exit(3)", "exit code 3"),
        ("os.kill(os.getpid(), 9)", "SIGKILL"),
        ("os.kill(os.getpid(), 11)", "SIGSEGV"),
        ("print('Traceback', file=sys.stderr); sys.exit(1)", "exit code 1"),
        ('print(\'{"event": "done"}\')', "exit code 0"),
    ],
)
def test_a_worker_that_dies_is_named_with_how(tmp_path, monkeypatch, body, words):
    fake_worker(tmp_path, monkeypatch, body)
    with pytest.raises(WorkerError, match=words) as caught:
        run_job({"kind": "x"})
    assert "stderr" in caught.value.details


@pytest.mark.parametrize(
    ("limits", "words"),
    [(Limits(seconds=0.5), "more than"), (Limits(silence=0.5), "no sign of life")],
)
def test_a_hung_worker_is_ended(tmp_path, monkeypatch, limits, words):
    fake_worker(tmp_path, monkeypatch, "time.sleep(60)")
    started = time.monotonic()
    with pytest.raises(WorkerError, match=words):
        run_job({"kind": "x"}, limits=limits)
    assert time.monotonic() - started < 5
    assert workers() == []


def test_private_packages_are_all_that_the_worker_sees(tmp_path):
    """With a private folder, the environment's packages are left out."""
    job = {"kind": "emit", "architecture": ARCH.to_json(), "dtype": "fp16", "out": "x"}
    with pytest.raises(EngineRoomError, match="onnx") as caught:
        run_job(job, setup=WorkerSetup(packages=[tmp_path]))
    assert "pip install" in caught.value.hint


# Building


def test_a_build_reports_and_publishes(tmp_path):
    library, seen = Library(tmp_path), []
    entry = build_engine(library, request(), on_progress=seen.append)
    assert entry.state is State.UNVERIFIED
    fractions = [moment.fraction for moment in seen]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1
    assert all(moment.phase for moment in seen)
    library.verify_files(entry.stem)
    assert leftovers(tmp_path) == sorted(
        [f"{entry.stem}.engine", f"{entry.stem}.json", "build-history.json"]
    )
    again = []
    assert build_engine(library, request(), on_progress=again.append).stem == entry.stem
    assert again == []


def test_building_is_deterministic(tmp_path):
    first, second = (build_engine(Library(tmp_path / n), request()) for n in "ab")
    assert first.manifest.engine_sha256 == second.manifest.engine_sha256


def test_cancel_ends_the_child_within_a_second(tmp_path):
    """Also while the compiler is silent: cancelling means ending the process."""
    library, token, times = Library(tmp_path), CancelToken(), {}

    def watch(progress):
        if progress.phase == "compiling" and "asked" not in times and progress.elapsed > 1.0:
            times["asked"] = time.monotonic()
            token.cancel()

    with pytest.raises(CancelledError):
        build_engine(library, slow_request(), on_progress=watch, cancel=token)
    assert time.monotonic() - times["asked"] < 1.0
    assert workers() == []
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("after", [0.0, 0.3, 1.5])
def test_a_killed_worker_leaves_nothing_and_the_next_build_works(tmp_path, after):
    library = Library(tmp_path)

    def kill():
        deadline = time.monotonic() + 20
        while not workers() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(after)
        for pid in workers():
            os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(WorkerError, match="SIGKILL"):
        build_engine(library, slow_request())
    thread.join()
    assert leftovers(tmp_path) == []
    assert build_engine(library, request()).manifest is not None


BUILD_SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from tests.test_jobs import *
entry = build_engine(Library({folder!r}), {request})
print(entry.manifest.created, entry.manifest.engine_sha256)
"""


def start_build(folder, text="request()"):
    code = BUILD_SCRIPT.format(root=str(ROOT), folder=str(folder), request=text)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT)


def test_two_programs_that_want_one_engine_build_it_once(tmp_path):
    processes = [start_build(tmp_path) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0] == outputs[1] != b""
    assert len(list(tmp_path.glob("*.engine"))) == 1


def test_a_killed_program_leaves_no_lock_and_its_rest_is_cleared(tmp_path):
    process = start_build(tmp_path, "slow_request()")
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(f"{WORK_PREFIX}*/unet.onnx")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.wait()
    process.stdout.close()
    stale = list(tmp_path.glob(f"{WORK_PREFIX}*"))
    assert len(stale) == 1
    library, token = Library(tmp_path), CancelToken()
    with pytest.raises(CancelledError):
        build_engine(library, slow_request(), on_progress=lambda p: token.cancel(), cancel=token)
    assert leftovers(tmp_path) == []


def test_a_full_disk_is_said_before_the_build(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 1_000_000})
    monkeypatch.setattr("extension.files.shutil.disk_usage", lambda folder: usage)
    with pytest.raises(OutputError, match=r"0\.20 GB are needed"):
        build_engine(Library(tmp_path), request())
    assert leftovers(tmp_path) == []


@pytest.fixture
def tiny_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_fills_during_the_build(tiny_disk, monkeypatch):
    monkeypatch.setattr("extension.building._check_space", lambda library, request: None)
    with pytest.raises(OutputError, match="disk is full"):
        build_engine(Library(tiny_disk), request())
    assert leftovers(tiny_disk) == []


def test_a_library_that_is_a_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(OutputError, match="file"):
        build_engine(Library(path), request())
    assert path.read_text() == ""


def test_an_engine_for_a_version_that_is_not_here(tmp_path):
    wrong = request()
    key = EngineKey.from_json({**wrong.key.to_json(), "backend_version": "0.0.1"})
    with pytest.raises(WorkerError, match=r"0\.0\.1"):
        build_engine(Library(tmp_path), BuildRequest(key=key, architecture=ARCH, label="x"))
    assert leftovers(tmp_path) == []


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX priorities")
@pytest.mark.parametrize("nice", [0, 10])
def test_a_worker_yields_to_the_host(tmp_path, nice):
    """So that pictures go on as before while an engine is built."""
    found, before = [], set(workers())
    own = os.getpriority(os.PRIO_PROCESS, 0)

    def look(progress):
        found.extend(os.getpriority(os.PRIO_PROCESS, pid) for pid in set(workers()) - before)

    job = {"kind": "selftest", "backend": "onnxruntime", "folder": str(tmp_path)}
    run_job(job, on_progress=look, setup=WorkerSetup(nice=nice))
    assert set(found) == {own + nice}


@pytest.mark.parametrize(("nice", "expected"), [(10, 0x08004000), (0, 0x08000000)])
def test_a_worker_yields_to_the_host_on_windows(monkeypatch, nice, expected):
    monkeypatch.setattr(subprocess, "CREATE_NO_WINDOW", 0x08000000, raising=False)
    monkeypatch.setattr(subprocess, "BELOW_NORMAL_PRIORITY_CLASS", 0x4000, raising=False)
    asked = []

    def refuse(*args, creationflags, **options):
        asked.append(creationflags)
        raise OSError("no process")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(OSError, match="no process"):
        run_job({"kind": "emit"}, setup=WorkerSetup(nice=nice))
    assert asked == [expected]
