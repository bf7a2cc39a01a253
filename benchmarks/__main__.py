"""``python -m benchmarks``: every benchmark in turn, then the README's tables from the results.

Each runs in a process of its own, on a GPU that is otherwise idle. ComfyUI's run where
COMFYUI_ROOT or ~/ComfyUI is a checkout whose packages this Python has; Forge's where a checkout
with an environment of its own is found, as its tests find it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support_hosts import find_host

ROOT = Path(__file__).resolve().parent.parent
FILES = Path("build/benchmarks")


def commands() -> Iterator[list[str]]:
    """The arguments of Python, one benchmark after another."""
    yield ["-m", "benchmarks.unet", "--compile"]
    yield ["-m", "benchmarks.attention"]
    yield ["-m", "benchmarks.forms", "--full"]
    yield ["-m", "benchmarks.baking"]
    yield ["-m", "benchmarks.disturbance"]
    if Path(os.environ.get("COMFYUI_ROOT", Path.home() / "ComfyUI")).is_dir():
        checkpoint, lora = str(FILES / "sd15.safetensors"), str(FILES / "lora.safetensors")
        yield ["-m", "extension", "make-checkpoint", checkpoint, "--size", "full"]
        yield ["-m", "extension", "make-lora", lora, "--size", "full"]
        for name in ("benchmarks.comfyui", "benchmarks.first_pictures"):
            yield ["-m", name, "--checkpoint", checkpoint, "--lora", lora]
    if find_host("forge")[0] is not None:
        yield ["-m", "benchmarks.webui"]
    yield ["-m", "benchmarks.report"]


def main() -> None:
    (ROOT / FILES).mkdir(parents=True, exist_ok=True)
    for arguments in commands():
        print("python", *arguments, flush=True)
        if subprocess.run([sys.executable, *arguments], cwd=ROOT).returncode:
            sys.exit(f"Stopped: python {' '.join(arguments)} failed.")


if __name__ == "__main__":
    main()
