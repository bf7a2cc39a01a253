"""How much the host's own UNet calls are slowed while an engine is being made beside them.

The host is an eager torch UNet in this process, called in a loop with a wait after each call.
Beside it, one after another: a worker that builds ahead of time (as for every RTX card), one that
builds on this GPU (as for a card that the package cannot name), the first load of an engine, which
compiles its kernels, a later load, and the parity gate.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

from extension.dispatch import run_unet
from extension.library import Library
from extension.machine import can_build_ahead
from extension.ops_torch import TorchUNet
from extension.serving import Target, build_shared, load_engine, try_in_child, verify

from .timing import summarise
from .unet import CASES, half_inputs, half_weights

AHEAD = "8.9"
ALONE_SECONDS = 4.0


class Loop:
    """The host's UNet calls, one after another, in this thread."""

    def __init__(self, case: str) -> None:
        self.arch, self.shape = CASES[case]
        place = torch.device("cuda:0")
        self._inputs = half_inputs(self.arch, self.shape, place)
        self._unet = TorchUNet(self.arch, half_weights(self.arch, place), torch.float16)

    def call(self) -> float:
        """Milliseconds of one call."""
        started = time.perf_counter()
        with torch.no_grad():
            run_unet(self._unet, self._inputs)
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - started)

    def until(self, over: Callable[[], bool]) -> list[float]:
        """Milliseconds of every call until ``over``."""
        times = []
        while not over():
            times.append(self.call())
        return times

    def alone(self) -> list[float]:
        end = time.monotonic() + ALONE_SECONDS
        return self.until(lambda: time.monotonic() > end)

    def beside(self, work: Callable[[], object]) -> tuple[list[float], str]:
        """Times while ``work`` runs in another thread, and its error."""
        error = []

        def run() -> None:
            try:
                work()
            except Exception as fault:
                error.append(f"{type(fault).__name__}: {fault}")

        thread = threading.Thread(target=run)
        thread.start()
        return self.until(lambda: not thread.is_alive()), "".join(error)


def works(loop: Loop, folder: Path) -> dict[str, Callable[[], object]]:
    """What is done beside the host, in turn."""
    arch, shape = loop.arch, loop.shape
    here, ahead = Target(device="cuda:0"), Target(device="cuda:0", capabilities=(AHEAD,))
    library, other = Library(folder / "here"), Library(folder / "ahead")
    held: dict[str, Any] = {}

    def build() -> None:
        held["entry"] = build_shared(library, arch, shape, here)

    def load() -> None:
        if "engine" in held:
            held.pop("engine").close()
        held["engine"] = load_engine(library, held["entry"], here)

    def gate() -> None:
        verify(library, held["entry"], held["engine"], arch, None, here).require("here")

    kind = "ahead of time" if can_build_ahead(here.capabilities) else "on this GPU"
    return {
        "build ahead of time, GPU hidden": lambda: build_shared(other, arch, shape, ahead),
        f"build for this GPU ({kind})": build,
        "first load in a child process": lambda: try_in_child(library, held["entry"]),
        "first load": load,
        "later load": load,
        "parity gate": gate,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, default="sd15-512-b2")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    loop = Loop(args.case)
    loop.alone()
    alone = summarise(loop.alone())
    out: dict[str, Any] = {
        "date": date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "case": args.case,
        "alone": alone.to_json(),
        "beside": {},
    }
    print("alone", alone, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, work in works(loop, Path(folder)).items():
            started = time.monotonic()
            times, error = loop.beside(work)
            after = summarise(loop.alone())
            found = summarise(times)
            out["beside"][name] = {
                "seconds": round(time.monotonic() - started - ALONE_SECONDS, 1),
                **found.to_json(),
                "longest": round(max(times), 1),
                "ratio": round(found.median / after.median, 3),
                "mean_ratio": round(sum(times) / len(times) / after.median, 3),
                "alone_after": round(after.median, 2),
                "error": error,
            }
            print(name, json.dumps(out["beside"][name]), flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"disturbance-{args.case}.json").write_text(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
