"""Import rules: who may import what, and what the core must live without."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "extension").rglob("*.py"))
CORE = sorted(p for p in (ROOT / "extension").rglob("*.py") if "hosts" not in p.parts)
MODULES = [p.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for p in CORE]
HOSTS = ("modules", "modules_forge", "comfy", "folder_paths", "gradio", "server", "backend",
         "ldm_patched", "execution", "launch", "networks")  # fmt: skip
OPTIONAL = ("tensorrt", "tensorrt_rtx", "onnx", "onnxruntime", "transformers", "tokenizers", "PIL",
            "filelock", "clip")  # fmt: skip
# What the worker needs lives without torch: the private folder holds only onnx and TensorRT.
TORCH_FREE = ("worker", "worker_tasks", "errors", "log", "shapes", "architecture", "unet", "key",
              "progress", "files", "safetensors_file", "onnx_graph", "ops_onnx", "ops_shapes",
              "fingerprint", "diffusers_names", "build_history", "manifest", "detection",
              "engine.interface", "engine.trt_api", "engine.trt_build")  # fmt: skip


def imported(path, *, top_only=False):
    """(level, module, line) of every import in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = tree.body if top_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield 0, alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module or "", node.lineno


def run_blocked(blocked, body):
    code = f"import sys\nfor n in {blocked!r}: sys.modules[n] = None\n"
    code += f"sys.path.insert(0, {str(ROOT)!r})\n{body}"
    return subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)


def test_every_core_module_imports_without_hosts_and_optional_packages():
    body = "import importlib\n" + "\n".join(
        f"importlib.import_module({name!r})" for name in MODULES if not name.endswith("__main__")
    )
    out = run_blocked(HOSTS + OPTIONAL, body)
    assert out.returncode == 0, out.stderr[-600:]
    assert (out.stdout, out.stderr) == ("", "")


def test_the_workers_modules_import_without_torch():
    body = "import importlib\n" + "\n".join(
        f"importlib.import_module('extension.{name}')" for name in TORCH_FREE
    )
    blocked = HOSTS + OPTIONAL + ("torch", "numpy", "safetensors")
    out = run_blocked(blocked, body)
    assert out.returncode == 0, out.stderr[-600:]


def test_importing_changes_nothing():
    """No thread, no handler, no path entry, no torch setting."""
    body = (
        "import threading, logging, os, torch\n"
        "state = lambda: (threading.active_count(), list(logging.root.handlers), list(sys.path),"
        " dict(os.environ), torch.is_grad_enabled(), torch.get_num_threads())\n"
        "before = state()\nimport importlib\n"
        + "\n".join(
            f"importlib.import_module({name!r})"
            for name in MODULES
            if not name.endswith("__main__")
        )
        + "\nassert before == state()"
    )
    out = run_blocked((), body)
    assert out.returncode == 0, out.stderr[-600:]


@pytest.mark.parametrize("path", CORE, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_the_core_imports_itself_relatively_and_no_host(path):
    for level, module, line in imported(path):
        where = f"{path.name}:{line}"
        root = module.split(".")[0]
        assert root not in HOSTS or level, f"{where} imports a host"
        assert not (level == 0 and root in ("extension", "engine_room")), where
        assert not (level and "hosts" in module.split(".")), f"{where} imports a host adapter"
    for level, module, line in imported(path, top_only=True):
        if not level:
            assert module.split(".")[0] not in OPTIONAL, f"{path.name}:{line} must import late"


def test_host_adapters_do_not_know_each_other():
    for path in (ROOT / "extension" / "hosts").rglob("*.py"):
        parts = path.relative_to(ROOT / "extension" / "hosts").parts
        own = {"webui": "modules", "comfy": "comfy"}.get(parts[0], "")
        foreign = {"webui", "comfy", "modules", "gradio"} - {parts[0], own}
        for level, module, line in imported(path):
            names = set(module.split(".")) if level else {module.split(".")[0]}
            assert not names & (foreign - ({"gradio"} if own == "modules" else set())), (
                f"{path}:{line}"
            )


def test_entry_points_hold_no_logic():
    """The script file is executed by the host under its bare name."""
    text = (ROOT / "scripts" / "engine_room.py").read_text()
    assert "dataclass" not in text
    assert all(level == 0 for level, _, _ in imported(ROOT / "scripts" / "engine_room.py"))
    assert not (ROOT / "scripts" / "__init__.py").exists()


# Old Pythons and torches


@pytest.mark.parametrize(
    "path",
    [p for p in ROOT.rglob("*.py") if not {".venv", "build"} & set(p.relative_to(ROOT).parts)],
    ids=lambda p: p.relative_to(ROOT).as_posix(),
)
def test_every_file_parses_as_python_3_10(path):
    ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 10))


# Names that came to torch after 2.1; hosts pin 2.1.
NEWER = {
    "torch.library.custom_op",
    "torch.nn.attention",
    "torch.accelerator",
    "torch.nn.RMSNorm",
    "torch.nn.functional.rms_norm",
    "torch.compiler.set_stance",
    "torch.amp.GradScaler",
    "torch.get_device_module",
    "torch.serialization.safe_globals",
    "torch.serialization.add_safe_globals",
    "torch.uint16",
    "torch.uint32",
    "torch.uint64",
    "torch.float4_e2m1fn_x2",
    "torch.float8_e8m0fnu",
}


def dotted(node):
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def test_no_torch_name_newer_than_2_1():
    """And none that this torch does not have (a typing error would pass the list above)."""
    import torch

    for path in CORE + sorted((ROOT / "extension" / "hosts").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = dotted(node)
            if not name.startswith("torch."):
                continue
            assert name not in NEWER, f"{path.name}:{node.lineno} {name}"
            value = torch
            for part in name.split(".")[1:3]:
                assert hasattr(value, part), f"{path.name}:{node.lineno} {name}"
                value = getattr(value, part)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_executable_is_loaded_from_a_file(path):
    """No pickle but through ``weights_only=True``; no host code and no plugins from engines."""
    text = path.read_text(encoding="utf-8")
    assert "engine_host_code_allowed" not in text
    assert "load_library" not in text
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", "") or ""]
            assert not {"pickle", "dill", "marshal", "shelve"} & set(names)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "torch.load",
            "torch.jit.load",
        ):
            safe = [k.value.value for k in node.keywords if k.arg == "weights_only"]
            assert safe == [True]
