"""Seconds per picture in the real ComfyUI on one GPU: the host alone, and with engines.

The host's own functions load a checkpoint, encode prompts, sample and decode; Engine Room's node
functions build and route. Pictures of both ways are compared before times are shown. Takes the
checkout from COMFYUI_ROOT.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

from .timing import summarise

ROOT = Path(os.environ.get("COMFYUI_ROOT", Path.home() / "ComfyUI"))


class Host:
    """ComfyUI in this process, with one checkpoint."""

    def __init__(self, folder: Path, checkpoint: Path, lora: Path) -> None:
        sys.path.insert(0, str(ROOT))
        before, sys.argv = sys.argv, sys.argv[:1]
        import comfy.options

        comfy.options.enable_args_parsing(False)
        import comfy.cli_args
        import torch

        comfy.cli_args.args.cpu = not torch.cuda.is_available()
        import comfy.sd
        import comfy.utils
        import folder_paths

        sys.argv = before
        folder_paths.models_dir = str(folder)
        self.torch, self.sd, self.utils = torch, comfy.sd, comfy.utils
        self.device = comfy.model_management.get_torch_device()
        found = comfy.sd.load_checkpoint_guess_config(str(checkpoint), embedding_directory=None)
        self.model, self.clip, self.vae = found[:3]
        self.lora = comfy.utils.load_torch_file(str(lora))

    def with_lora(self, strength: float) -> Any:
        """The MODEL with the LoRA, as a LoRA loader makes it."""
        return self.sd.load_lora_for_models(self.model, None, self.lora, strength, 0.0)[0]

    def prompts(self) -> tuple[Any, Any]:
        """Positive and negative conditioning."""
        return tuple(  # type: ignore[return-value]
            self.clip.encode_from_tokens_scheduled(self.clip.tokenize(text))
            for text in ("a lighthouse on a cliff at dusk, oil painting", "blurry")
        )

    def draw(self, model: Any, size: int, steps: int, seed: int = 1) -> tuple[Any, Any, float]:
        """Latent, picture and seconds of one picture, text encoding included."""
        import comfy.sample

        with self.torch.inference_mode():
            started = time.perf_counter()
            positive, negative = self.prompts()
            latent = self.torch.zeros([1, 4, size // 8, size // 8])
            noise = comfy.sample.prepare_noise(latent, seed)
            samples = comfy.sample.sample(
                model, noise, steps, 7.0, "euler", "normal", positive, negative, latent, seed=seed
            )
            picture = self.vae.decode(samples)
            if self.device.type == "cuda":
                self.torch.cuda.synchronize()
            return samples.float().cpu(), picture.cpu(), time.perf_counter() - started


def rounds(peers: dict[str, Callable[[], float]], count: int) -> dict[str, Any]:
    """Median seconds of every peer with its 95 % interval, in turn."""
    times: dict[str, list[float]] = {name: [] for name in peers}
    for _ in range(count):
        for name, draw in peers.items():
            times[name].append(draw())
    return {
        name: {k: v for k, v in summarise(found).to_json().items() if k != "p99"}
        for name, found in times.items()
    }


def instant(host: Host, model: Any, latent: Any, size: int, steps: int) -> dict[str, Any]:
    """From the first picture, in which the tier gets ready, to one that it serves alone."""
    from extension.accuracy import relative_l2
    from extension.hosts.comfy.room import room

    counters, seconds, served = room().counters, [], []
    for _ in range(3):
        before = counters.totals[0]
        found, _, took = host.draw(model, size, steps)
        room().tiers.instant.wait(60)
        seconds.append(round(took, 3))
        served.append(counters.totals[0] - before)
    return {
        "first_pictures_seconds": seconds,
        "calls_served": served,
        "latent_relative_l2": relative_l2(found, latent),
        "failed": dict(room().tiers.instant.failed),
    }


def arguments(description: str | None) -> argparse.Namespace:
    """Of the command line; the folder for engines is made."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--lora", type=Path, required=True)
    parser.add_argument("--models", type=Path, default=Path("build/comfyui-models"))
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--name", default="", help="of the result file, before the size")
    args = parser.parse_args()
    args.models.mkdir(parents=True, exist_ok=True)
    return args


def main() -> None:
    args = arguments(__doc__)
    host = Host(args.models.resolve(), args.checkpoint, args.lora)
    out = run(host, args)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"comfyui-{args.name}{args.size}.json").write_text(json.dumps(out, indent=1))
    print(json.dumps(out, indent=1))
    from extension.hosts.comfy.room import room

    room().close()


def facts(host: Host, size: int, steps: int) -> dict[str, Any]:
    """When, where and what is measured."""
    from comfyui_version import __version__

    from extension.machine import machine_of

    machine = machine_of(str(host.device) if host.device.type == "cpu" else "cuda:0")
    return {
        "date": date.today().isoformat(),
        "host": f"ComfyUI {__version__}",
        "gpu": machine.gpu,
        "torch": host.torch.__version__,
        "backends": dict(machine.backends),
        "case": f"{size}x{size}, {steps} steps of Euler, guidance 7, text and VAE included",
    }


def run(host: Host, args: argparse.Namespace) -> dict[str, Any]:
    from extension.accuracy import relative_l2
    from extension.hosts.comfy.jobs import build
    from extension.hosts.comfy.room import room
    from extension.hosts.comfy.routing import route
    from extension.picture import psnr
    from extension.shapes import Shape

    size, steps = args.size, args.steps
    out = facts(host, size, steps)
    latent, picture, out["first_picture_of_the_host_seconds"] = host.draw(host.model, size, steps)
    shape = Shape(batch=2, height=size // 8, width=size // 8)
    started = time.perf_counter()
    out["build_report"] = build(host.model, shape)
    out["build_seconds"] = round(time.perf_counter() - started, 1)
    routed = route(host.model, policy="wait")
    again, drawn, out["first_picture_with_engine_seconds"] = host.draw(routed, size, steps)
    counters = room().counters.to_json()
    out["calls"] = {"served": counters["served"], "host": counters["host"]}
    out["latent_relative_l2"] = relative_l2(again, latent)
    out["picture_psnr_db"] = round(psnr(drawn, picture), 1)
    plain, changed = host.with_lora(0.8), route(host.with_lora(0.8), policy="wait")
    expected, _, first = host.draw(plain, size, steps)
    found, _, served = host.draw(changed, size, steps)
    _, _, second = host.draw(changed, size, steps)
    out["lora"] = {
        "latent_moved_by": relative_l2(expected, latent),
        "latent_relative_l2": relative_l2(found, expected),
        "first_picture_seconds": {"host": round(first, 3), "engine": round(served, 3)},
        "second_picture_seconds": {"engine": round(second, 3)},
        "calls": room().counters.totals,
    }
    peers = {"host": host.model, "engine": routed}
    if host.device.type == "cuda":
        peers["instant"] = route(host.model, policy="never", tier="instant")
        out["instant"] = instant(host, peers["instant"], latent, size, steps)
    for model in peers.values():
        host.draw(model, size, steps)
    out["seconds_per_picture"] = rounds(
        {name: lambda m=model: host.draw(m, size, steps)[2] for name, model in peers.items()},
        args.rounds,
    )
    seconds = out["seconds_per_picture"]
    out["ratio"] = round(seconds["host"]["median"] / seconds["engine"]["median"], 3)
    out["engine_memory_bytes"] = room().pool.nbytes
    out["parity"] = [entry.changing.get("parity") for entry in room().library.entries()]
    return out


if __name__ == "__main__":
    main()
