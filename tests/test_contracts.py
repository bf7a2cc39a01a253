"""Each adapter on a fake of its host: the same as without us, exact counts, nothing left behind."""

from __future__ import annotations

import copy
import importlib
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from extension.hosts.webui.prediction import prediction_of
from extension.shapes import Shape
from tests import support_fakes as fakes
from tests.support_models import control_of, random_inputs, relative_l2

TOLERANCE = 1e-4  # fp32 sums in another order
# At 8x8 the lowest level has one pixel, and group norms over two values amplify any rounding.
SHAPE = Shape(batch=2, height=16, width=16)


def call_of(shape=SHAPE, seed=1):
    inputs = random_inputs(fakes.ARCH, shape, seed)
    return [inputs[name] for name in ("x", "timesteps", "context")]


def counted(room, unet, work):
    """The result of ``work``, and the calls that engines and the host's network computed."""
    before, host = room.counters.totals[0], type(unet).calls
    out = work()
    return out, (room.counters.totals[0] - before, type(unet).calls - host)


@pytest.fixture
def comfy(monkeypatch, tmp_path):
    patcher = fakes.comfy(monkeypatch, tmp_path)
    routing = importlib.import_module("extension.hosts.comfy.routing")
    yield patcher, routing
    routing.room().close()


def check_comfy(comfy, expected, *, shape=SHAPE, policy="wait", **options):
    patcher, routing = comfy
    unet = patcher.model.diffusion_model
    reference = patcher.run(*call_of(shape), **options)
    routed = routing.route(patcher, policy=policy)
    out, counts = counted(routing.room(), unet, lambda: routed.run(*call_of(shape), **options))
    assert relative_l2(out, reference) <= TOLERANCE
    assert counts == expected
    return routed


def test_comfyui_serves_and_leaves_the_plain_patcher_alone(comfy):
    patcher, routing = comfy
    routed = check_comfy(comfy, (3, 0), calls=3)
    unet = patcher.model.diffusion_model
    _, counts = counted(routing.room(), unet, lambda: patcher.run(*call_of()))
    assert counts == (0, 1)
    twice = routing.route(routing.route(routed, policy="wait"), policy="wait")
    assert sum(map(len, twice.wrappers["diffusion_model"].values())) == 1
    off = routing.unroute(twice)
    _, counts = counted(routing.room(), unet, lambda: off.run(*call_of()))
    assert counts == (0, 1)
    assert "forward" not in unet.__dict__


def control_lists():
    control = control_of(random_inputs(fakes.ARCH, replace(SHAPE, control=True)))
    return {"input": [], "middle": list(control.middle), "output": list(control.output)}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (1, 0)),
        ({"shape": replace(SHAPE, batch=3)}, (1, 0)),
        ({"shape": Shape(batch=1, height=15, width=17, tokens=154)}, (1, 0)),
        ({"patches": {"attn2_patch": [print]}}, (0, 1)),
        ({"policy": "never"}, (0, 1)),
        ({"ref_latents": [torch.zeros(1)]}, (0, 1)),
    ],
)
def test_comfyui_case_by_case(comfy, options, expected):
    check_comfy(comfy, expected, **options)


def test_comfyui_control_is_served_and_a_fallback_finds_its_lists_whole(comfy):
    check_comfy(comfy, (1, 0), control=control_lists())
    check_comfy(comfy, (0, 1), control=control_lists(), patches={"attn2_patch": [print]})


def test_comfyui_weights_that_change_between_runs(comfy):
    patcher, routing = comfy
    routed = check_comfy(comfy, (1, 0))
    with torch.no_grad():
        patcher.model.diffusion_model.out[2].bias += 0.3
    check_comfy(comfy, (1, 0))
    entries = routing.room().library.entries()
    assert len(entries) == 1
    assert routed.run(*call_of()).shape == (2, 4, 16, 16)


@pytest.mark.parametrize(
    ("count", "named"),
    [
        (8, {}),
        (7, {"extra": 1}),
        (12, {}),
        (5, {"control": None}),
        (4, {"transformer_options": {}}),
    ],
)
def test_comfyui_other_networks_get_their_arguments_untouched(comfy, caplog, count, named):
    """Flux, Qwen, HunyuanVideo, Wan and AuraFlow each pass others, and in another order."""
    patcher, routing = comfy
    args, got = tuple(object() for _ in range(count)), []

    def network(*args, **named):
        got.append((args, named))
        return "drawn"

    routed = routing.Routing(patcher, policy="wait", tier="auto", precision="")
    executor = fakes.Executor(network, torch.nn.Linear(2, 2), [routed])
    assert executor.execute(*args, **named) == "drawn"
    assert got == [(args, named)]
    assert "failed" not in caplog.text
    (reason,) = routing.room().counters.to_json()["reasons"]
    assert (reason["code"], reason["count"]) == ("model", 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "engine served 2 of 2 calls"),
        ({"patches": {"attn2_patch": [print]}}, "0 of 2 calls; 2 to the host: .*attn2_patch"),
        ({"policy": "never"}, "0 of 2 calls; 2 to the host: no engine"),
    ],
)
def test_comfyui_the_node_tells_what_happened_in_the_run(comfy, options, words):
    patcher, routing = comfy
    page = sys.modules["server"].PromptServer.instance
    routed = routing.route(patcher, policy=options.pop("policy", "wait"), node="12")
    for _ in range(2):
        routed.run(*call_of(), calls=2, **options)
    assert len(page.sent) == 2
    for event, data in page.sent:
        assert (event, data["node"]) == ("engine_room.report", "12")
        assert re.search(words, data["text"])
    said = {text for node, text in page.said if node == page.last_node_id}
    assert bool(said) == words.startswith("engine served"), said


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(("key", "expected"), [("easycache", (1, 0)), ("odd", (0, 1))])
def test_comfyui_wrappers_of_other_nodes_stay_around_the_network(comfy, key, first, expected):
    """Those that only look at input and output go with engines; others may change the network."""
    patcher, routing = comfy

    def halved(executor, *args, **named):
        return executor(*args, **named) * 0.5

    reference = patcher.run(*call_of()) * 0.5
    kind = fakes.Kinds.DIFFUSION_MODEL
    if first:
        patcher.add_wrapper_with_key(kind, key, halved)
    routed = routing.route(patcher, policy="wait")
    if not first:
        routed.add_wrapper_with_key(kind, key, halved)
    unet = patcher.model.diffusion_model
    out, counts = counted(routing.room(), unet, lambda: routed.run(*call_of()))
    assert relative_l2(out, reference) <= TOLERANCE
    assert counts == expected
    texts = [reason["text"] for reason in routing.room().counters.to_json()["reasons"]]
    assert any(f"wrapper around the UNet ({key})" in text for text in texts) == (key == "odd")


def test_comfyui_a_node_after_another_keeps_its_choices(comfy):
    patcher, routing = comfy
    chosen = routing.route(patcher, policy="never", tier="shared", node="3")
    assert routing.keep_or_route(chosen) is chosen
    other = routing.routing_of(routing.keep_or_route(chosen, "fp16"))
    assert (other.policy, other.tier, other.precision) == ("never", "shared", "fp16")
    waits = routing.routing_of(routing.waiting(chosen))
    assert (waits.policy, waits.tier) == ("wait", "shared")
    fresh = routing.routing_of(routing.keep_or_route(patcher, "bf16"))
    assert (fresh.policy, fresh.tier, fresh.precision) == ("background", "auto", "bf16")


def test_comfyui_hooks_make_every_call_an_epoch(comfy):
    patcher, routing = comfy
    base = patcher.model
    first = routing.weights_epoch(base, 1)
    base.current_patcher = patcher
    assert routing.weights_epoch(base, 1) == first
    patcher.current_hooks = ["lora"]
    assert routing.weights_epoch(base, 1) != routing.weights_epoch(base, 1)


def test_comfyui_an_error_of_ours_goes_to_the_host(comfy, monkeypatch):
    _, routing = comfy

    def broken(*args):
        raise RuntimeError("ours")

    monkeypatch.setattr(routing, "describe", broken)
    check_comfy(comfy, (0, 1))


def test_comfyui_an_interrupt_that_the_progress_bar_notices_ends_the_run(comfy):
    """The bar raises and clears the flag in the middle of a build; the interrupt is not lost."""
    patcher, routing = comfy
    management = routing.comfy.model_management
    routed = routing.route(patcher, policy="wait")
    management.interrupt_current_processing()
    with pytest.raises(fakes.Interrupted):
        routed.run(*call_of(replace(SHAPE, batch=3)))
    assert not management.processing_interrupted()
    routing.room().tiers.retry()
    check_comfy(comfy, (1, 0), shape=replace(SHAPE, batch=3))


@pytest.mark.parametrize(("free", "is_dynamic"), [(2000, False), (1050, True)])
def test_comfyui_dynamic_vram_is_given_up_where_the_model_fits(comfy, free, is_dynamic):
    """The newer hosts' patchers: weights are nowhere that an engine could read them."""
    patcher, routing = comfy
    routing.comfy.model_management.get_free_memory = lambda device: free
    dynamic = fakes.DynamicPatcher(patcher.model)
    reference = patcher.run(*call_of())
    routed = routing.route(dynamic, policy="wait")
    assert routed.is_dynamic() == is_dynamic
    assert dynamic.is_dynamic()
    unet = patcher.model.diffusion_model
    out, counts = counted(routing.room(), unet, lambda: routed.run(*call_of()))
    assert relative_l2(out, reference) <= TOLERANCE
    assert counts == ((0, 1) if is_dynamic else (1, 0))


def test_comfyui_dynamic_vram_that_cannot_be_given_up_stays_with_the_host(comfy):
    """The host makes the older form from the model's file, which it does not always know."""
    patcher, routing = comfy
    routing.comfy.model_management.get_free_memory = lambda device: 1 << 40

    class Fileless(fakes.DynamicPatcher):
        def clone(self, disable_dynamic=False):
            if disable_dynamic:
                raise RuntimeError("no file to load from")
            made = super().clone()
            made.__class__ = Fileless
            return made

    routed = routing.route(Fileless(patcher.model), policy="wait")
    assert routed.is_dynamic()
    out, counts = counted(
        routing.room(), patcher.model.diffusion_model, lambda: routed.run(*call_of())
    )
    assert relative_l2(out, patcher.run(*call_of())) <= TOLERANCE
    assert counts == (0, 1)


class Spoiling:
    """An engine with one output that is not finite."""

    def __init__(self, engine, at, value):
        self._engine, self._left, self._value = engine, at, value

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def run(self, inputs):
        out = self._engine.run(inputs)
        self._left -= 1
        return out if self._left != -1 else out.index_fill(3, torch.tensor([5]), self._value)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_comfyui_a_run_with_a_bad_output_is_done_again_without_the_engine(comfy, at, value):
    """From the same random state; in mid-run, because adaptive samplers never end on a NaN."""
    patcher, routing = comfy
    routed, pool = check_comfy(comfy, (1, 0)), routing.room().pool
    x, timesteps, context = call_of()
    torch.manual_seed(3)
    expected = patcher.walk(x.clone(), timesteps, context, calls=3)
    (loaded,) = pool.candidates()
    entry = pool.use(loaded.stem)
    entry.engine = Spoiling(entry.engine, at, value)
    unet = patcher.model.diffusion_model
    torch.manual_seed(3)
    out, counts = counted(
        routing.room(), unet, lambda: routed.walk(x.clone(), timesteps, context, calls=3)
    )
    assert torch.equal(out, expected)
    assert counts == (0, 3)
    (reason,) = routing.room().counters.to_json()["reasons"]
    assert "was set aside: its output is not finite" in reason["text"]


def test_comfyui_a_model_that_is_unloaded_gives_its_copies_back(comfy, monkeypatch):
    _, routing = comfy
    routed, released = check_comfy(comfy, (1, 0)), []
    monkeypatch.setattr(routing.room().pool, "release_weights", lambda: released.append(1))
    routed.tell("on_detach", False)
    assert released == []
    routed.tell("on_detach", True)
    assert released == [1]


def test_comfyui_sees_the_memory_of_engines_and_may_take_it(comfy):
    """The manager's questions, in its order: how much, take some, take all, exchange of clones."""
    _, routing = comfy
    routed, pool = check_comfy(comfy, (1, 0)), routing.room().pool
    (memory,) = routed.additional_models["engine_room"]
    assert routed.clone().additional_models["engine_room"] == [memory]
    assert memory.is_clone(memory)
    assert not memory.is_clone(routed)
    (loaded,) = pool.candidates()
    pool.use(loaded.stem).resident_bytes = 1000
    assert memory.loaded_size() == memory.model_size() == 1000
    memory.detach(unpatch_all=False)
    assert memory.loaded_size() == 1000
    assert memory.partially_unload(None, 10) == 1000
    assert (memory.loaded_size(), memory.model_size()) == (0, 1000)
    assert pool.candidates() == []
    memory.detach()
    check_comfy(comfy, (1, 0))
    assert "engine_room" not in routing.unroute(routed).additional_models


# The Forge family


@pytest.fixture
def forge(monkeypatch, tmp_path):
    host = fakes.webui(monkeypatch, tmp_path, forge=True)
    host.adapter = importlib.import_module("extension.hosts.webui.forge")
    host.room = importlib.import_module("extension.hosts.webui.room").room
    host.job = type("P", (), {"sd_model": host.model})()
    yield host
    host.room().close()


def check_forge(host, expected, **more):
    reference = host.model.forge_objects.unet.run(*call_of(), **more)
    before = host.model.forge_objects.unet
    host.adapter.attach(host.job)
    patcher = host.model.forge_objects.unet
    out, counts = counted(host.room(), host.unet, lambda: patcher.run(*call_of(), **more))
    assert relative_l2(out, reference) <= TOLERANCE
    assert counts == expected
    assert "forward" not in host.unet.__dict__
    host.model.forge_objects.unet = before


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, (1, 0)),
        ({"transformer_options": {"patches": {"output_block_patch": [print]}}}, (0, 1)),
        ({"unknown": torch.zeros(1)}, (0, 1)),
    ],
)
def test_forge_case_by_case(forge, more, expected):
    check_forge(forge, expected, **more)


def test_forge_control_is_served(forge):
    """The host passes the ControlNet itself along too: the network takes no notice of it."""
    check_forge(forge, (1, 0), control=control_lists())


def test_forge_chains_after_another_wrapper_and_survives_deep_copies(forge):
    patcher = forge.model.forge_objects.unet
    patcher.set_model_unet_function_wrapper(
        lambda apply, a: apply(a["input"], a["timestep"], **a["c"]) * 0.5
    )
    check_forge(forge, (1, 0))
    forge.adapter.attach(forge.job)
    forge.adapter.attach(forge.job)
    wrapper = forge.model.forge_objects.unet.model_options["model_function_wrapper"]
    assert copy.deepcopy(wrapper) is wrapper
    assert not isinstance(wrapper.before, type(wrapper))


def test_forge_off_and_refiners(forge):
    forge.shared.opts.engine_room_policy = "off"
    forge.adapter.attach(forge.job)
    forge.adapter.keep(None)
    assert "model_function_wrapper" not in forge.model.forge_objects.unet.model_options
    forge.shared.opts.engine_room_policy = "wait"
    forge.adapter.keep(None)
    routed = forge.model.forge_objects.unet
    assert "model_function_wrapper" in routed.model_options
    forge.adapter.keep(None)
    assert forge.model.forge_objects.unet is routed


def test_forge_an_exception_of_the_host_leaves_nothing_behind(forge):
    forge.adapter.attach(forge.job)
    patcher = forge.model.forge_objects.unet
    with pytest.raises(Exception, match=r"(?s)."):
        patcher.run(torch.zeros(2, 4, 8, 8), torch.zeros(2), torch.zeros(2, 77, 3))
    assert "forward" not in forge.unet.__dict__


# AUTOMATIC1111


@pytest.fixture
def a1111(monkeypatch, tmp_path):
    host = fakes.webui(monkeypatch, tmp_path, forge=False)
    host.adapter = importlib.import_module("extension.hosts.webui.a1111")
    host.room = importlib.import_module("extension.hosts.webui.room").room
    yield host
    host.room().close()


def check_a1111(host, expected):
    reference = host.unet.forward(*call_of())
    engine = host.adapter.OPTION.create_unet()
    engine.activate()
    host.adapter.begin()
    out, counts = counted(host.room(), host.unet, lambda: engine.forward(*call_of()))
    assert relative_l2(out, reference) <= TOLERANCE
    assert counts == expected


def test_a1111_serves(a1111):
    check_a1111(a1111, (1, 0))
    assert a1111.adapter.OPTION.model_name == "a"


@pytest.mark.parametrize(
    "feature",
    ["hypernetwork", "token merging", "tiling", "lowvram", "policy off", "hook", "forward"],
)
def test_a1111_features_go_to_the_host(a1111, feature, monkeypatch):
    """Each is switched off again, and the engine serves again."""
    if feature == "hypernetwork":
        a1111.shared.loaded_hypernetworks.append("x")
    elif feature == "token merging":
        a1111.model.applied_token_merged_ratio = 0.5
    elif feature == "tiling":
        a1111.hijack.circular_enabled = True
    elif feature == "lowvram":
        a1111.shared.cmd_opts.lowvram = True
    elif feature == "policy off":
        a1111.shared.opts.engine_room_policy = "off"
    elif feature == "hook":
        handle = a1111.unet.out[2].register_forward_hook(lambda *args: None)
    else:
        layer = a1111.unet.out[2]
        layer.forward = lambda x: type(layer).forward(layer, x)
    check_a1111(a1111, (0, 1))
    a1111.shared.loaded_hypernetworks.clear()
    a1111.model.applied_token_merged_ratio = 0
    a1111.hijack.circular_enabled = a1111.shared.cmd_opts.lowvram = False
    a1111.shared.opts.engine_room_policy = "wait"
    if feature == "hook":
        handle.remove()
    a1111.unet.out[2].__dict__.pop("forward", None)
    check_a1111(a1111, (1, 0))


def test_a1111_off_means_that_automatic_finds_nothing(a1111):
    a1111.shared.opts.engine_room_policy = "off"
    assert a1111.adapter.OPTION.model_name is None


@pytest.mark.parametrize("value", ["nonsense", None, 7, float("nan"), "1e9", -3, float("inf")])
def test_settings_that_someone_wrote_by_hand(a1111, value):
    """A damaged settings file costs the defaults, nothing more."""
    settings = importlib.import_module("extension.hosts.webui.settings")
    for name in ("policy", "tier", "after_calls", "most", "disk", "promote"):
        setattr(a1111.shared.opts, f"engine_room_{name}", value)
    assert settings.policy() == "background"
    assert settings.tier() == "auto"
    assert 1 <= settings.tier_settings().after_calls <= 200
    assert 0 <= settings.tier_settings().disk_budget <= 200e9
    assert 0 <= settings.tier_settings().promote_after <= 4000
    assert 1 <= settings.engines_in_memory() <= 32


def forge_model(**inner):
    unet = SimpleNamespace(model=SimpleNamespace(**inner))
    return SimpleNamespace(forge_objects=SimpleNamespace(unet=unet))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (SimpleNamespace(parameterization="v"), "v"),
        (SimpleNamespace(parameterization="eps"), "eps"),
        (forge_model(predictor=SimpleNamespace(prediction_type="v_prediction")), "v"),
        (forge_model(predictor=SimpleNamespace(prediction_type="epsilon")), "eps"),
        (forge_model(predictor=SimpleNamespace(prediction_type="edm")), "edm"),
        (forge_model(model_type=SimpleNamespace(name="V_PREDICTION")), "v"),
        (forge_model(model_type=SimpleNamespace(name="EPS")), "eps"),
        (None, "eps"),
    ],
)
def test_what_each_host_says_its_model_predicts(model, expected):
    """It stands in a baked engine, and another host samples by it."""
    assert prediction_of(model) == expected
