"""Real host checkouts: where they are, and how to run code inside them."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HOSTS = {
    "comfyui": ("COMFYUI_ROOT", "ComfyUI"),
    "a1111": ("A1111_ROOT", "stable-diffusion-webui"),
    "forge": ("FORGE_ROOT", "stable-diffusion-webui-forge"),
    "reforge": ("REFORGE_ROOT", "stable-diffusion-webui-reForge"),
    "classic": ("CLASSIC_ROOT", "sd-webui-forge-classic"),
}


@dataclass(frozen=True)
class Checkout:
    """A host's folder and the Python of its own environment."""

    root: Path
    python: Path

    def run(self, code, *args, timeout=300):
        """Run code with the host on the path; the last line it prints is JSON."""
        prelude = f"import sys; sys.path[:0] = [{str(self.root)!r}, {str(ROOT)!r}]\n"
        out = subprocess.run(
            [str(self.python), "-c", prelude + code, *map(str, args)],
            capture_output=True,
            text=True,
            cwd=self.root,
            timeout=timeout,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        )
        assert out.returncode == 0, (out.stdout + out.stderr)[-3000:]
        return json.loads(out.stdout.strip().splitlines()[-1])


def find_host(name):
    """The checkout of a host, or a reason why there is none."""
    variable, folder = HOSTS[name]
    root = Path(os.environ.get(variable) or Path.home() / folder)
    if not root.is_dir():
        return None, f"no {name} checkout at {root}; set {variable}"
    for python in ("venv/bin/python", ".venv/bin/python", "venv/Scripts/python.exe"):
        if (root / python).exists():
            return Checkout(root, root / python), ""
    return None, f"{root} has no environment (venv) of its own"


def require_host(name):
    """The checkout, or skip the test with the reason."""
    checkout, reason = find_host(name)
    if checkout is None:
        pytest.skip(reason)
    return checkout
