"""Every command, as a user runs it: results, ``--json``, exit codes, no tracebacks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from extension.checkpoint import open_checkpoint
from extension.cli import build_parser, main
from extension.library import Library
from extension.routed import RoutedUNet
from extension.speed import recorded

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("ENGINE_ROOM_LIBRARY", str(tmp_path / "library"))
    monkeypatch.chdir(tmp_path)

    def call(*args):
        code = main([str(arg) for arg in args])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return call


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for command in (
        ("make-checkpoint", "--family", "sd15", "--seed", "1", folder / "m.safetensors"),
        ("make-lora", "--for", folder / "m.safetensors", folder / "l.safetensors"),
        (
            "make-lora",
            "--family",
            "sdxl",
            "--size",
            "full",
            "--rank",
            "1",
            folder / "xl.safetensors",
        ),
    ):
        assert main([str(part) for part in command]) == 0
    return folder


def as_json(run, *args):
    code, out, _ = run(*args, "--json")
    return code, json.loads(out)


def test_help_for_every_command(capsys):
    parser = build_parser()
    commands = next(a for a in parser._actions if hasattr(a, "choices") and a.choices)
    expected = {"doctor", "inspect", "make-checkpoint", "make-lora", "export", "build", "engines"}
    assert expected | {"sample", "compare", "demo"} <= set(commands.choices)
    for name in commands.choices:
        with pytest.raises(SystemExit) as caught:
            main([name, "--help"])
        assert caught.value.code == 0
        assert "--json" in capsys.readouterr().out or name == "engines"


def test_no_command_and_wrong_ones(capsys):
    for args in ([], ["fly"], ["build"], ["inspect"]):
        with pytest.raises(SystemExit) as caught:
            main(args)
        assert caught.value.code == 2
        assert "usage" in capsys.readouterr().err


def test_inspect(run, files):
    code, facts = as_json(run, "inspect", files / "m.safetensors", "--fingerprint")
    assert code == 0
    assert facts["architecture"]["context_dim"] == 64
    with open_checkpoint(files / "m.safetensors") as checkpoint:
        assert facts["fingerprint"] == checkpoint.fingerprint()
    code, facts = as_json(run, "inspect", files / "l.safetensors")
    assert (code, facts["kind"]) == (0, "lora")
    assert facts["modules"] > 10


def test_from_checkpoint_to_engine_to_picture(run, files, tmp_path):
    model, lora = files / "m.safetensors", f"{files / 'l.safetensors'}:0.8"
    code, exported = as_json(run, "export", model, "--lora", lora, tmp_path / "pair")
    assert code == 0
    assert (tmp_path / "pair" / "unet.onnx").is_file()
    assert exported["loras"][0]["unknown"] == []
    code, built = as_json(run, "build", model, "--size", "64", "--batch", "2")
    assert (code, built["state"]) == (0, "unverified")
    code, again = as_json(run, "build", model, "--size", "64", "--batch", "2")
    assert again["id"] == built["id"]
    code, _, _ = run("engines", "verify", built["id"][:6], "--checkpoint", model)
    assert code == 0
    code, listed = as_json(run, "engines", "list")
    assert [engine["state"] for engine in listed["engines"]] == ["ready"]
    code, shown = as_json(run, "engines", "show", built["id"])
    assert shown["parity"][0]["worst_relative_l2"] < 1e-5
    drawing = ("--size", "64", "--steps", "3", "--lora", lora, "--seed", "4")
    code, sampled = as_json(run, "sample", model, *drawing, "--out", tmp_path / "a.png")
    assert code == 0
    assert sampled["served"]["served"] == 3
    with Image.open(tmp_path / "a.png") as image:
        assert image.size == (64, 64)
        assert image.text
    code, compared = as_json(run, "compare", model, *drawing, "--out", tmp_path / "b.png")
    assert code == 0
    assert compared["worst_call_error"] < 1e-5
    assert compared["psnr_db"] > 60
    code, removed = as_json(run, "engines", "remove", built["id"])
    assert (code, removed["id"]) == (0, built["id"])
    assert not list((tmp_path / "library").glob("*.engine"))


@pytest.mark.parametrize("tier", ["torch", "baked"])
def test_sampling_through_the_other_tiers(run, files, tmp_path, tier):
    drawing = ("--size", "64", "--steps", "2", "--sampler", "dpmpp_2m", "--schedule", "karras")
    out = tmp_path / "p.png"
    code, facts = as_json(
        run, "sample", files / "m.safetensors", *drawing, "--tier", tier, "--out", out
    )
    assert code == 0, facts
    assert out.is_file()


def test_every_family_of_synthetic_checkpoints(run, tmp_path):
    for family in ("sd15", "sd21", "sdxl"):
        path = tmp_path / f"{family}.safetensors"
        assert run("make-checkpoint", "--family", family, path)[0] == 0
        code, facts = as_json(run, "inspect", path)
        assert code == 0
        assert family[:3] in facts["label"].lower().replace(".", "")


BAD = {
    "missing file": (("inspect", "nowhere.safetensors"), 3, "nowhere.safetensors"),
    "empty file": (("inspect", "empty.safetensors"), 3, "empty.safetensors"),
    "html": (("export", "html.safetensors", "out"), 3, "html.safetensors"),
    "truncated": (("build", "cut.safetensors"), 3, "cut.safetensors"),
    "size": (("build", "M", "--size", "500"), 2, "496 and 504"),
    "size in words": (("build", "M", "--size", "big"), 2, "512"),
    "batch": (("build", "M", "--size", "64", "--batch", "0"), 2, "batch"),
    "capability": (("build", "M", "--capability", "3.5"), 2, "3.5"),
    "wrong base": (("export", "M", "--lora", "XL", "out"), 5, "SDXL"),
    "missing lora": (("sample", "M", "--lora", "no.safetensors"), 3, "no.safetensors"),
    "strength": (("sample", "M", "--lora", "L:nan", "--size", "64"), 2, "strength"),
    "steps": (("sample", "M", "--steps", "0", "--size", "64"), 2, "step"),
    "no such engine": (("engines", "show", "0123456789abcdef"), 10, "0123456789abcdef"),
    "engine id": (("engines", "remove", "../../etc"), 10, "engine"),
    "folder is a file": (("export", "M", "empty.safetensors"), 7, "file"),
    "checkpoint as lora": (("export", "M", "--lora", "M", "out"), 3, "no LoRA"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_clear_error(run, files, tmp_path, name):
    args, code, words = BAD[name]
    (tmp_path / "empty.safetensors").write_bytes(b"")
    (tmp_path / "html.safetensors").write_bytes(b"<!DOCTYPE html><title>Log in</title>")
    whole = (files / "m.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    names = {"M": files / "m.safetensors", "XL": files / "xl.safetensors"}
    names["L:nan"] = f"{files / 'l.safetensors'}:nan"
    before = sorted(tmp_path.iterdir())
    args = [names.get(arg, arg) for arg in args]
    actual, out, err = run(*args)
    assert (actual, out) == (code, ""), err
    assert words in err
    assert len(err.strip().splitlines()) <= 3
    made = [p for p in sorted(tmp_path.iterdir()) if p not in before]
    assert [p for folder in made for p in folder.rglob("*") if p.suffix not in (".lock", "")] == []
    actual, out, _ = run(*args, "--json")
    assert actual == code
    assert words in json.dumps(json.loads(out)["error"], ensure_ascii=False)


def test_doctor_says_what_to_do(run):
    code, facts = as_json(run, "doctor")
    assert code == 0, facts
    code, text, _ = run("doctor", "--no-selftest")
    assert code == 0
    assert "torch" in text


def test_a_missing_package_comes_with_its_command(files, tmp_path):
    code = (
        "import sys; sys.modules['onnxruntime'] = None\n"
        "from extension.cli import main\n"
        f"sys.exit(main(['build', {str(files / 'm.safetensors')!r}, '--size', '64', "
        f"'--device', 'cpu', '--backend', 'onnxruntime', '--library', {str(tmp_path)!r}]))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert out.returncode == 6
    assert "pip install onnxruntime" in out.stderr
    assert "Traceback" not in out.stderr


def test_bench_times_what_is_right_and_keeps_the_speed(run, files, tmp_path, monkeypatch):
    options = [files / "m.safetensors", "--size", "64", "--rounds", "1", "--baked", "--library"]
    monkeypatch.setattr("extension.commands.bench.LEAST_SECONDS", 0.02)
    code, facts = as_json(run, "bench", *options, tmp_path)
    assert code == 0
    assert set(facts["contenders"]) == {"torch", "shared engine", "baked engine"}
    for name, found in facts["contenders"].items():
        assert found["ms"] > 0, name
        assert found["problem"] == ""
        assert found["error"] <= 1e-4
    _, listed = as_json(run, "engines", "list", "--library", tmp_path)
    assert len(listed["engines"]) == 2
    library = Library(tmp_path)
    for engine in listed["engines"]:
        assert recorded(library.read_state(engine["id"]), "CPU").ratio > 0


def test_bench_times_nothing_that_is_wrong(run, files, tmp_path, monkeypatch):
    honest = RoutedUNet.__call__
    monkeypatch.setattr(RoutedUNet, "__call__", lambda *args, **k: honest(*args, **k) * 1.1)
    code, text, _ = run("bench", files / "m.safetensors", "--size", "64", "--rounds", "1",
                        "--library", tmp_path)  # fmt: skip
    assert code == 0
    assert "wrong: error 0.1" in text
    assert "not recommended" in text


@pytest.mark.timeout(300)
def test_the_demo(tmp_path):
    """The README's first command: a table that passes its own limits, and a picture."""
    command = [sys.executable, "-m", "extension", "demo", "--folder", str(tmp_path), "--json"]
    out = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert out.returncode == 0, out.stderr
    facts = json.loads(out.stdout)
    assert facts["builds_for_lora_change"] == facts["host"] == 0
    assert facts["served"] > 10
    assert [run["worst_call_error"] < 1e-5 for run in facts["runs"]] == [True, True]
    with Image.open(facts["pictures"]) as image:
        assert image.size[0] > image.size[1]
