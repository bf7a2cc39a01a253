"""Each real host of the A1111 family, through its API: as without us, with exact counts."""

from __future__ import annotations

import re
import shutil
import urllib.error
import urllib.request
from functools import partial

import pytest

from tests.support_hosts import find_host
from tests.support_webui import (
    WebuiServer,
    distance,
    picture,
    write_larger_families,
    write_models,
    write_narrow_sdxl,
)

HOSTS = ("a1111", "forge", "reforge", "classic")
# fp32 on both sides: sums in another order, amplified over a few sampling steps.
TOLERANCE = 1e-4
MOVES = 20 * TOLERANCE


@pytest.fixture(scope="module")
def narrow_sdxl(tmp_path_factory):
    return tmp_path_factory.mktemp("narrow-sdxl")


@pytest.fixture(scope="module", params=HOSTS)
def host(request, tmp_path_factory, narrow_sdxl):
    checkout, reason = find_host(request.param)
    if checkout is None:
        pytest.skip(reason)
    server = WebuiServer(request.param, checkout, tmp_path_factory.mktemp(request.param))
    write_models(server.base)
    if request.param == "a1111":
        write_larger_families(server.base)
    else:
        write_narrow_sdxl(server.base, narrow_sdxl)
    server.start()
    yield server
    server.stop()
    shutil.rmtree(server.base)  # gigabytes of checkpoints


LONG = "a lighthouse, " + "very " * 90 + "tall"
HIRES = {"enable_hr": True, "hr_scale": 1.5, "hr_upscaler": "Latent", "hr_second_pass_steps": 2,
         "denoising_strength": 0.7}  # fmt: skip
IMG2IMG = {"init_images": [picture()], "denoising_strength": 0.6,
           "settings": {"img2img_fix_steps": True}}  # fmt: skip
WIDE = {"width": 256, "height": 128}  # two of HyperTile's smallest tiles
XL, SD2 = ({"sd_model_checkpoint": f"{name}.safetensors"} for name in ("sdxl", "sd21"))
# Job, the job without the feature, calls served and calls of the host: one pair for all hosts, or
# one for each that differs. A1111 calls twice a step where prompts differ in length.
CASES = {
    "plain": ({}, None, (3, 0)),
    "another seed": ({"seed": 9}, {}, (3, 0)),
    "batch of three": ({"batch_size": 3}, None, (3, 0)),
    "a replaced UNet forward": ({"patch": "forward"}, {}, (0, 3)),
    "two batches": ({"n_iter": 2}, {}, (6, 0)),
    "cfg 1": ({"cfg_scale": 1.0}, {}, (3, 0)),
    "two calls a step": ({"sampler_name": "Heun"}, {}, (5, 0)),
    "wide": ({"width": 128}, None, (3, 0)),
    "odd latents": ({"width": 72, "height": 56}, None, (3, 0)),
    "long prompt": ({"prompt": LONG}, {}, {"a1111": (6, 0), "": (3, 0)}),
    "prompt editing": ({"prompt": "[a lighthouse:a boat:0.4] at sea"}, {}, (3, 0)),
    "AND": ({"prompt": "a lighthouse AND a boat"}, {}, (3, 0)),
    "LoRA": ({"prompt": "a lighthouse <lora:lora:0.8>"}, {}, (3, 0)),
    "another strength": (
        {"prompt": "a lighthouse <lora:lora:-0.5>"},
        {"prompt": "a lighthouse <lora:lora:0.8>"},
        (3, 0),
    ),
    "two LoRAs": (
        {"prompt": "a lighthouse <lora:lora:0.8> <lora:loha:0.6>"},
        {"prompt": "a lighthouse <lora:lora:0.8>"},
        (3, 0),
    ),
    "no LoRA again": ({}, {"prompt": "a lighthouse <lora:lora:0.8>"}, (3, 0)),
    "hires fix": (HIRES, {"width": 96, "height": 96}, (5, 0)),
    "hires fix with a LoRA of its own": (
        {**HIRES, "prompt": "a lighthouse <lora:lora:0.5>",
         "hr_prompt": "a lighthouse <lora:lora:0.9>"},
        HIRES,
        (5, 0),
    ),
    "img2img": (IMG2IMG, {**IMG2IMG, "denoising_strength": 0.9}, (3, 0)),
    "inpainting a mask": (
        {**IMG2IMG, "mask": picture(mask=True), "inpainting_fill": 1, "mask_blur": 0},
        IMG2IMG,
        (3, 0),
    ),
    "no negative prompt in late steps": (
        {"s_min_uncond": 12.0, "settings": {"s_min_uncond_all": True}},
        {},
        (3, 0),
    ),
    "another checkpoint": ({"settings": {"sd_model_checkpoint": "b.safetensors"}}, {}, (3, 0)),
    "LCM": ({"sampler_name": "LCM"}, {}, (3, 0)),
    "an inpainting checkpoint": (
        {**IMG2IMG, "mask": picture(mask=True), "inpainting_fill": 1, "mask_blur": 0,
         "settings": {"sd_model_checkpoint": "inpainting.safetensors"}},
        {**IMG2IMG, "settings": {"sd_model_checkpoint": "inpainting.safetensors"}},
        (3, 0),
    ),
    "an inpainting checkpoint without a picture": (
        {"settings": {"sd_model_checkpoint": "inpainting.safetensors"}}, {}, (3, 0)
    ),
    "v-prediction": ({"settings": {"sd_model_checkpoint": "v.safetensors"}}, {}, (3, 0)),
    "SD2": ({"settings": SD2}, {}, (3, 0)),
    "SDXL": ({"settings": XL}, {}, (3, 0)),
    "SDXL of another size": ({"settings": XL, "width": 96}, None, (3, 0)),
    "SDXL, long prompt": ({"settings": XL, "prompt": LONG}, {"settings": XL}, (6, 0)),
    "SDXL with a LoRA": (
        {"settings": XL, "prompt": "a lighthouse <lora:xl:0.8>"}, {"settings": XL}, (3, 0)
    ),
    "SDXL, no negative prompt": (
        {"settings": XL, "negative_prompt": ""}, {"settings": XL}, (3, 0)
    ),
    "SD1.5 after SDXL": ({"seed": 6}, {}, (3, 0)),
    "hypernetwork": ({"prompt": "a lighthouse <hypernet:style:1.0>"}, {}, (0, 3)),
    "after the hypernetwork": ({"seed": 4}, {}, (3, 0)),
    "refiner": ({"refiner_checkpoint": "b.safetensors", "refiner_switch_at": 0.2}, {}, (3, 0)),
    "after the refiner": ({"seed": 3}, {}, (3, 0)),
    "HyperTile": (
        {**WIDE, "settings": {"hypertile_enable_unet": True, "hypertile_max_tile_unet": 128}},
        WIDE,
        (0, 3),
    ),
    "after HyperTile": ({**WIDE, "seed": 2}, WIDE, (3, 0)),
    "FreeU": ({"freeu": True}, {}, (0, 3)),
    "token merging": ({"settings": {"token_merging_ratio": 0.6}}, {}, (0, 3)),
    "tiling": ({"tiling": True}, {}, (0, 3)),
}  # fmt: skip
ONLY = {
    "v-prediction": {"a1111"},
    "SD2": {"a1111"},
    "SDXL with a LoRA": {"a1111", "forge"},
    "SD1.5 after SDXL": {"a1111", "forge"},
    "SDXL of another size": {"a1111"},
    "SDXL, long prompt": {"a1111"},
    "SDXL, no negative prompt": {"a1111"},
    "hypernetwork": {"a1111"},
    "tiling": {"a1111"},
    "HyperTile": {"a1111"},
    "FreeU": {"forge", "reforge"},
    "no negative prompt in late steps": {"a1111", "forge"},
    # reForge compares the mode of an API unit with the wrong type: never equal.
    "ControlNet for the positive prompt": {"forge", "classic"},
}
CONTROL = {"controlnet": {"weight": 0.5}}
FORGE_CASES = {
    "ControlNet": (CONTROL, {}, (3, 0)),
    "ControlNet in early steps": (
        {"controlnet": {"weight": 0.5, "guidance_end": 0.4}},
        CONTROL,
        (3, 0),
    ),
    "ControlNet for the positive prompt": (
        {"controlnet": {"weight": 0.5, "control_mode": "ControlNet is more important"}},
        CONTROL,
        (3, 0),
    ),
    "ControlNet and a LoRA": (
        {**CONTROL, "prompt": "a lighthouse <lora:lora:0.8>"},
        CONTROL,
        (3, 0),
    ),
    "without ControlNet again": ({"seed": 8}, {"seed": 8, **CONTROL}, (3, 0)),
    "attention patch": ({"patch": "attn2"}, {}, (0, 3)),
    "block patch": ({"patch": "output"}, {}, (0, 3)),
    "another wrapper": ({"patch": "wrapper"}, {}, (3, 0)),
}


def expected_for(host, expected):
    return expected if isinstance(expected, tuple) else expected.get(host.name, expected.get(""))


def check(host, case):
    job, without, expected = case
    alone = host.draw_alone
    if "mask" in job:
        # The first job with a mask (A1111), or after another (Forge), differs from the others by
        # itself: both draws that are compared come after a job without.
        alone = partial(host.draw, "off")
        alone(**job)
        alone(**without)
    reference, infotext = alone(**job)
    assert "Engine Room" not in infotext
    if without is not None:
        other, _ = alone(**without)
        assert distance(other, reference) > MOVES, "the feature does nothing"
    before = host.counts()
    engine, infotext = host.draw("wait", **job)
    after = host.counts()
    assert distance(engine, reference) <= TOLERANCE
    served, by_host = after[0] - before[0], after[1] - before[1]
    assert (served, by_host) == expected_for(host, expected), host.get("/engine-room/status")[
        "reasons"
    ]
    if served:
        runs = job.get("n_iter", 1)
        count = f"{served // runs} of {(served + by_host) // runs} UNet calls by "
        assert count in infotext, "what stands beside a picture is of that picture"
        named = infotext.partition(count)[2]
        engines = host.get("/engine-room/status")["engines"]
        assert any(named.startswith(engine["id"]) for engine in engines)


@pytest.mark.parametrize("name", CASES)
def test_the_same_as_without_us_with_exact_counts(host, name):
    if host.name not in ONLY.get(name, HOSTS):
        pytest.skip(f"{host.name} does not have this, or its API does not")
    check(host, CASES[name])


@pytest.mark.parametrize("name", FORGE_CASES)
def test_other_extensions_of_the_forge_family(host, name):
    if host.name == "a1111":
        pytest.skip("A1111 has no patcher")
    if host.name not in ONLY.get(name, HOSTS):
        pytest.skip(f"{host.name} does not have this, or its API does not")
    check(host, FORGE_CASES[name])


def test_building_in_the_background_never_spoils_a_picture(host):
    reference, _ = host.draw("off", width=192)
    first, _ = host.draw("background", width=192)
    assert distance(first, reference) <= TOLERANCE
    while host.get("/engine-room/status")["wanted"]:
        pass
    before = host.counts()
    second, infotext = host.draw("background", width=192)
    assert distance(second, reference) <= TOLERANCE
    assert host.counts() == (before[0] + 3, before[1])
    assert "3 of 3 UNet calls" in infotext


def test_an_xyz_plot_over_checkpoints_and_loras(host):
    """Four pictures, two checkpoints, one engine; the same as without us."""
    info, values = host.script("x/y/z")
    kinds = info["args"][0]["choices"] or []
    if not kinds:
        pytest.skip(f"{host.name} does not list the axes")
    axes = [kinds.index("Prompt S/R"), kinds.index("Checkpoint name")]
    values[0:2], values[3:5] = [axes[0], "0.8,0.3"], [axes[1], "a.safetensors,b.safetensors"]
    values[5], values[6] = ["a.safetensors", "b.safetensors"], kinds.index("Nothing")
    job = {"prompt": "a lighthouse <lora:lora:0.8>", "script_name": info["name"],
           "script_args": values}  # fmt: skip
    reference, _ = host.draw("off", **job)
    before = host.counts()
    engine, _ = host.draw("wait", **job)
    assert distance(engine, reference) <= TOLERANCE
    assert host.counts() == (before[0] + 12, before[1])


@pytest.mark.parametrize(
    ("flag", "expected", "words"),
    [("--medvram", (3, 0), ""), ("--lowvram", (0, 3), "a hook in")],
)
def test_low_memory_modes(flag, expected, words, tmp_path):
    checkout, reason = find_host("a1111")
    if checkout is None:
        pytest.skip(reason)
    server = WebuiServer("a1111", checkout, tmp_path, flag)
    write_models(server.base)
    server.start()
    try:
        reference, _ = server.draw("off")
        engine, _ = server.draw("wait")
        assert distance(engine, reference) <= TOLERANCE
        assert server.counts() == expected
        reasons = server.get("/engine-room/status")["reasons"]
        assert words in "".join(reason["text"] for reason in reasons)
    finally:
        server.stop()


def test_uninstalled_it_leaves_the_host_as_it_was(tmp_path):
    """The folder is removed, as the extension manager does; settings and engines stay, unused."""
    checkout, reason = find_host("a1111")
    if checkout is None:
        pytest.skip(reason)
    server = WebuiServer("a1111", checkout, tmp_path)
    write_models(server.base)
    server.start()
    try:
        with_us, infotext = server.draw("wait")
        assert "3 of 3 UNet calls" in infotext
        server.stop()
        shutil.rmtree(server.base / "extensions" / "we ird-name.v2")
        server.start()
        without, infotext = server.draw(None)
        assert "Engine Room" not in infotext
        assert distance(without, with_us) <= TOLERANCE
        log = server.log.read_text().rpartition("Startup time")[0]
        assert "Traceback" not in log.rpartition("Startup time")[2]
    finally:
        server.stop()


def test_one_engine_serves_every_lora_and_checkpoint(host):
    host.draw("wait")
    before = {engine["id"] for engine in host.get("/engine-room/status")["engines"]}
    for job in (
        {"prompt": "a boat <lora:loha:0.3>"},
        {"settings": {"sd_model_checkpoint": "b.safetensors"}},
    ):
        _, infotext = host.draw("never", **job)
        assert "3 of 3 UNet calls" in infotext
    after = {engine["id"] for engine in host.get("/engine-room/status")["engines"]}
    assert after == before


def test_an_infotext_draws_the_same_without_us(host):
    """Nothing of ours in the parameters changes what is drawn."""
    engine, infotext = host.draw("wait", seed=5)
    seed = re.search(r"Seed: (\d+)", infotext).group(1)
    again, _ = host.draw("off", seed=int(seed))
    assert distance(engine, again) <= TOLERANCE


def test_routes_take_ids_only(host):
    host.draw("wait")
    engines = host.get("/engine-room/status")["engines"]
    assert engines
    assert host.post("/engine-room/remove", {"id": engines[0]["id"]})["freed"] > 1000
    for body in ({"id": "../../etc/passwd"}, {}, []):
        with pytest.raises(AssertionError, match="engine"):
            host.post("/engine-room/remove", body)


@pytest.mark.parametrize("action", ["remove", "doctor"])
def test_no_action_by_get_or_from_another_origin(host, action):
    """Without a preflight a page elsewhere can send a GET, or a POST that is no JSON."""
    url = f"{host.url}/engine-room/{action}"
    for data, headers, code in (
        (None, {}, (404, 405)),
        (b'{"id": "0"}', {"Content-Type": "text/plain"}, (415,)),
    ):
        request = urllib.request.Request(url, data, headers)
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=60)
        assert caught.value.code in code


def test_the_doctor(host):
    found = host.post("/engine-room/doctor", {})
    assert set(found["facts"]["hooks"].values()) == {True}, found["facts"]["hooks"]
    assert found["facts"]["onnxruntime"].endswith("ran it: right")
    assert found["lines"][-1] == "all good", found["todo"]
    print("\n".join(found["lines"]))


def test_reload_ui_with_an_engine_active(host):
    """The host executes every script again; one copy of ours goes on, with its engines."""
    before, infotext = host.draw("wait")
    assert "3 of 3 UNet calls" in infotext
    counts, starts = host.counts(), host.starts()
    host.post("/probe/restart", {})
    host.wait_until_up(starts)
    after, infotext = host.draw("never")
    assert "3 of 3 UNet calls" in infotext
    assert distance(after, before) <= TOLERANCE
    assert host.counts() == (counts[0] + 3, counts[1])


def test_the_log_is_quiet(host):
    log = host.log.read_text()
    assert "Engine Room failed" not in log
    assert "Error loading script: engine_room.py" not in log
