"""UNet calls on one GPU: engines with and without baked weights against torch.

Every engine is compared with fp32 torch in the same run before it is timed, and is not timed
where it computes something else (error above 4e-2). ``eager`` and its CUDA
graph and torch.compile are peers over Engine Room's own torch interpreter.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from extension.architecture import SD15, SDXL, Architecture
from extension.binding import Binding
from extension.building import BuildRequest, build_engine
from extension.engine import get_backend
from extension.engine.interface import Engine
from extension.engine.torch_graph import TorchGraphEngine
from extension.key import EngineKey
from extension.library import Entry, Library
from extension.memory import instant_bytes
from extension.onnx_export import export_pair
from extension.ops_torch import TorchUNet
from extension.parity import MOST_LIMIT, cast_inputs, check, random_inputs
from extension.router import Plan
from extension.serving import Target
from extension.shapes import Shape
from extension.synthetic import random_unet
from extension.watch import OutputWatch, is_finite

from .profiling import kernels
from .timing import interleave

STEPS = 10
EAGER_GRAPH = "eager + CUDA graph (instant tier)"
CHECKS: tuple[str, ...] = ("unchecked", "read a call later", "waited for")

CASES: dict[str, tuple[Architecture, Shape]] = {
    "sd15-512-b2": (SD15, Shape(batch=2, height=64, width=64)),
    "sdxl-1024-b2": (SDXL, Shape(batch=2, height=128, width=128)),
}
ENGINES: dict[str, dict[str, Any]] = {
    "shared": {},
    "shared, HWC8 copies": {"conv_format": "hwc8"},
    "baked": {"baked": True},
}


def half_weights(arch: Architecture, place: torch.device, seed: int = 0) -> dict[str, Tensor]:
    """Random weights in fp16 on a device, by LDM name."""
    return {name: tensor.half().to(place) for name, tensor in random_unet(arch, seed).items()}


def half_inputs(arch: Architecture, shape: Shape, place: torch.device) -> dict[str, Tensor]:
    """Inputs of one call by engine name; all but the timesteps in fp16."""
    inputs = random_inputs(arch, shape, 500.5, seed=3, device=place)
    return cast_inputs(inputs, torch.float16)


class Bench:
    """One case on one device."""

    def __init__(self, name: str, library: Library, out: dict[str, Any]) -> None:
        self.arch, self.shape = CASES[name]
        self.library, self.out = library, out
        self.target = Target(device="cuda:0")
        self.place = torch.device(self.target.device)
        self.weights = half_weights(self.arch, self.place)
        self.inputs = half_inputs(self.arch, self.shape, self.place)
        self.peers: dict[str, Callable[[], object]] = {}
        self.engines: dict[str, tuple[Engine, Binding]] = {}

    def _args(self) -> list[Tensor | None]:
        return [self.inputs.get(n) for n in ("x", "timesteps", "context", "y")]

    def add_torch(self, *, compiled: bool) -> None:
        unet = TorchUNet(self.arch, self.weights, torch.float16)
        args = self._args()
        self.peers["eager"] = lambda: unet(*args)
        self._add_instant()
        if compiled:
            started = time.perf_counter()
            fast = torch.compile(unet.__call__, dynamic=False)
            with torch.no_grad():
                fast(*args)
                self.peers["torch.compile + CUDA graph"] = _graphed(lambda: fast(*args))
            self.out["compile_seconds"] = round(time.perf_counter() - started, 1)

    def _add_instant(self) -> None:
        """The instant tier: eager torch in a CUDA graph."""
        before = _used()
        engine = TorchGraphEngine(self.arch, self.shape, dtype="fp16", device=self.target.device)
        binding = Binding(engine, self.place)
        binding.refresh(self.weights, epoch=0)
        started = time.perf_counter()
        for _ in range(3):
            engine.run(self.inputs)
        torch.cuda.synchronize()
        self.out["instant"] = {
            "start_seconds": round(time.perf_counter() - started, 2),
            "memory_bytes": _used() - before,
            "activation_bytes": engine.activation_bytes,
            "estimated_bytes": instant_bytes(self.arch, self.shape, "fp16"),
        }
        self.instant = (engine, binding)
        self.peers[EAGER_GRAPH] = lambda: engine.run(self.inputs)

    def add_engine(self, label: str, *, conv_format: str = "linear", baked: bool = False) -> None:
        entry = self._baked() if baked else self._shared(conv_format)
        data = self.library.read_engine(entry.stem)
        before = _used()
        started = time.perf_counter()
        engine = get_backend(entry.key.backend).load(data, device=self.target.device)
        loaded = time.perf_counter() - started
        result = check(
            engine,
            self.arch,
            self.shape,
            self.weights,
            dtype="fp16",
            device=self.target.device,
        )
        binding = Binding(engine, self.place)
        report = binding.refresh(self.weights, epoch=0)
        facts = {
            "engine_bytes": entry.bytes_on_disk,
            "build_seconds": entry.manifest.build_seconds if entry.manifest else None,
            "load_seconds": round(loaded, 2),
            "parity": {"worst": result.worst, "noise": result.noise, "limit": result.limit},
            "staged_bytes": report.staged_bytes,
            "memory_bytes": _used() - before,
            "activation_bytes": engine.activation_bytes,
        }
        facts["second_start_seconds"] = self._second_start(entry, data, engine)
        self.out.setdefault("engines", {})[label] = facts
        print(label, json.dumps(facts), flush=True)
        if result.worst > MOST_LIMIT:
            print(f"{label}: NOT TIMED, it computes something else", flush=True)
            engine.close()
            return
        self.engines[label] = (engine, binding)
        self.peers[label] = lambda: engine.run(self.inputs)

    def _second_start(self, entry: Entry, data: bytes, engine: Any) -> float:
        cache = engine.kernel_cache()
        started = time.perf_counter()
        again = get_backend(entry.key.backend).load(data, device=self.target.device, cache=cache)
        binding = Binding(again, self.place)  # holds the copies
        binding.refresh(self.weights, epoch=0)
        again.run(self.inputs)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        again.close()
        return round(seconds, 2)

    def _key(self, conv_format: str, fingerprint: str = "") -> EngineKey:
        key = self.target.key(self.arch, self.shape, fingerprint=fingerprint)
        return EngineKey(**{**key.__dict__, "conv3x3_format": conv_format})

    def _shared(self, conv_format: str) -> Entry:
        request = BuildRequest(key=self._key(conv_format), architecture=self.arch, label="bench")
        return build_engine(self.library, request)

    def _baked(self) -> Entry:
        folder = self.library.folder / "pair"
        pair = export_pair(self.weights, self.arch, folder, dtype="fp16")
        request = BuildRequest(
            key=self._key("linear", pair.fingerprint),
            architecture=self.arch,
            label="bench",
            pair=folder,
        )
        return build_engine(self.library, request)

    def lora_change(self) -> None:
        """All pointers change: time from the new weights to the end of the first call."""
        other = half_weights(self.arch, self.place, seed=1)
        for label, (engine, binding) in {**self.engines, EAGER_GRAPH: self.instant}.items():
            if not engine.weights:
                continue
            plain = _wall(lambda engine=engine: engine.run(self.inputs))
            times = []
            for epoch, weights in enumerate((other, self.weights) * 3, start=1):

                def change(
                    engine: Engine = engine,
                    binding: Binding = binding,
                    weights: dict[str, Tensor] = weights,
                    epoch: int = epoch,
                ) -> None:
                    binding.refresh(weights, epoch)
                    engine.run(self.inputs)

                times.append(_wall(change))
                second = _wall(lambda engine=engine: engine.run(self.inputs))
            self.out.setdefault("lora_change", {})[label] = {
                "first_call_ms": round(1e3 * sorted(times)[len(times) // 2], 2),
                "second_call_with_capture_ms": round(1e3 * second, 2),
                "plain_call_ms": round(1e3 * plain, 2),
            }

    def check_cost(self) -> None:
        """Milliseconds a step of a sampler's loop: unchecked, and with each output checked."""
        for label, (engine, _) in self.engines.items():
            peers = {how: lambda engine=engine, how=how: self._loop(engine, how) for how in CHECKS}
            timings = interleave(peers, rounds=2, calls=2)
            self.out.setdefault("check_cost", {})[label] = {
                how: round(timing.median / STEPS, 4) for how, timing in timings.items()
            }

    def _loop(self, engine: Engine, check: str) -> None:
        """What a sampler does: guidance, an Euler step, the next input."""
        x, watch, plan = self.inputs["x"].clone(), OutputWatch(), Plan(parts=(), weights="")
        for step in range(STEPS):
            out = engine.run({**self.inputs, "x": x}).clone()
            if check == "read a call later":
                watch.note(plan, out)
            elif check == "waited for" and not is_finite(out):
                raise AssertionError
            cond, uncond = out.chunk(2)
            guided = uncond + (cond - uncond) * 7.0
            x = x - torch.cat([guided, guided]) * (0.01 / (step + 1))

    def time(self) -> None:
        for name, call in self.peers.items():
            self.out.setdefault("kernels", {})[name] = kernels(call)
        timings = interleave(self.peers)
        self.out["ms"] = {name: timing.to_json() for name, timing in timings.items()}
        best = min(self.out["ms"][n]["median"] for n in self.engines) if self.engines else None
        if best:
            self.out["speedup_of_best_engine"] = {
                name: round(self.out["ms"][name]["median"] / best, 3) for name in self.out["ms"]
            }


def _graphed(call: Callable[[], object]) -> Callable[[], object]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        call()
    return graph.replay


def _wall(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def _used() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--compile", action="store_true", help="also time torch.compile")
    parser.add_argument("--engine", action="append", choices=ENGINES, help="default: all")
    parser.add_argument("--library", type=Path, default=Path("build/bench"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    args.library.mkdir(parents=True, exist_ok=True)
    for name in args.case or CASES:
        target = Target(device="cuda:0")
        out: dict[str, Any] = {
            "case": name,
            "date": date.today().isoformat(),
            "gpu": target.machine.gpu,
            "driver": target.machine.driver,
            "torch": torch.__version__,
            "backends": dict(target.machine.backends),
            "python": platform.python_version(),
            "dtype": "fp16",
            "weights": "synthetic (extension/synthetic.py)",
        }
        path = args.out / f"unet-{name}.json"
        bench = Bench(name, Library(args.library), out)
        for label in args.engine or ENGINES:
            bench.add_engine(label, **ENGINES[label])
        bench.add_torch(compiled=args.compile)
        bench.time()
        bench.check_cost()
        path.write_text(json.dumps(out, indent=1))
        bench.lora_change()
        path.write_text(json.dumps(out, indent=1))
        print(json.dumps(out, indent=1))
        for engine, binding in bench.engines.values():
            binding.release()
            engine.close()
        del bench
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
