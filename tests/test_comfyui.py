"""The real ComfyUI, over HTTP: every case equals the plain host, with exact counts of calls."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request

import pytest

from extension.key import EngineKey
from tests.support_comfyui import (
    AWKWARD,
    CLASSES,
    ComfyServer,
    latent_of,
    overrides_attention,
    write_models,
)
from tests.support_hosts import find_host
from tests.support_models import relative_l2

CHECKOUT, REASON = find_host("comfyui")
pytestmark = pytest.mark.skipif(CHECKOUT is None, reason=REASON)

# fp32 on both sides: sums in another order, amplified over a few sampling steps.
TOLERANCE = 1e-4
MOVES = 20 * TOLERANCE
numbers = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = ComfyServer(CHECKOUT, tmp_path_factory.mktemp("comfy"))
    write_models(server.base)
    server.start()
    yield server
    server.stop()
    shutil.rmtree(server.base)


def loader(folder, name):
    """The node that loads a model, and its inputs."""
    if name in CLASSES:
        file = str(folder / f"{name}.safetensors")
        kind, v_prediction = name.split()[0], CLASSES[name][1]
        return "ProbeModel", {"file": file, "kind": kind, "v_prediction": v_prediction}
    return "UNETLoader", {"unet_name": f"{name}.safetensors", "weight_dtype": "default"}


def graph(
    path,
    *,
    model="a",
    before=(),
    after=(),
    merge=None,
    patch=None,
    policy=None,
    tokens=(77, 77),
    size=(8, 8),
    batch=1,
    cfg=5.0,
    steps=3,
    sampler="euler",
    control=None,
    hook=None,
    seed=1,
    tier="auto",
    precision=None,
    engine=None,
):
    """A workflow in API form; ``policy`` None is the plain host."""
    nodes = {}

    def add(kind, /, **inputs):
        name = str(len(nodes) + 1)
        nodes[name] = {"class_type": kind, "inputs": inputs}
        return [name, 0]

    width = CLASSES[model][0].context_dim if model in CLASSES else 768

    def load(name):
        kind, inputs = loader(path.parent, name)
        return add(kind, **inputs)

    unet = add("EngineRoomLoad", engine=engine) if engine else load(model)
    if merge:
        unet = add("ModelMergeSimple", model1=unet, model2=load(merge[0]), ratio=merge[1])
    for name, strength in before:
        unet = add("LoraLoaderModelOnly", model=unet, lora_name=f"{name}.safetensors",
                   strength_model=strength)  # fmt: skip
    if policy:
        options = {"precision": precision} if precision else {}
        unet = add("EngineRoomModel", model=unet, tier=tier, when_missing=policy, **options)
    for name, strength in after:
        unet = add("LoraLoaderModelOnly", model=unet, lora_name=f"{name}.safetensors",
                   strength_model=strength)  # fmt: skip
    if patch:
        unet = add("ProbePatch", model=unet, kind=patch)
    conds = [add("ProbeCond", seed=seed + i, tokens=n, width=width) for i, n in enumerate(tokens)]
    if control:
        conds = [add("ProbeControl", conditioning=c, seed=50, where=control) for c in conds]
    if hook:
        hooks = add("CreateHookLoraModelOnly", lora_name=f"{hook[0]}.safetensors",
                    strength_model=hook[1])  # fmt: skip
        conds[0] = add("ConditioningSetProperties", cond_NEW=conds[0], strength=1.0,
                       set_cond_area="default", hooks=hooks)  # fmt: skip
    latent = add("ProbeLatent", batch=batch, height=size[0], width=size[1])
    drawn = add("KSampler", model=unet, seed=seed, steps=steps, cfg=cfg, sampler_name=sampler,
                scheduler="normal", positive=conds[0], negative=conds[1], latent_image=latent,
                denoise=1.0)  # fmt: skip
    add("ProbeSave", latent=drawn, path=str(path))
    return nodes


WAIT = "build now and wait"
BACKGROUND = "build in the background"
NEVER = "never build"


def draw(server, **options):
    path = server.base / f"{next(numbers)}.safetensors"
    server.run(graph(path, **options))
    return latent_of(path)


def counted(server, **options):
    """The latent, and how many calls engines and host served for it."""
    before = server.counts()
    latent = draw(server, **options)
    after = server.counts()
    return latent, (after[0] - before[0], after[1] - before[1])


CASES = {
    "plain": ({}, None, (3, 0)),
    "seed": ({"seed": 9}, {}, (3, 0)),
    "batch of three": ({"batch": 3}, None, (3, 0)),
    "nine pictures": ({"batch": 9, "steps": 1}, None, (1, 0)),
    "cfg 1": ({"cfg": 1.0}, {}, (3, 0)),
    "two calls a step": ({"sampler": "heun"}, {}, (5, 0)),
    "wide": ({"size": (8, 16)}, None, (3, 0)),
    "odd latents": ({"size": (7, 9)}, None, (3, 0)),
    "long prompt": ({"tokens": (154, 77)}, {}, (3, 0)),
    "long negative": ({"tokens": (77, 231)}, {}, (3, 0)),
    "LoRA before the node": ({"before": [("lora", 0.8)]}, {}, (3, 0)),
    "LoRA after the node": ({"after": [("lora", 0.8)]}, {}, (3, 0)),
    "another strength": ({"before": [("lora", -0.5)]}, {"before": [("lora", 0.8)]}, (3, 0)),
    "two LoRAs": ({"before": [("lora", 0.8)], "after": [("loha", 0.6)]}, {}, (3, 0)),
    "another checkpoint": ({"model": "b"}, {}, (3, 0)),
    "merged checkpoints": ({"merge": ("b", 0.7)}, {}, (3, 0)),
    "inpainting channels": ({"model": "inpaint"}, None, (3, 0)),
    "ControlNet": ({"control": "control"}, {}, (6, 0)),
    "T2I adapter": ({"control": "t2i"}, {}, (6, 0)),
    "scheduled LoRA": ({"hook": ("lora", 0.9)}, {}, (6, 0)),
    "attention patch": ({"patch": "attn2"}, {}, (0, 3)),
    "block patch": ({"patch": "output"}, {}, (0, 3)),
    "replaced block": ({"patch": "replace"}, {}, (0, 3)),
    "attention override": ({"patch": "override"}, {}, (0, 3)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_as_the_host_with_exact_counts(server, name):
    options, without, expected = CASES[name]
    if options.get("patch") == "override" and not overrides_attention(server.checkout):
        pytest.skip("this version of ComfyUI has no override of attention")
    host = draw(server, **options)
    if without is not None:
        assert relative_l2(draw(server, **without), host) > MOVES, "the feature does nothing"
    engine, counts = counted(server, policy=WAIT, **options)
    assert relative_l2(engine, host) <= TOLERANCE
    assert counts == expected


def test_no_build_for_weights(server):
    """LoRAs, strengths, merges and checkpoints all went through the engines of their shapes."""
    stems = {engine["id"] for engine in server.get("/engine_room/status")["engines"]}
    for options in (
        {"before": [("lora", 0.3)]},
        {"before": [("loha", 1.1)], "model": "b"},
        {"merge": ("b", 0.2)},
    ):
        _, counts = counted(server, policy=NEVER, **options)
        assert counts == (3, 0)
    after = {engine["id"] for engine in server.get("/engine_room/status")["engines"]}
    assert after == stems


def test_lora_a_b_a_none_in_one_process(server):
    chain = [[("lora", 0.8)], [("loha", 0.8)], [("lora", 0.8)], []]
    hosts = [draw(server, before=loras) for loras in chain]
    for loras, host in zip(chain, hosts, strict=True):
        engine, counts = counted(server, policy=WAIT, before=loras)
        assert relative_l2(engine, host) <= TOLERANCE
        assert counts == (3, 0)


def test_reasons_are_shown(server):
    counted(server, policy=WAIT, patch="attn2")
    status = server.get("/engine_room/status")
    texts = [reason["text"] for reason in status["reasons"]]
    assert any("attn2_output_patch" in text for text in texts)
    assert status["gpu"] == "CPU"
    assert all(engine["state"] == "ready" for engine in status["engines"] if engine["loaded"])


def test_background_building_never_makes_a_picture_wait_or_wrong(server):
    options = {"size": (8, 24), "policy": BACKGROUND}
    host = draw(server, size=(8, 24))
    first, counts = counted(server, **options)
    assert relative_l2(first, host) <= TOLERANCE
    assert sum(counts) == 3
    assert counts[1] >= 2
    wait_until_ready(server)
    host = draw(server, size=(8, 24), seed=2)
    second, counts = counted(server, **options, seed=2)
    assert relative_l2(second, host) <= TOLERANCE
    assert counts == (3, 0)


def test_never_build_stays_with_the_host(server):
    _, counts = counted(server, policy=NEVER, size=(16, 24))
    assert counts == (0, 3)
    assert server.get("/engine_room/status")["wanted"] == []


def wait_until_ready(server):
    deadline = time.monotonic() + 120
    while server.get("/engine_room/status")["wanted"]:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_the_build_node_and_its_report(server):
    path = server.base / "build.safetensors"
    nodes = graph(path, size=(16, 8))
    build = {"model": ["1", 0], "width": 64, "height": 128, "pictures": 1, "guidance": True,
             "prompt_chunks": 1, "controlnet": False}  # fmt: skip
    nodes["90"] = {"class_type": "EngineRoomBuild", "inputs": build}
    sampler = next(n for n in nodes.values() if n["class_type"] == "KSampler")
    sampler["inputs"]["model"] = ["90", 0]
    before = server.counts()
    entry = server.run(nodes)
    report = entry["outputs"]["90"]["text"][0]
    assert "built in" in report
    assert "64x128" in report
    assert "every checkpoint" in report
    after = server.counts()
    assert (after[0] - before[0], after[1] - before[1]) == (3, 0)
    assert relative_l2(latent_of(path), draw(server, size=(16, 8))) <= TOLERANCE


@pytest.mark.parametrize("width", [60, 0, 9000])
def test_sizes_that_cannot_be_are_refused_before_anything_runs(server, width):
    nodes = graph(server.base / "x.safetensors")
    build = {"model": ["1", 0], "width": width, "height": 64, "pictures": 1, "guidance": True,
             "prompt_chunks": 1, "controlnet": False}  # fmt: skip
    nodes["90"] = {"class_type": "EngineRoomBuild", "inputs": build}
    code, answer = server.post("/prompt", {"prompt": nodes})
    if code == 200 and not answer["node_errors"]:
        entry = server.finish(answer["prompt_id"])
        assert entry["status"]["status_str"] == "error"
        assert "multiple of 8" in json.dumps(entry["status"])
    else:
        assert "width" in json.dumps(answer["node_errors"])


def test_export_holds_the_merged_model(server):
    """What UNETLoader makes of the exported file draws the same picture, without the LoRA."""
    nodes = graph(server.base / "x.safetensors", before=[("lora", 0.8)])
    lora = next(k for k, n in nodes.items() if n["class_type"] == "LoraLoaderModelOnly")
    nodes = {k: n for k, n in nodes.items() if k in ("1", lora)}
    nodes["90"] = {
        "class_type": "EngineRoomExport",
        "inputs": {"model": [lora, 0], "folder": "onnx/merged"},
    }
    entry = server.run(nodes)
    folder = entry["outputs"]["90"]["text"][0]
    assert folder == str(server.base / "output" / "onnx" / "merged")
    source = server.base / "output/onnx/merged/unet.safetensors"
    source.rename(server.base / "models/diffusion_models/merged.safetensors")
    host = draw(server, before=[("lora", 0.8)])
    exported = draw(server, model="merged")
    # Written in fp16: 11 bits for each weight.
    assert relative_l2(exported, host) < 5e-3
    assert relative_l2(draw(server), host) > 0.05


@pytest.mark.parametrize("folder", ["", "../outside", "/tmp/x"])
def test_export_stays_inside_the_output_folder(server, folder):
    nodes = graph(server.base / "x.safetensors")
    nodes = {"1": nodes["1"]}
    nodes["90"] = {
        "class_type": "EngineRoomExport",
        "inputs": {"model": ["1", 0], "folder": folder},
    }
    entry = server.finish(server.queue(nodes))
    assert entry["status"]["status_str"] == "error"
    assert "output folder" in json.dumps(entry["status"])


def test_compare_reports_what_differs(server):
    nodes = graph(server.base / "x.safetensors")
    sampler = next(k for k, n in nodes.items() if n["class_type"] == "KSampler")
    old = nodes.pop(sampler)["inputs"]
    nodes = {k: n for k, n in nodes.items() if n["class_type"] != "ProbeSave"}
    nodes["90"] = {
        "class_type": "EngineRoomCompare",
        "inputs": {"model": old["model"], "positive": old["positive"],
                   "negative": old["negative"], "latent": old["latent_image"], "seed": 3,
                   "steps": 3, "cfg": 5.0},
    }  # fmt: skip
    report = server.run(nodes)["outputs"]["90"]["text"][0]
    assert "engine served 3 of 3 calls" in report
    assert "differ by" in report


def test_two_prompts_in_the_queue(server):
    paths = [server.base / f"queue{i}.safetensors" for i in range(2)]
    before = server.counts()
    prompts = [server.queue(graph(path, policy=WAIT, seed=20 + i)) for i, path in enumerate(paths)]
    for prompt in prompts:
        assert server.finish(prompt)["status"]["status_str"] == "success"
    after = server.counts()
    assert (after[0] - before[0], after[1] - before[1]) == (6, 0)


def test_remove_takes_ids_only(server):
    draw(server, policy=WAIT)
    for body in ({}, {"id": "../../etc/passwd"}, {"id": 3}, [], {"id": "0" * 16}):
        code, answer = server.post("/engine_room/remove", body)
        assert code in (400, 404)
        assert "error" in answer
    engine = server.get("/engine_room/status")["engines"][0]
    code, answer = server.post("/engine_room/remove", {"id": engine["id"]})
    assert code == 200
    assert answer["freed"] > 1000
    stems = [item["id"] for item in server.get("/engine_room/status")["engines"]]
    assert engine["id"] not in stems


@pytest.mark.parametrize("model", list(CLASSES))
def test_models_of_other_classes(server, model):
    """SDXL's size and pooled conditioning ('y'), v-prediction, the refiner's depth."""
    reference = draw(server, model=model)
    if model.endswith(" v"):
        other = {"SDXL v": "SDXL"}.get(model)
        assert other is None or relative_l2(draw(server, model=other), reference) > MOVES
    latent, counts = counted(server, model=model, policy=WAIT)
    assert relative_l2(latent, reference) <= TOLERANCE
    assert counts == (3, 0)


def test_the_pack_loads_in_no_time(server):
    """As the host itself reports it, in seconds."""
    line = next(x for x in server.log.read_text().splitlines() if f"/{AWKWARD}" in x)
    assert float(re.search(r"([0-9.]+) seconds", line).group(1)) < 0.3


def interrupted(server, **options):
    """A workflow that waits for a build, interrupted in it."""
    prompt = server.queue_and_start(
        graph(server.base / "never.safetensors", policy=WAIT, **options)
    )
    time.sleep(1.5)
    server.post("/interrupt", {})
    return server.finish(prompt)


def test_interrupt_ends_a_build_that_is_waited_for(server):
    entry = interrupted(server, size=(56, 56), steps=2)
    assert entry["status"]["status_str"] == "error"
    assert "execution_interrupted" in json.dumps(entry["status"])
    assert not list((server.base / "models" / "engine-room").glob(".build-*"))
    latent, counts = counted(server, policy=WAIT)
    assert relative_l2(latent, draw(server)) <= TOLERANCE
    assert counts == (3, 0)


def test_a_cleared_queue_runs_nothing(server):
    first = server.queue_and_start(
        graph(server.base / "one.safetensors", policy=WAIT, seed=60, steps=90)
    )
    second = server.queue(graph(server.base / "two.safetensors", policy=WAIT, seed=61))
    server.post("/queue", {"clear": True})
    assert server.finish(first)["status"]["status_str"] == "success"
    assert server.get(f"/history/{second}") == {}
    assert not (server.base / "two.safetensors").exists()


# Baked engines


@pytest.fixture(scope="module")
def baked(server):
    """An engine with checkpoint a and a LoRA frozen in, as the nodes list it."""
    nodes = {
        "1": {"class_type": "UNETLoader",
              "inputs": {"unet_name": "a.safetensors", "weight_dtype": "default"}},
        "2": {"class_type": "LoraLoaderModelOnly",
              "inputs": {"model": ["1", 0], "lora_name": "lora.safetensors",
                         "strength_model": 0.8}},
        "3": {"class_type": "EngineRoomBuild",
              "inputs": {"model": ["2", 0], "width": 64, "height": 64, "pictures": 1,
                         "guidance": True, "prompt_chunks": 1, "controlnet": False,
                         "weights": "baked"}},
    }  # fmt: skip
    outputs = server.run(nodes)["outputs"]
    (report,) = outputs["3"]["text"]
    assert "baked engine" in report
    info = server.get("/object_info/EngineRoomLoad")["EngineRoomLoad"]
    (label,) = info["input"]["required"]["engine"][0]
    return label


LORA = {"before": [("lora", 0.8)]}


def test_a_baked_engine_draws_without_its_checkpoint(server, baked):
    reference = draw(server, **LORA, steps=6)
    assert relative_l2(draw(server, steps=6), reference) > MOVES
    latent, counts = counted(server, engine=baked, steps=6)
    assert relative_l2(latent, reference) <= TOLERANCE
    assert counts == (6, 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size": (8, 16)}, "draws 64x64.*this is 128x64.*Connect an empty latent of 64x64"),
        ({"control": "control"}, "ControlNet"),
        ({"patch": "attn2"}, "active in the UNet: patches"),
        ({"after": [("lora", 0.5)]}, "LoRA or merge cannot work on a baked engine"),
        ({"merge": ("b", 0.5)}, "merge.* cannot work on a baked engine"),
        ({"hook": ("lora", 0.9)}, "scheduled LoRA cannot work on a baked engine"),
        ({"engine": "gone [0123456789abcdef]"}, "not in list|cannot be used here"),
    ],
)
def test_what_a_baked_engine_cannot_do_is_an_error_that_helps(server, baked, options, words):
    with pytest.raises(AssertionError, match=f"(?s){words}"):
        draw(server, **{"engine": baked, **options})
    latent, counts = counted(server, engine=baked)
    assert relative_l2(latent, draw(server, **LORA)) <= TOLERANCE
    assert counts == (3, 0)


def test_a_baked_engine_of_another_version_names_both(server, baked):
    stem = baked[-17:-1]
    path = server.base / "models" / "engine-room" / f"{stem}.json"
    text = path.read_text()
    manifest = json.loads(text)
    here = manifest["key"]["platform"]
    for field, value, words in (("platform", "win32-amd64", f"made for win32-amd64.*{here}"),):
        key = {**manifest["key"], field: value}
        other = EngineKey.from_json(key).stem
        for suffix in (".engine", ".cal.safetensors"):
            (path.parent / f"{other}{suffix}").write_bytes(path.with_suffix(suffix).read_bytes())
        (path.parent / f"{other}.json").write_text(json.dumps({**manifest, "key": key}))
        with pytest.raises(AssertionError, match=f"(?s){words}"):
            draw(server, engine=f"{manifest['label']} [{other}]")
        assert server.post("/engine_room/remove", {"id": other})[0] == 200


def test_tiers_keep_to_their_engines(server, baked):
    """auto takes the baked engine once the live weights are known to be those in it."""
    stem = baked[-17:-1]
    server.post("/engine_room/retry", {})

    def drawn(seed, expected, *, lora=True, **options):
        """Another seed each time: ComfyUI does not sample the same workflow twice."""
        job = {**(LORA if lora else {}), "steps": 20, "seed": seed}
        latent, counts = counted(server, **job, policy=WAIT, **options)
        assert relative_l2(latent, draw(server, **job)) <= TOLERANCE
        assert counts == expected or expected is None, counts
        return counts

    for seed in (21, 22, 23):
        drawn(seed, (20, 0))
    engines = server.get("/engine_room/status")["engines"]
    assert stem in {engine["id"] for engine in engines if engine["loaded"]}
    served, host = drawn(24, None, tier="baked")
    assert served > 0
    assert served + host == 20
    drawn(25, (0, 20), lora=False, tier="baked")
    drawn(26, (20, 0), tier="shared")


def test_engines_of_another_precision(server):
    """fp16 beside an fp32 host: weights are copied in it, and follow a LoRA."""
    for lora in ({}, LORA):
        reference = draw(server, **lora)
        latent, counts = counted(server, **lora, policy=WAIT, precision="fp16")
        assert counts == (3, 0)
        assert TOLERANCE < relative_l2(latent, reference) < 5e-2


def test_the_memory_manager_takes_engine_memory_back(server):
    """Copies of weights count as loaded, go when the host wants its memory, and come again."""
    reference = draw(server)
    drawn, _ = counted(server, policy=WAIT, precision="fp16", seed=31)
    held = server.get("/engine_room/status")["memory_bytes"]
    assert held > 1e6
    server.post("/free", {"unload_models": True, "free_memory": True})
    deadline = time.monotonic() + 30
    while server.get("/engine_room/status")["memory_bytes"]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    latent, counts = counted(server, policy=WAIT, precision="fp16")
    assert counts == (3, 0)
    assert relative_l2(latent, reference) < 5e-2 < relative_l2(latent, drawn)
    assert 1e6 < server.get("/engine_room/status")["memory_bytes"] <= held


ACTIONS = ("remove", "retry", "cancel", "install", "doctor")


@pytest.mark.parametrize("action", ACTIONS)
def test_no_action_by_get_or_from_another_origin(server, action):
    """Without a preflight a page elsewhere can send a GET, or a POST that is no JSON."""
    url = f"{server.url}/engine_room/{action}"
    for data, headers, code in (
        (None, {}, (404, 405)),
        (b'{"id": "0"}', {"Content-Type": "text/plain"}, (415,)),
        (b"id=0", {"Content-Type": "application/x-www-form-urlencoded"}, (415,)),
    ):
        request = urllib.request.Request(url, data, headers)
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=60)
        assert caught.value.code in code


def test_the_doctor(server):
    code, found = server.post("/engine_room/doctor", {})
    assert code == 200
    assert set(found["facts"]["hooks"].values()) == {True}
    assert found["facts"]["host"].startswith("ComfyUI 0.")
    assert found["facts"]["onnxruntime"].endswith("ran it: right")
    assert found["lines"][-1] == "all good", found["todo"]


def test_engines_of_an_earlier_start_serve_at_once(server):
    draw(server, policy=WAIT)
    server.stop()
    server.start()
    _, counts = counted(server, policy=WAIT)
    assert counts == (3, 0)
    ids = [e for e in server.get("/engine_room/status")["engines"] if e["loaded"]]
    assert len(ids) == 1


def test_a_restart_in_mid_build_leaves_nothing_behind(server):
    """The host is killed while a worker builds; the next start clears up and builds again."""
    folder = server.base / "models" / "engine-room"
    server.queue(graph(server.base / "never.safetensors", policy=WAIT, size=(24, 40)))
    deadline = time.monotonic() + 60
    while not list(folder.glob(".build-*")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    server.process.kill()
    server.process.wait(20)
    server.start()
    latent, counts = counted(server, policy=WAIT, size=(24, 40))
    assert relative_l2(latent, draw(server, size=(24, 40))) <= TOLERANCE
    assert counts == (3, 0)
    assert not list(folder.glob(".build-*"))
    out = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert f"{server.base}" not in "".join(x for x in out.splitlines() if "worker.py" in x)


def test_disabled_and_enabled_again(server):
    """Without the pack the host is as before; with it again, its engines serve at once."""
    reference = draw(server, policy=WAIT)
    pack = server.base / "custom_nodes" / AWKWARD
    disabled = pack.with_name(f"{AWKWARD}.disabled")
    server.stop()
    pack.rename(disabled)
    server.start()
    assert "EngineRoomModel" not in server.get("/object_info")
    assert relative_l2(draw(server), reference) <= TOLERANCE
    server.stop()
    disabled.rename(pack)
    server.start()
    draw(server, policy=NEVER)  # what is on disk is loaded in the background
    while server.get("/engine_room/status")["wanted"]:
        time.sleep(0.1)
    latent, counts = counted(server, policy=NEVER, seed=2)
    assert relative_l2(latent, draw(server, seed=2)) <= TOLERANCE
    assert counts == (3, 0)


def test_the_log_is_quiet(server):
    """No traceback of ours in all of the above, but for the errors that were provoked."""
    log = server.log.read_text()
    assert "A call went to the host: Engine Room failed" not in log
    assert "could not be loaded" not in log
