"""The same checkout loads the way each host loads extensions, from an awkward folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
AWKWARD = "we ird-name.v2"
PARTS = ("extension", "nodes", "scripts", "javascript", "__init__.py", "install.py",
         "metadata.ini", "pyproject.toml")  # fmt: skip


@pytest.fixture
def installed(tmp_path):
    """A copy in an extensions folder, beside a decoy with the same inner names."""
    target = tmp_path / "extensions" / AWKWARD
    target.mkdir(parents=True)
    for name in PARTS:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, target / name)
    decoy = tmp_path / "extensions" / "decoy"
    for package in ("extension", "nodes", "engine", "hosts", "modules_decoy"):
        (decoy / package).mkdir(parents=True)
        (decoy / package / "__init__.py").write_text("DECOY = True\n")
    return target, decoy


def python(body, *, cwd):
    out = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, cwd=cwd)
    assert out.returncode == 0, out.stderr[-1500:]
    return out.stdout + out.stderr


# What nodes.py's load_custom_node does (ComfyUI 0.3.64).
COMFY = """
import importlib.util, sys, types
{before}
path = {path!r}
def load():
    name = path.replace(".", "_x_")
    spec = importlib.util.spec_from_file_location(name, path + "/__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
first, second = load(), load()
for module in (first, second):
    assert isinstance(module.NODE_CLASS_MAPPINGS, dict)
    assert set(module.NODE_DISPLAY_NAME_MAPPINGS) <= set(module.NODE_CLASS_MAPPINGS)
assert "torch" not in sys.modules
"""


def test_comfyui_loads_the_folder_twice_beside_a_decoy(installed, tmp_path):
    """Without ComfyUI around it, the pack is inert and says nothing."""
    target, decoy = installed
    body = COMFY.format(path=str(target), before=f"sys.path.insert(0, {str(decoy)!r})")
    assert python(body, cwd=tmp_path) == ""


# What script_loading and scripts.load_scripts do (AUTOMATIC1111 1.10.1).
A1111 = """
import importlib.util, os, sys
decoy, root = {decoy!r}, {path!r}
def load(base, name):
    saved, sys.path = sys.path, [base] + sys.path
    try:
        path = os.path.join(base, "scripts", name)
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path = saved
sys.path.insert(0, decoy)
import extension
assert extension.DECOY
first = load(root, "engine_room.py")
again = load(root, "engine_room.py")
assert first.core is again.core is sys.modules["engine_room"]
assert first.core.__version__
assert sys.modules["extension"].DECOY
from importlib import import_module
shapes = import_module("engine_room.shapes")
assert shapes.__file__.startswith(root)
"""


def test_a1111_loads_the_script_twice_beside_a_decoy(installed, tmp_path):
    target, decoy = installed
    assert python(A1111.format(path=str(target), decoy=str(decoy)), cwd=tmp_path) == ""


def test_a_second_copy_is_named_and_stands_back(installed, tmp_path):
    target, _ = installed
    other = tmp_path / "extensions" / "engine-room-2"
    shutil.copytree(target, other)
    body = A1111.split("sys.path.insert(0, decoy)")[0].format(path=str(target), decoy="")
    body += (
        f"first = load(root, 'engine_room.py')\nother = load({str(other)!r}, 'engine_room.py')\n"
    )
    body += "assert other.core is None and first.core is not None"
    said = python(body, cwd=tmp_path)
    assert "Two copies" in said
    assert str(other) in said


def test_the_worker_runs_from_the_awkward_folder(installed, tmp_path):
    target, _ = installed
    body = A1111.split("sys.path.insert(0, decoy)")[0].format(path=str(target), decoy="")
    body += (
        "load(root, 'engine_room.py')\n"
        "from importlib import import_module as i\n"
        "job = {'kind': 'selftest', 'backend': 'onnxruntime', 'folder': '.'}\n"
        "print(i('engine_room.jobs').run_job(job)['engine_bytes'] > 0)"
    )
    assert python(body, cwd=tmp_path).strip() == "True"


@pytest.mark.parametrize("arguments", [[], ["--dry-run"]])
def test_install_py_changes_nothing_and_never_fails(installed, tmp_path, arguments):
    """Twice, with an unreadable pip, and under a Python without any package."""
    target, _ = installed
    for flags in (["-I"], ["-I", "-S"]):
        for _ in range(2):
            out = subprocess.run(
                [sys.executable, *flags, str(target / "install.py"), *arguments],
                capture_output=True,
                text=True,
                cwd=tmp_path,
            )
            assert out.returncode == 0
            assert out.stderr == ""
    assert bool(out.stdout) == bool(arguments)


def test_one_module_with_hosts_requirements_only():
    """The hosts install requirements.txt; it must ask for nothing (private folder)."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    assert [line for line in lines if line.strip() and not line.startswith("#")] == []
