"""The first pictures of a new size in the real ComfyUI: what a user sees without doing anything.

The host alone, then routed with an empty library: pictures are drawn one after another while the
instant tier gets ready, a worker builds the engine, both are timed, and the faster goes on. Once
with and once without the instant tier. Every picture is compared with the host's.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from .comfyui import Host, arguments, facts
from .timing import summarise

SETTLED = 6  # pictures after the last engine is ready
MOST = 150
THROTTLED = Path("/sys/fs/cgroup/cpu.stat")
ALONE = 7


def served_by(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """Calls of one picture by engine."""
    return {stem: n - before.get(stem, 0) for stem, n in after.items() if n > before.get(stem, 0)}


def cpu_seconds() -> dict[str, float]:
    """Of this thread and this process, and how long a container was kept from its processors."""
    throttled = 0.0
    if THROTTLED.is_file():
        stat = dict(line.split() for line in THROTTLED.read_text().splitlines())
        throttled = float(stat.get("throttled_usec", 0)) / 1e6
    return {"thread": time.thread_time(), "process": time.process_time(), "throttled": throttled}


def draw_until_settled(host: Host, latent: Any, size: int, steps: int) -> list[dict[str, Any]]:
    """Pictures in turn, until no engine is on its way any more and some after that."""
    from extension.accuracy import relative_l2
    from extension.hosts.comfy.room import room
    from extension.hosts.comfy.routing import route

    model, left = route(host.model, policy="background"), SETTLED
    found: list[dict[str, Any]] = []
    while left and len(found) < MOST:
        before, spent = room().counters.to_json(), cpu_seconds()
        drawn, _, seconds = host.draw(model, size, steps)
        after, now = room().counters.to_json(), cpu_seconds()
        found.append(
            {
                "seconds": round(seconds, 3),
                "engines": served_by(before["engines"], after["engines"]),
                "host_calls": after["host"] - before["host"],
                "building": bool(room().tiers.wanted),
                "doing": [event.kind for event in room().events.values()][-1:],
                "cpu": {name: round(now[name] - value, 3) for name, value in spent.items()},
                "latent_relative_l2": relative_l2(drawn, latent),
            }
        )
        left = SETTLED if room().tiers.wanted else left - 1
    return found


def paid_after(pictures: list[dict[str, Any]], alone: float) -> int | None:
    """Pictures until all so far took less than the host alone; None if that never came."""
    totals = accumulate(picture["seconds"] for picture in pictures)
    behind = [n for n, total in enumerate(totals, 1) if total > n * alone]
    last = behind[-1] if behind else 0
    return last + 1 if last < len(pictures) else None


def run(host: Host, size: int, steps: int, instant: bool) -> dict[str, Any]:
    """The course with an empty library."""
    from extension.hosts.comfy.room import room
    from extension.hosts.comfy.routing import route

    for entry in room().library.entries():
        room().remove(entry.stem)
    room().pool.close()
    room().tiers.settings = replace(room().tiers.settings, instant=instant)
    latent, *_ = host.draw(host.model, size, steps)
    spent = cpu_seconds()
    alone = [host.draw(host.model, size, steps)[2] for _ in range(ALONE)]
    spent = {name: round((now - spent[name]) / ALONE, 3) for name, now in cpu_seconds().items()}
    unbuilt = route(host.model, policy="never", tier="shared")
    routed = [host.draw(unbuilt, size, steps)[2] for _ in range(ALONE)]
    pictures = draw_until_settled(host, latent, size, steps)
    usual = median(alone)
    during = [p["seconds"] for p in pictures if p["building"] and not p["engines"]]
    return {
        "host_alone": {**summarise(alone).to_json(), "cpu": spent},
        "routed_without_engines": summarise(routed).to_json(),
        "pictures": pictures,
        "paid_after": paid_after(pictures, usual),
        "host_while_building": round(median(during) / usual, 3) if during else None,
        "last_times_faster": round(usual / median(p["seconds"] for p in pictures[-3:]), 2),
        "built": [entry.changing for entry in room().library.entries()],
        "failed": {**room().tiers.failed, **room().tiers.instant.failed},
    }


def main() -> None:
    args = arguments(__doc__)
    host = Host(args.models.resolve(), args.checkpoint, args.lora)
    from extension.hosts.comfy.room import room

    out = facts(host, args.size, args.steps)
    for name in ("with_instant", "without_instant"):
        out[name] = run(host, args.size, args.steps, instant=name == "with_instant")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"first-pictures-{args.size}.json").write_text(json.dumps(out, indent=1))
    for name in ("with_instant", "without_instant"):
        print(name, json.dumps({k: v for k, v in out[name].items() if k != "pictures"}))
        for number, picture in enumerate(out[name]["pictures"], 1):
            print(number, *picture.values())
    room().close()


if __name__ == "__main__":
    main()
