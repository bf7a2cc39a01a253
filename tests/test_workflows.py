"""The example workflows: files of the frontend's own making that fit our nodes."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "example_workflows").glob("*.json"))


def node_classes():
    """Our node classes, loaded as a package beside the core."""
    name = "engine_room_pack"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            name, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
        )
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return importlib.import_module(f"{name}.nodes").NODE_CLASS_MAPPINGS


def test_there_is_one_for_each_task():
    assert {path.stem for path in EXAMPLES} == {
        "build",
        "compare",
        "controlnet",
        "generate",
        "lora",
    }


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_links_and_widgets_fit(path):
    workflow = json.loads(path.read_text(encoding="utf-8"))
    nodes = {node["id"]: node for node in workflow["nodes"]}
    for _, source, _, target, slot, kind in workflow["links"]:
        assert nodes[source]
        assert nodes[target]["inputs"][slot]["type"] == kind
    classes = node_classes()
    ours = [node for node in nodes.values() if node["type"].startswith("EngineRoom")]
    assert ours
    for node in ours:
        required = classes[node["type"]].INPUT_TYPES()["required"]
        names = {item["name"] for item in node["inputs"]}
        assert names <= set(required) | {"seed"}
        widgets = [n for n, spec in required.items() if spec[0] not in LINKED]
        assert len(node["widgets_values"]) >= len(widgets)


LINKED = ("MODEL", "CONDITIONING", "LATENT")


def test_every_input_and_output_has_a_tooltip(monkeypatch):
    """Also what an artist reads: a display name, a category, a description."""
    classes = node_classes()
    listing = types.ModuleType("loading")  # the real one needs ComfyUI
    listing.choices = list
    monkeypatch.setitem(sys.modules, "engine_room_pack.extension.hosts.comfy.loading", listing)
    names = importlib.import_module("engine_room_pack.nodes").NODE_DISPLAY_NAME_MAPPINGS
    assert set(names) == set(classes)
    for name, node in classes.items():
        assert node.CATEGORY == "Engine Room"
        assert node.DESCRIPTION
        assert len(node.OUTPUT_TOOLTIPS) == len(node.RETURN_TYPES) == len(node.RETURN_NAMES)
        inputs = node.INPUT_TYPES()
        for spec in [*inputs["required"].values(), *inputs.get("optional", {}).values()]:
            assert spec[1]["tooltip"], name
        assert callable(getattr(node, node.FUNCTION))
