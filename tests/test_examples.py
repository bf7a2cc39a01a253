"""Every example workflow, run by the real ComfyUI: the same picture as without our nodes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support_comfyui import SMALL_SD15, ComfyServer
from tests.support_examples import api_graph, moved, shrink, write_example_files
from tests.support_hosts import find_host

CHECKOUT, REASON = find_host("comfyui")
pytestmark = pytest.mark.skipif(CHECKOUT is None, reason=REASON)

EXAMPLES = Path(__file__).resolve().parents[1] / "example_workflows"
SIZE, STEPS = 64, 3
LEVEL = 1 / 255  # the least that a picture of 8 bits can show


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = ComfyServer(CHECKOUT, tmp_path_factory.mktemp("examples"))
    write_example_files(server.base, SMALL_SD15)
    server.start()
    yield server
    server.stop()
    shutil.rmtree(server.base)


def prepared(server, name):
    graph = api_graph(EXAMPLES / f"{name}.json", server.get("/object_info"))
    return shrink(graph, SIZE, STEPS)


def without_ours(graph):
    """The graph with each of our nodes that hands a model on replaced by its source."""
    ours = {i: n for i, n in graph.items() if n["class_type"].startswith("EngineRoom")}
    plain = {i: n for i, n in graph.items() if i not in ours}
    for node in plain.values():
        for name, value in node["inputs"].items():
            if isinstance(value, list) and value[0] in ours:
                node["inputs"][name] = ours[value[0]]["inputs"]["model"]
    return plain


def pictures(server, graph):
    """Run; the saved pictures by the prefix of their file names."""
    outputs = server.run(graph)["outputs"].values()
    names = [image["filename"] for out in outputs for image in out.get("images", [])]
    return {n.rpartition("_0")[0]: server.base / "output" / n for n in names}


def picture(server, graph):
    (found,) = pictures(server, graph).values()
    return found


def served_by(server, work):
    before = server.counts()
    out = work()
    return out, tuple(b - a for a, b in zip(before, server.counts(), strict=True))


def test_build(server):
    (report,) = next(
        out["text"] for out in server.run(prepared(server, "build"))["outputs"].values()
    )
    assert f"{SIZE}x{SIZE}" in report
    assert "ready" in report


@pytest.mark.parametrize("name", ["generate", "lora", "controlnet"])
def test_the_same_picture(server, name):
    graph = prepared(server, name)
    for node in graph.values():
        if "when_missing" in node["inputs"]:
            node["inputs"]["when_missing"] = "build now and wait"
    plain, (served, _) = served_by(
        server, lambda: picture(server, without_ours(json.loads(json.dumps(graph))))
    )
    assert served == 0
    routed, counts = served_by(server, lambda: picture(server, graph))
    assert counts == (STEPS, 0)
    assert moved(routed, plain) <= LEVEL
    other = "generate" if name != "generate" else "lora"
    assert moved(picture(server, without_ours(prepared(server, other))), plain) > 20 * LEVEL


def test_compare(server):
    graph = prepared(server, "compare")
    found = pictures(server, graph)
    assert moved(found["engine-room"], found["engine-room-engine"]) <= LEVEL
