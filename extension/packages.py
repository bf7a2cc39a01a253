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
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from .errors import MissingPackageError
from .files import check_free_space, ensure_folder, replace_file, sweep, temporary_folder

VARIABLE = "ENGINE_ROOM_PACKAGES"
SPACE = 3_000_000_000
TEMPORARY = ".install-"
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


def backend_packages(backend: str, cuda: int) -> tuple[str, ...]:
    """What pip installs for a backend; ``cuda`` is 12 or 13."""
    if backend not in ("tensorrt_rtx", "tensorrt"):
        return (backend,)
    package = f"{backend.replace('_', '-')}-cu{cuda}"
    meta = ("tensorrt-rtx",) if backend == "tensorrt_rtx" else ()
    return (*meta, package, f"{package}-libs", f"{package}-bindings")


def install_command(backend: str = "") -> str:
    """What a user types, in any folder, to fill the private folder."""
    place = f' --into "{root()}"' if root() else ""
    chosen = f" {backend}" if backend else ""
    return f'"{sys.executable}" "{Path(__file__).parent}" install{chosen}{place}'


def install(
    backend: str,
    into: Path,
    *,
    cuda: int,
    wheels: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> list[Path]:
    """Fill the private folder ``into``; what is there already is left alone.

    Args:
        cuda: CUDA version of the backend's packages, 12 or 13.
        wheels: a folder that holds the packages, in place of the network.

    Raises:
        OutputError: no space, or the folder cannot be written.
        MissingPackageError: pip could not get the packages; the hint has the command to repeat.
    """
    ensure_folder(into)
    sweep(into, f"{TEMPORARY}*")
    check_free_space(into, SPACE)
    made = []
    worker = into / f"worker-{python_tag()}"
    if not worker.is_dir():
        say("Downloading onnx for the worker ...")
        made.append(_pip(WORKER_PACKAGES, into, lambda folder: worker, wheels))
    if not list(into.glob(_backend_prefix(backend) + "*")):
        say(f"Downloading {backend} (up to 1 GB) ...")
        names = ("--no-deps", *backend_packages(backend, cuda))
        made.append(_pip(names, into, lambda folder: into / _name(backend, folder), wheels))
    return made


def _name(backend: str, folder: Path) -> str:
    found = sorted(folder.glob("*.dist-info"))
    version = found[0].name.removesuffix(".dist-info").rpartition("-")[2] if found else "0"
    return _backend_prefix(backend) + version


def _pip(
    packages: Sequence[str], into: Path, name: Callable[[Path], Path], wheels: Path | None
) -> Path:
    """Install into a temporary folder beside the final one, then rename it."""
    temporary = temporary_folder(into, TEMPORARY)
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    command += ["--no-input", "--target", str(temporary)]
    if wheels is not None:
        command += ["--no-index", "--find-links", str(wheels)]
    try:
        done = subprocess.run(
            [*command, *packages],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )
        if done.returncode:
            raise _refused(packages, done.stderr, wheels)
        target = name(temporary)
        replace_file(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _refused(packages: Sequence[str], stderr: str, wheels: Path | None) -> MissingPackageError:
    lines = [line for line in stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
    names = " ".join(name for name in packages if not name.startswith("-"))
    source = f"in '{wheels}'" if wheels else "from the package index (is this computer online?)"
    return MissingPackageError(
        f"{names} could not be installed {source}: {lines[0].removeprefix('ERROR: ')[:200]}",
        hint=f"Repeat it in a terminal: {install_command()} - or, without a network, add --wheels "
        f"and a folder that was filled elsewhere by: pip download {' '.join(packages)}",
        details={"stderr": stderr[-4000:]},
    )
