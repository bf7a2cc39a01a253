"""The doctor: facts, a self-test that runs, and numbered things to do."""

from __future__ import annotations

import pytest

from extension import doctor
from extension.backend_choice import BackendChoice
from extension.doctor import HostFacts, diagnose, known_others
from extension.errors import BuildError, UnsupportedMachineError
from extension.library import Library
from tests.test_library import HERE, publish


@pytest.fixture
def library(tmp_path):
    return Library(tmp_path)


def test_all_good_with_an_engine_built_and_run(library):
    found = diagnose(library, "cpu")
    assert found.todo == []
    assert found.lines[-1] == "all good"
    assert found.facts["onnxruntime"].endswith("ran it: right")
    assert "built a test engine" in found.facts["tensorrt_rtx"]
    assert "not run: no GPU" in found.facts["tensorrt_rtx"]


def test_a_wrong_engine_is_found(library, monkeypatch):
    """The self-test compares what the engine computes, not only that it runs."""
    honest = doctor.check

    def broken(engine, *args, **kwargs):
        run = engine.run
        monkeypatch.setattr(engine, "run", lambda inputs: run(inputs) * 1.1)
        return honest(engine, *args, **kwargs)

    monkeypatch.setattr(doctor, "check", broken)
    found = diagnose(library, "cpu")
    assert "computes something else" in found.facts["onnxruntime"]
    assert found.todo[0].startswith("onnxruntime")


def test_a_backend_that_cannot_build(library, monkeypatch):
    def fail(*args, **kwargs):
        raise BuildError("The compiler is out of order.")

    monkeypatch.setattr(doctor, "run_job", fail)
    found = diagnose(library, "cpu")
    assert found.lines[-1].startswith("2. onnxruntime")
    assert "out of order" in found.todo[0]


def test_missing_tensorrt_comes_with_its_command(library, monkeypatch):
    monkeypatch.setattr(doctor, "machine_of", lambda device: HERE)
    monkeypatch.setattr(doctor, "choose", lambda _: BackendChoice(backend="tensorrt_rtx", cuda=12))
    monkeypatch.setattr(doctor, "_backend", lambda *args: "not installed")
    found = diagnose(library, "cuda:0", selftest=False)
    assert 'extension" install' in found.todo[0]
    assert found.facts["for this machine"] == "tensorrt_rtx for CUDA 12"


def test_a_card_that_is_too_old_is_said(library, monkeypatch):
    monkeypatch.setattr(doctor, "machine_of", lambda device: HERE)

    def refuse(_):
        raise UnsupportedMachineError("Tesla K80 is too old.")

    monkeypatch.setattr(doctor, "choose", refuse)
    found = diagnose(library, "cuda:0", selftest=False)
    assert found.todo == ["Tesla K80 is too old."]
    assert diagnose(library, "cpu", selftest=False).todo == []


def test_damaged_engines_are_named(library):
    stem = publish(library).stem
    (library.folder / f"{stem}.engine").write_bytes(b"")
    found = diagnose(library, "cpu", selftest=False)
    assert stem in found.todo[0]


def test_hosts_hooks_and_other_extensions(library):
    host = HostFacts(name="Host 1", hooks={"wrapper": True, "callback": False}, others=["X: y"])
    found = diagnose(library, "cpu", selftest=False, host=host)
    assert "Host 1 has no callback" in found.todo[0]
    assert "hooks: wrapper found, callback missing" in found.lines
    assert "others: X: y" in found.lines


def test_which_extensions_are_known_to_touch_the_unet():
    names = ["ComfyUI_TensorRT", "engine-room", "engine_room_tensorrt", "sd-webui-freeu", "cats"]
    found = known_others(names)
    assert [line.split(":")[0] for line in found] == ["ComfyUI_TensorRT", "sd-webui-freeu"]
