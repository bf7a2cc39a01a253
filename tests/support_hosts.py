"""Real host checkouts: where they are, and how to run code inside them."""

from __future__ import annotations

import functools
import json
import os
import re
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
REQUIREMENTS = ("requirements_versions.txt", "requirements.txt")
# ComfyUI starts without it.
OPTIONAL = {"torchaudio"}
# Prints the packages of its arguments that are not, or not wholly, in its environment.
INSTALLED = """
import csv, sys
from importlib import metadata

def whole(name):
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    # Its attribute "files" leaves out what is missing, from Python 3.12 on.
    rows = csv.reader((found.read_text("RECORD") or "").splitlines())
    return all(found.locate_file(row[0]).exists() for row in rows if row[0].endswith(".py"))

print(*[name for name in sys.argv[1:] if not whole(name)])
"""


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
            missing = missing_packages(root, root / python)
            if missing:
                return None, f"{root} is not wholly installed: its environment lacks {missing}"
            return Checkout(root, root / python), ""
    return None, f"{root} has no environment (venv) of its own"


@functools.lru_cache
def missing_packages(root, python):
    """The packages that a host asks for and its environment lacks, as one text."""
    lists = [root / name for name in REQUIREMENTS if (root / name).is_file()]
    lines = lists[0].read_text().splitlines() if lists else []
    names = {
        match[0] for line in lines if (match := re.match(r"[A-Za-z0-9][\w.-]*(?!.*://)", line))
    }
    ran = subprocess.run(
        [str(python), "-c", INSTALLED, *sorted(names - OPTIONAL)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return ran.stdout.strip() if ran.returncode == 0 else "a Python that runs"


def require_host(name):
    """The checkout, or skip the test with the reason."""
    checkout, reason = find_host(name)
    if checkout is None:
        pytest.skip(reason)
    return checkout
