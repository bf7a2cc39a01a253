"""Development tasks on any system: python tasks.py demo|test|lint|bench|clean

Makes .venv beside this file on the first run. Set ENGINE_ROOM_PYTHON to the Python of an
environment of your own to use that instead (it must hold requirements-dev.txt).
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
STAMP = VENV / "installed.txt"
REQUIREMENTS = (("requirements-dev.txt", []), ("requirements-nodeps.txt", ["--no-deps"]))
SUPPORTED = ((3, 10), (3, 13))
CLEANED = (".pytest_cache", ".ruff_cache", ".mypy_cache", ".hypothesis", "demo")


def fail(text):
    """Say what is wrong in one sentence and stop."""
    sys.stderr.write(text + "\n")
    sys.exit(1)


def run(*command, **options):
    """Run a command in the repository; stop with its exit code if it fails."""
    code = subprocess.run(command, cwd=ROOT, check=False, **options).returncode
    if code:
        sys.exit(code)


def venv_python():
    """Path of the environment's Python."""
    return VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def fingerprint():
    """Changes whenever the requirements do."""
    text = b"".join((ROOT / name).read_bytes() for name, _ in REQUIREMENTS)
    return hashlib.sha256(text + sys.version.encode()).hexdigest()


def python():
    """Python of a complete environment; made or completed first where needed."""
    own = os.environ.get("ENGINE_ROOM_PYTHON")
    if own:
        return own
    if STAMP.is_file() and STAMP.read_text() == fingerprint():
        return str(venv_python())
    if not SUPPORTED[0] <= sys.version_info[:2] <= SUPPORTED[1]:
        fail("Engine Room needs Python 3.10 to 3.13; this is " + sys.version.split()[0] + ".")
    if not venv_python().is_file():
        make_venv()
    for name, flags in REQUIREMENTS:
        print(f"Installing {name} (minutes on the first run) ...", flush=True)
        pip = [str(venv_python()), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run(*pip, *flags, "-r", name)
    STAMP.write_text(fingerprint())
    return str(venv_python())


def make_venv():
    """Make .venv; a half-made one is removed."""
    try:
        import venv

        venv.create(VENV, with_pip=True)
    except (ImportError, subprocess.CalledProcessError, OSError) as error:
        shutil.rmtree(VENV, ignore_errors=True)
        fail(f"Python's venv does not work here ({error}). On Debian: apt install python3-venv")


def demo(arguments):
    """The whole main job on a small synthetic model."""
    run(python(), "-m", "extension", "demo", *arguments)


def lint(arguments):
    """Ruff and mypy."""
    run(python(), "-m", "ruff", "check", ".")
    run(python(), "-m", "ruff", "format", "--check", ".")
    run(python(), "-m", "mypy")


def test(arguments):
    """Lint, types and all tests."""
    if arguments:
        run(python(), "-m", "pytest", *arguments)
        return
    lint([])
    # Two workers, whose torch shares the cores: a host under test takes up to 6 GB of memory.
    threads = str(max(1, (os.cpu_count() or 2) // 2))
    shared = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    run(python(), "-m", "pytest", "-n", "2", "--dist", "loadscope", env=shared)


def bench(arguments):
    """Every benchmark; needs an NVIDIA GPU."""
    run(python(), "-m", "benchmarks", *arguments)


def clean(arguments):
    """Remove what the tasks made, but not .venv."""
    for name in CLEANED:
        shutil.rmtree(ROOT / name, ignore_errors=True)


TASKS = {task.__name__: task for task in (demo, test, lint, bench, clean)}


def main():
    """Run the task that was named."""
    if len(sys.argv) < 2 or sys.argv[1] not in TASKS:
        print(__doc__)
        for name, task in TASKS.items():
            print(f"  {name:6} {task.__doc__}")
        sys.exit(0 if "--help" in sys.argv or "-h" in sys.argv else 2)
    TASKS[sys.argv[1]](sys.argv[2:])


if __name__ == "__main__":
    main()
