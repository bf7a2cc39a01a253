"""Seconds per picture in a real WebUI host through its API: the host alone, and with engines.

The host's own server is started with this repository as an extension, installed the way its
extension manager does it, over a checkpoint and a LoRA that are made here. Latents of both ways
are compared before times are shown. Takes the checkout from the variable of the host's tests
(``FORGE_ROOT``, ...) or from its usual place.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

from extension.accuracy import relative_l2
from extension.architecture import FULL
from extension.packages import python_tag
from extension.synthetic import FAMILIES, make_checkpoint
from extension.synthetic_lora import make_lora
from tests.support_hosts import find_host
from tests.support_webui import FLAGS, WebuiServer

from .comfyui import rounds

# The host chooses how it computes, as for a user.
GPU_FLAGS = {name: ["--do-not-download-clip"] if name == "a1111" else [] for name in FLAGS}
PROMPT = "a lighthouse on a cliff at dusk, oil painting"
LORA = "<lora:lora:0.8>"


def link_tensorrt(packages: Path) -> None:
    """Put this environment's TensorRT-RTX, if any, into a host's private folder.

    The host's Python must be of this one's version.
    """
    spec = importlib.util.find_spec("tensorrt_rtx")
    if spec is None or spec.origin is None:
        return
    folder = packages / f"tensorrt-{python_tag()}-tensorrt_rtx-linked"
    folder.mkdir(parents=True)
    for part in Path(spec.origin).parent.parent.glob("tensorrt_rtx*"):
        (folder / part.name).symlink_to(part)


class Host(WebuiServer):
    """A server of this benchmark, with the latent, infotext and seconds of a picture."""

    def __init__(self, name: str, base: Path, args: argparse.Namespace) -> None:
        checkout, reason = find_host(name)
        if checkout is None:
            sys.exit(reason)
        device = GPU_FLAGS[name] if torch.cuda.is_available() else None
        super().__init__(name, checkout, base, device=device)
        link_tensorrt(base / "packages")
        self.job = {"width": args.size, "height": args.size, "steps": args.steps}
        make_checkpoint(
            base / "models/Stable-diffusion/a.safetensors", family=args.family, size="full"
        )
        make_lora(base / "models/Lora/lora.safetensors", architecture=FULL[args.family])

    def timed(self, policy: str, prompt: str = PROMPT) -> tuple[Any, str, float]:
        """One picture."""
        started = time.perf_counter()
        latent, infotext = self.draw(policy, prompt=prompt, **self.job)
        return latent, infotext, time.perf_counter() - started


def facts(host: Host, args: argparse.Namespace) -> dict[str, Any]:
    """When, where and what is measured."""
    status = host.get("/engine-room/status")
    return {
        "date": date.today().isoformat(),
        "host": host.name,
        "gpu": status["gpu"],
        "torch": torch.__version__,
        "backends": status["backends"],
        "case": f"{args.family}, {args.size}x{args.size}, {args.steps} steps of Euler, guidance 5, "
        "text, VAE, PNG and API included",
    }


def run(host: Host, args: argparse.Namespace) -> dict[str, Any]:
    """Every measurement of one host."""
    out = facts(host, args)
    latent, _, out["first_picture_of_the_host_seconds"] = host.timed("off")
    before = host.counts()
    found, out["infotext"], out["first_picture_with_engine_seconds"] = host.timed("wait")
    out["calls"] = [now - then for now, then in zip(host.counts(), before, strict=True)]
    out["latent_relative_l2"] = relative_l2(found, latent)
    out["lora"] = change_lora(host, latent)
    ways = {"host": "off", "engine": "wait"}
    for policy in ways.values():
        host.timed(policy)
    out["seconds_per_picture"] = rounds(
        {name: lambda policy=policy: host.timed(policy)[2] for name, policy in ways.items()},
        args.rounds,
    )
    seconds = out["seconds_per_picture"]
    out["ratio"] = round(seconds["host"]["median"] / seconds["engine"]["median"], 3)
    status = host.get("/engine-room/status")
    out |= {name: status[name] for name in ("served", "reasons", "failed", "memory_bytes")}
    out["engines"] = status["engines"]
    return out


def change_lora(host: Host, latent: Any) -> dict[str, Any]:
    """Pictures with a LoRA by its prompt: the host's, and two of the engine."""
    expected, _, alone = host.timed("off", PROMPT + LORA)
    host.timed("wait")  # the LoRA is taken away
    found, _, first = host.timed("wait", PROMPT + LORA)
    _, _, second = host.timed("wait", PROMPT + LORA)
    return {
        "latent_moved_by": relative_l2(expected, latent),
        "latent_relative_l2": relative_l2(found, expected),
        "seconds": {"host": round(alone, 3), "engine": [round(first, 3), round(second, 3)]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", choices=FLAGS, default="forge")
    parser.add_argument("--family", choices=FAMILIES, default="sd15")
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        host = Host(args.host, Path(folder), args)
        try:
            host.start()
            out = run(host, args)
        except BaseException:
            print(host.log.read_text()[-5000:] if host.log.exists() else "", file=sys.stderr)
            raise
        finally:
            host.stop()
    args.out.mkdir(parents=True, exist_ok=True)
    name = f"webui-{args.host}-{args.family}-{args.size}.json"
    (args.out / name).write_text(json.dumps(out, indent=1))
    print(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
