"""The private folder: packages of our own that never enter the host's environment.

``tensorrt-<python>-<backend>-<version>`` holds one backend's runtime, ``worker-<python>`` what the
worker needs beside it. In development, where neither exists, the environment's packages serve.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from .errors import MissingPackageError, OutputError
from .files import check_free_space, ensure_folder

VARIABLE = "ENGINE_ROOM_PACKAGES"
SPACE = 3_000_000_000
CUDA_SUFFIX = {"12": "cu12", "13": "cu13"}
WORKER_PACKAGES = ("onnx",)


def python_tag() -> str:
    """Such as ``cp311``: binary packages fit one Python only."""
    return f"cp{sys.version_info.major}{sys.version_info.minor}"


def root() -> Path | None:
    """The private folder that the host adapter set, if any."""
    text = os.environ.get(VARIABLE, "")
    return Path(text) if text else None


def use_root(folder: Path) -> None:
    """Use ``folder`` from now on, unless the user's environment names another."""
    os.environ.setdefault(VARIABLE, str(folder))


def backend_folder(name: str) -> Path | None:
    """The newest private copy of a backend for this Python."""
    found = _folders(_backend_prefix(name) + "*")
    return found[-1] if found else None


def worker_folders(backend: str) -> list[Path]:
    """What the worker puts on its path: both private folders, or nothing in development."""
    found = [*_folders(f"worker-{python_tag()}"), backend_folder(backend)]
    return [folder for folder in found if folder is not None]


def _backend_prefix(name: str) -> str:
    return f"tensorrt-{python_tag()}-{name}-"


def _folders(pattern: str) -> list[Path]:
    base = root()
    return sorted(base.glob(pattern)) if base else []


def import_private(module: str, backend: str) -> ModuleType:
    """Import a backend's module; its private folder is on the path during the import only."""
    folder = backend_folder(backend)
    if folder is None:
        return importlib.import_module(module)
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(module)
    finally:
        sys.path.remove(str(folder))


def backend_packages(backend: str, cuda: str | None) -> tuple[str, ...]:
    """What pip installs for a backend; ``cuda`` is torch's CUDA version, such as ``12.8``."""
    if backend != "tensorrt_rtx":
        return (backend,)
    suffix = CUDA_SUFFIX.get((cuda or "13").split(".")[0], "cu13")
    return (
        "tensorrt-rtx",
        f"tensorrt-rtx-{suffix}",
        f"tensorrt-rtx-{suffix}-libs",
        f"tensorrt-rtx-{suffix}-bindings",
    )


def install_command(backend: str) -> str:
    """What a user types to fill the private folder."""
    place = f' --into "{root()}"' if root() else ""
    return f"{Path(sys.executable).name} -m extension install {backend}{place}"


def install(
    backend: str, into: Path, *, cuda: str | None, say: Callable[[str], None] = lambda text: None
) -> list[Path]:
    """Fill the private folder ``into``; what is there already is left alone.

    Raises:
        OutputError: no space, or the folder cannot be written.
        MissingPackageError: pip could not get the packages; the hint has its command.
    """
    ensure_folder(into)
    check_free_space(into, SPACE)
    made = []
    worker = into / f"worker-{python_tag()}"
    if not worker.is_dir():
        say("Downloading onnx for the worker ...")
        _pip(WORKER_PACKAGES, into, lambda folder: worker, dependencies=True)
        made.append(worker)
    if not list(into.glob(_backend_prefix(backend) + "*")):
        say(f"Downloading {backend} (up to 1 GB) ...")
        packages = backend_packages(backend, cuda)
        made.append(
            _pip(packages, into, lambda folder: into / _name(backend, folder), dependencies=False)
        )
    return made


def _name(backend: str, folder: Path) -> str:
    found = sorted(folder.glob("*.dist-info"))
    version = found[0].name.removesuffix(".dist-info").rpartition("-")[2] if found else "0"
    return _backend_prefix(backend) + version


def _pip(
    packages: Sequence[str], into: Path, name: Callable[[Path], Path], *, dependencies: bool
) -> Path:
    """Install into a temporary folder beside the final one, then rename it."""
    temporary = Path(tempfile.mkdtemp(dir=into, prefix=".install-"))
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    command += ["--no-input", "--target", str(temporary), *packages]
    if not dependencies:
        command.insert(4, "--no-deps")
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
            raise MissingPackageError(
                f"{' '.join(packages)} could not be installed: {last[:200]}",
                hint=f"Try it by hand: {' '.join(command)}",
            )
        target = name(temporary)
        temporary.replace(target)
    except OSError as error:
        raise OutputError(f"'{into}' cannot be written: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target
