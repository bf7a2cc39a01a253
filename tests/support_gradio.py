"""Environments with the pins of the WebUI hosts, made once and kept; the host itself is not in."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import pytest

PINS = {
    "3.41.2": [
        "gradio==3.41.2",
        "fastapi==0.94.0",
        "pydantic<2",
        "huggingface_hub<1",
        "httpx==0.24.1",
        "starlette<0.27",
        "numpy==1.26.2",
        "protobuf==3.20.0",
    ],
    "4.40.0": [
        "gradio==4.40.0",
        "huggingface_hub<1",
        "fastapi==0.104.1",
        "pydantic==2.8.2",
        "numpy==1.26.2",
        "protobuf==3.20.0",
    ],
}
SITE = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
KEPT = Path.home() / ".cache" / "engine-room-tests"


def gradio_environment(version):
    """Python of an environment with this gradio; torch and the rest come from ours, behind it."""
    if sys.version_info >= (3, 13):
        pytest.skip("the packages that hosts with this gradio pin are not made for Python 3.13")
    pins = PINS[version]
    stamp = hashlib.sha256(f"{pins}{sys.version}{sys.prefix}".encode()).hexdigest()[:12]
    folder = KEPT / f"gradio-{version}-{stamp}"
    if not folder.is_dir():
        KEPT.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=KEPT))
        try:
            _make(temporary, pins)
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder / "bin" / "python"


def _make(folder, pins):
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    done = subprocess.run(
        [python, "-m", "pip", "install", "-q", *pins], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"no package index: {done.stderr[-300:]}")
    ours = Path(sys.prefix) / SITE
    (folder / SITE / "behind.pth").write_text(f"{ours}\n")


def snapshot(python):
    """Every file of an environment's site-packages, with size and time."""
    site = python.parents[1] / SITE
    return {
        path: (path.stat().st_size, path.stat().st_mtime_ns)
        for path in site.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
