"""Tables of README.md and the plot in docs/, made from benchmarks/results.

``python -m benchmarks.report`` writes both; nobody copies a number by hand.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README, RESULTS, PLOT = ROOT / "README.md", ROOT / "benchmarks/results", ROOT / "docs/speed.svg"
CASES = {
    "sd15-512-b2": "SD1.5 512x512, batch 2",
    "sdxl-1024-b2": "SDXL 1024x1024, batch 2",
}
WEBUI_CASES = {"sd15-512": "SD1.5 512x512", "sdxl-1024": "SDXL 1024x1024"}
GRAPH = "eager + CUDA graph (instant tier)"
PICTURES = {
    "host": "ComfyUI alone",
    "instant": "instant tier: torch in a CUDA graph, no build",
    "engine": "shared engine",
}
Result = Mapping[str, Any]


def calls(result: Result) -> str:
    """Times of one UNet call, every peer of one run; ratios to eager torch in a CUDA graph."""
    columns = "ms a call | 95 % | ratio | error | on disk | copies | activations"
    peers = sorted(result["ms"].items(), key=lambda item: -item[1]["median"])
    head = f"| {CASES[result['case']]} | {columns} |"
    return _table(head, "| --- " * 8 + "|", _calls(result, peers))


def _calls(result: Result, peers: list[tuple[str, Any]]) -> Iterator[tuple[str, ...]]:
    base = result["ms"][GRAPH]["median"]
    for name, time in peers:
        engine = result["engines"].get(name, {})
        yield (
            f"**{name}**" if engine else name,
            f"{time['median']:.2f}",
            f"{time['low']:.2f} to {time['high']:.2f}",
            f"{time['median'] / base:.2f}",
            f"{engine['parity']['worst']:.4f}" if engine else _torch_error(name, result),
            _size(engine.get("engine_bytes")),
            _size(engine.get("staged_bytes")),
            _size((engine or _instant(name, result)).get("activation_bytes")),
        )


def _instant(name: str, result: Result) -> Mapping[str, Any]:
    return dict(result["instant"]) if name == GRAPH else {}


def _torch_error(name: str, result: Result) -> str:
    if name.startswith("torch.compile"):
        return ""
    return f"{next(iter(result['engines'].values()))['parity']['noise']:.4f}"


def starts(results: list[Result]) -> str:
    """Seconds until an engine is there, for the first time and again."""
    head = "| | build | first load | later loads |"
    return _table(head, "| --- | --- | --- | --- |", _starts(results))


def _starts(results: list[Result]) -> Iterator[tuple[str, ...]]:
    for result in results:
        for name, engine in result["engines"].items():
            yield (
                f"{CASES[result['case']]}: {name}",
                f"{engine['build_seconds']:.0f} s",
                f"{engine['load_seconds']:.0f} s",
                f"{engine['second_start_seconds']:.1f} s",
            )


def checks(results: list[Result]) -> str:
    """What it costs to look whether an output is finite."""
    head = (
        "| ms a call in a loop | not checked | read a call later (ComfyUI) | waited for (WebUI) |"
    )
    return _table(head, "| --- | --- | --- | --- |", _checks(results))


def _checks(results: list[Result]) -> Iterator[tuple[str, ...]]:
    for result in results:
        for name, cost in result["check_cost"].items():
            plain = cost["unchecked"]
            yield (
                f"{CASES[result['case']]}: {name}",
                f"{plain:.2f}",
                *(
                    f"{cost[way]:.2f} ({100 * (cost[way] / plain - 1):+.1f} %)"
                    for way in ("read a call later", "waited for")
                ),
            )


def pictures(result: Result) -> str:
    """Seconds of a whole picture in ComfyUI."""
    return _table(
        "| | seconds | 95 % | times faster |", "| --- | --- | --- | --- |", _pictures(result)
    )


def _pictures(result: Result) -> Iterator[tuple[str, ...]]:
    seconds = result["seconds_per_picture"]
    for name, title in PICTURES.items():
        time = seconds[name]
        yield (
            title,
            f"{time['median']:.2f}",
            f"{time['low']:.2f} to {time['high']:.2f}",
            f"{seconds['host']['median'] / time['median']:.1f}",
        )


def webui(results: Mapping[str, Result]) -> str:
    """Seconds of a whole picture in a WebUI host, alone and with an engine; results by title."""
    return _table(
        "| | host alone, s (95 %) | shared engine, s (95 %) | times faster |",
        "| --- | --- | --- | --- |",
        (_webui(title, result) for title, result in results.items()),
    )


def _webui(title: str, result: Result) -> tuple[str, ...]:
    times = (result["seconds_per_picture"][name] for name in ("host", "engine"))
    spans = (f"{t['median']:.2f} ({t['low']:.2f} to {t['high']:.2f})" for t in times)
    return (title, *spans, f"{result['ratio']:.1f}")


def _table(head: str, rule: str, rows: Iterator[tuple[str, ...]]) -> str:
    return "\n".join([head, rule, *(f"| {' | '.join(row)} |" for row in rows)])


def _size(count: int | None) -> str:
    if count is None:
        return ""
    if count == 0:
        return "none"
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def load(name: str, folder: Path = RESULTS) -> Result:
    """One result file."""
    return dict(json.loads((folder / f"{name}.json").read_text()))


def sections(folder: Path = RESULTS) -> dict[str, str]:
    """Every table by the name of its place in README.md."""
    cases = [load(f"unet-{case}", folder) for case in CASES]
    made = {case: calls(result) for case, result in zip(CASES, cases, strict=True)}
    return {
        **made,
        "starts": starts(cases),
        "checks": checks(cases),
        "pictures": pictures(load("comfyui-512", folder)),
        "webui": webui({t: load(f"webui-forge-{case}", folder) for case, t in WEBUI_CASES.items()}),
    }


def place(text: str, tables: Mapping[str, str]) -> str:
    """``text`` with every table between its two marks.

    Raises:
        ValueError: a table has no place.
    """
    for name, table in tables.items():
        begin, end = f"<!-- table {name} -->", "<!-- end -->"
        before, found, rest = text.partition(begin)
        if not found or end not in rest:
            raise ValueError(f"README.md has no place '{begin} ... {end}'.")
        text = f"{before}{begin}\n{table}\n{rest[rest.index(end) :]}"
    return text


def plot(results: list[Result], out: Path) -> None:
    """Bars of every peer with its interval, one panel a case."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "engine-room"
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(len(results), 1, figsize=(8, 2.4 * len(results)), squeeze=False)
    for panel, result in zip(panels[:, 0], results, strict=True):
        names = sorted(result["ms"], key=lambda name: result["ms"][name]["median"], reverse=True)
        times = [result["ms"][name] for name in names]
        middle = [time["median"] for time in times]
        spread = [[t["median"] - t["low"] for t in times], [t["high"] - t["median"] for t in times]]
        colors = ["tab:blue" if name in result["engines"] else "tab:gray" for name in names]
        panel.barh(names, middle, xerr=spread, color=colors)
        panel.set_title(f"{CASES[result['case']]}, {result['gpu']}: ms a UNet call", loc="left")
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})
    plt.close(figure)


def main(draw: Callable[[list[Result], Path], None] = plot) -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    README.write_text(place(README.read_text(), sections()))
    draw([load(f"unet-{case}") for case in CASES], PLOT)


if __name__ == "__main__":
    main()
