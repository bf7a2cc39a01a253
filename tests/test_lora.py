"""LoRA files of every family and naming, against LyCORIS and by definition."""

from __future__ import annotations

import itertools
import json
import logging
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from extension.architecture import FULL, TINY
from extension.diffusers_names import ldm_to_diffusers
from extension.errors import BadFileError, LoraError, SettingError, WrongBaseError
from extension.lora import MergedWeights, read_lora
from extension.lora_names import is_text_encoder, resolve
from extension.synthetic import make_checkpoint
from extension.synthetic_lora import KINDS, NAMINGS, make_lora, targets
from tests.support_models import SMALL, random_weights, relative_l2

ARCH = SMALL["two-levels"]
LINEAR = "input_blocks.1.1.transformer_blocks.0.attn1.to_q"
CONV = "input_blocks.1.0.in_layers.2"
POINTWISE = "input_blocks.1.1.proj_in"
NORM = "input_blocks.1.0.in_layers.0"


def kohya(module):
    return "lora_unet_" + ldm_to_diffusers(ARCH)[f"{module}.weight"].removesuffix(
        ".weight"
    ).replace(".", "_")


def write(path, tensors):
    save_file({name: t.contiguous() for name, t in tensors.items()}, path)
    return path


def match(path, arch=ARCH):
    return read_lora(path).match(arch)


def merged(path, strength=1.0, weights=None):
    return MergedWeights(weights or random_weights(ARCH), [(match(path), strength)])


@pytest.fixture(scope="module")
def lycoris():
    logging.getLogger("LyCORIS").setLevel(logging.ERROR)
    return pytest.importorskip("lycoris.modules")


ORACLES = [
    ("locon", "LoConModule", {}),
    ("locon", "LoConModule", {"use_tucker": True}),
    ("locon", "LoConModule", {"weight_decompose": True}),
    ("locon", "LoConModule", {"weight_decompose": True, "wd_on_out": False}),
    ("locon", "LoConModule", {"weight_decompose": True, "use_tucker": True}),
    ("loha", "LohaModule", {}),
    ("loha", "LohaModule", {"use_tucker": True}),
    ("loha", "LohaModule", {"weight_decompose": True}),
    ("lokr", "LokrModule", {"factor": 4}),
    ("lokr", "LokrModule", {"factor": 4, "full_matrix": True}),
    ("lokr", "LokrModule", {"factor": 4, "decompose_both": True}),
    ("lokr", "LokrModule", {"factor": 4, "use_tucker": True}),
    ("lokr", "LokrModule", {"factor": 4, "weight_decompose": True}),
    ("full", "FullModule", {}),
]


@pytest.mark.parametrize("target", [LINEAR, CONV, POINTWISE])
@pytest.mark.parametrize(("module", "name", "options"), ORACLES)
def test_every_family_equals_lycoris(tmp_path, lycoris, target, module, name, options):
    """The same file in LyCORIS's own module: what its layer computes, up to fp32 rounding.

    Its forward is the oracle, as users train through it; its own merging is not (LyCORIS 4.1
    scales LoHa and LoKr twice there).
    """
    kind = getattr(__import__(f"lycoris.modules.{module}", fromlist=[name]), name)
    weights = random_weights(ARCH)
    layer = layer_of(weights, target)
    torch.manual_seed(0)
    theirs = kind("x", layer, 1.0, 2, 1.0, **options)
    state = {n: t.detach().clone() for n, t in theirs.state_dict().items()}
    for key, tensor in state.items():
        if key == "dora_scale":
            tensor *= 1.5
        elif key != "alpha":
            tensor.normal_(std=0.3)
    theirs.load_state_dict(state)
    path = write(tmp_path / "l.safetensors", {f"{kohya(target)}.{n}": t for n, t in state.items()})
    x = torch.randn(2, layer.weight.shape[1], *[5] * (layer.weight.ndim - 2))
    actual = merged(path, weights=weights)
    with torch.no_grad():
        before = layer(x)
        theirs.apply_to()
        expected = layer(x)
        ours = layer_of(actual, target)(x)
    assert relative_l2(expected, before) > 0.02
    assert relative_l2(ours, expected) < 1e-5


def layer_of(weights, target):
    weight, bias = weights[f"{target}.weight"], weights.get(f"{target}.bias")
    if weight.ndim == 2:
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    else:
        size = weight.shape[2]
        layer = torch.nn.Conv2d(
            weight.shape[1], weight.shape[0], size, padding=size // 2, bias=bias is not None
        )
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)
    return layer


def test_norms_and_biases(tmp_path):
    weights = random_weights(ARCH)
    shape = weights[f"{NORM}.weight"].shape
    tensors = {
        f"{kohya(NORM)}.w_norm": torch.randn(shape),
        f"{kohya(NORM)}.b_norm": torch.randn(shape),
        f"{kohya(CONV)}.diff_b": torch.randn(weights[f"{CONV}.bias"].shape),
    }
    result = merged(write(tmp_path / "n.safetensors", tensors), 0.5, weights)
    assert result.touched == {f"{NORM}.weight", f"{NORM}.bias", f"{CONV}.bias"}
    for name, key in ((f"{NORM}.weight", "w_norm"), (f"{NORM}.bias", "b_norm")):
        torch.testing.assert_close(
            result[name], weights[name] + 0.5 * tensors[f"{kohya(NORM)}.{key}"]
        )


@pytest.mark.parametrize("on_input", [True, False])
def test_ia3(tmp_path, on_input):
    weights = random_weights(ARCH)
    weight = weights[f"{LINEAR}.weight"]
    factor = torch.randn(weight.shape[1 if on_input else 0])
    tensors = {
        f"{kohya(LINEAR)}.weight": factor,
        f"{kohya(LINEAR)}.on_input": torch.tensor(on_input),
    }
    actual = merged(write(tmp_path / "i.safetensors", tensors), 0.7, weights)[f"{LINEAR}.weight"]
    expected = weight + 0.7 * weight * (factor if on_input else factor[:, None])
    torch.testing.assert_close(actual, expected)


SPELLINGS = [
    ("lora_unet_{kohya}.lora_up.weight", "lora_unet_{kohya}.lora_down.weight"),
    ("lora_unet_{ldm_}.lora_up.weight", "lora_unet_{ldm_}.lora_down.weight"),
    ("lycoris_{kohya}.lora_up.weight", "lycoris_{kohya}.lora_down.weight"),
    ("unet.{theirs}.lora_B.weight", "unet.{theirs}.lora_A.weight"),
    ("unet.{theirs}.lora.up.weight", "unet.{theirs}.lora.down.weight"),
    ("unet.{theirs}.lora_linear_layer.up.weight", "unet.{theirs}.lora_linear_layer.down.weight"),
    ("base_model.model.{theirs}.lora_B.weight", "base_model.model.{theirs}.lora_A.weight"),
    (
        "base_model.model.{theirs}.lora_B.default.weight",
        "base_model.model.{theirs}.lora_A.default.weight",
    ),
    ("{theirs}.lora_B.weight", "{theirs}.lora_A.weight"),
    ("diffusion_model.{ldm}.lora_up.weight", "diffusion_model.{ldm}.lora_down.weight"),
    ("model.diffusion_model.{ldm}.lora_B.weight", "model.diffusion_model.{ldm}.lora_A.weight"),
    ("unet.{processor}_lora.up.weight", "unet.{processor}_lora.down.weight"),
    ("{processor}_lora.up.weight", "{processor}_lora.down.weight"),
]


@pytest.mark.parametrize(("up", "down"), SPELLINGS)
@pytest.mark.parametrize("module", [LINEAR, LINEAR.replace("to_q", "to_out.0")])
def test_every_trainers_spelling(tmp_path, up, down, module):
    weights = random_weights(ARCH)
    theirs = ldm_to_diffusers(ARCH)[f"{module}.weight"].removesuffix(".weight")
    attention, _, projection = theirs.removesuffix(".0").rpartition(".")
    words = {
        "kohya": theirs.replace(".", "_"),
        "theirs": theirs,
        "ldm": module,
        "ldm_": module.replace(".", "_"),
        "processor": f"{attention}.processor.{projection}",
    }
    out, inputs = weights[f"{module}.weight"].shape
    parts = {up.format(**words): torch.randn(out, 3), down.format(**words): torch.randn(3, inputs)}
    result = match(write(tmp_path / "l.safetensors", parts))
    assert set(result.adapters) == {module}
    assert result.report.applied == 1
    assert not result.report.unknown
    a, b = parts.values()
    actual = MergedWeights(weights, [(result, 1.0)])[f"{module}.weight"]
    torch.testing.assert_close(actual, weights[f"{module}.weight"] + a @ b)


@pytest.mark.parametrize("name", ["sd15", "sd21", "sdxl"])
@pytest.mark.parametrize("naming", NAMINGS)
def test_every_module_of_the_real_models_resolves(name, naming):
    """Names written for the full-size models resolve to exactly the modules they stand for."""
    arch = FULL[name]
    theirs = ldm_to_diffusers(arch)
    for module in targets(arch, "locon"):
        spelled = {
            "kohya": "lora_unet_" + theirs[f"{module}.weight"][:-7].replace(".", "_"),
            "kohya-ldm": "lora_unet_" + module.replace(".", "_"),
            "diffusers": "unet." + theirs[f"{module}.weight"][:-7],
            "peft": "base_model.model." + theirs[f"{module}.weight"][:-7],
        }[naming]
        assert resolve(spelled, arch) == module


def test_published_names_of_files_in_the_wild():
    """Spot checks against key lists of released files, not against our own table."""
    cases = {
        "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q": (
            FULL["sd15"],
            "input_blocks.1.1.transformer_blocks.0.attn1.to_q",
        ),
        "lora_unet_mid_block_attentions_0_proj_in": (FULL["sd15"], "middle_block.1.proj_in"),
        "lora_unet_up_blocks_3_attentions_2_transformer_blocks_0_ff_net_0_proj": (
            FULL["sd15"],
            "output_blocks.11.1.transformer_blocks.0.ff.net.0.proj",
        ),
        "lora_unet_input_blocks_7_1_transformer_blocks_9_attn2_to_v": (
            FULL["sdxl"],
            "input_blocks.7.1.transformer_blocks.9.attn2.to_v",
        ),
        "lora_unet_output_blocks_2_1_proj_out": (FULL["sdxl"], "output_blocks.2.1.proj_out"),
        "unet.down_blocks.1.resnets.0.conv_shortcut": (
            FULL["sdxl"],
            "input_blocks.4.0.skip_connection",
        ),
        "lora_unet_label_emb_0_0": (FULL["sdxl"], "label_emb.0.0"),
    }
    for name, (arch, expected) in cases.items():
        assert resolve(name, arch) == expected, name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("names", NAMINGS)
def test_synthetic_files_apply_fully_and_strongly(tmp_path, kind, names):
    """Each family in each naming moves every weight that it targets."""
    weights = random_weights(ARCH)
    out = make_lora(
        tmp_path / "l.safetensors", architecture=ARCH, kind=kind, names=names, rank=4, seed=1
    )
    result = match(out)
    assert set(result.adapters) == set(targets(ARCH, kind))
    assert not result.report.unknown
    changed = MergedWeights(weights, [(result, 1.0)])
    for module in targets(ARCH, kind):
        before, after = weights[f"{module}.weight"], changed[f"{module}.weight"]
        assert float((after - before).norm() / before.norm()) > 0.05, module


def loras(tmp_path, count=3):
    paths = []
    for i, kind in zip(range(count), itertools.cycle(("lora", "loha", "dora")), strict=False):
        path = tmp_path / f"{i}.safetensors"
        paths.append(make_lora(path, architecture=ARCH, kind=kind, seed=i))
    return [match(path) for path in paths]


def test_the_order_does_not_matter_up_to_rounding(tmp_path):
    weights = random_weights(ARCH)
    pairs = list(zip(loras(tmp_path), (0.8, -0.4, 1.2), strict=True))
    results = [MergedWeights(weights, order) for order in itertools.permutations(pairs)]
    for name in results[0].touched:
        for other in results[1:]:
            torch.testing.assert_close(other[name], results[0][name], rtol=1e-5, atol=1e-6)


def test_a_b_a_none_returns_to_the_base_bit_for_bit(tmp_path):
    weights = {n: t.half() for n, t in random_weights(ARCH).items()}
    pristine = {n: t.clone() for n, t in weights.items()}
    a, b, _ = loras(tmp_path)
    first = dict(MergedWeights(weights, [(a, 1.0)]))
    second = dict(MergedWeights(weights, [(b, 1.0)]))
    again = dict(MergedWeights(weights, [(a, 1.0)]))
    none = dict(MergedWeights(weights, []))
    zero = dict(MergedWeights(weights, [(a, 0.0)]))
    assert not torch.equal(first[f"{LINEAR}.weight"], second[f"{LINEAR}.weight"])
    for name, tensor in pristine.items():
        assert torch.equal(first[name], again[name])
        assert torch.equal(none[name], tensor)
        assert torch.equal(zero[name], tensor)
        assert torch.equal(weights[name], tensor)


def test_merged_in_fp32_and_rounded_once(tmp_path):
    """Many small changes to an fp16 weight do not vanish one by one."""
    weights = {n: torch.ones_like(t).half() for n, t in random_weights(ARCH).items()}
    step = 2.0**-13  # an eighth of fp16's spacing at 1: each alone rounds away
    path = write(
        tmp_path / "d.safetensors",
        {f"{kohya(LINEAR)}.diff": torch.full(weights[f"{LINEAR}.weight"].shape, step)},
    )
    result = MergedWeights(weights, [(match(path), 1.0)] * 16)
    assert result[f"{LINEAR}.weight"].dtype == torch.float16
    expected = torch.full_like(weights[f"{LINEAR}.weight"], 1 + 16 * step)
    assert torch.equal(result[f"{LINEAR}.weight"], expected)


def test_inpainting_takes_a_lora_of_the_base_model(tmp_path):
    """The extra input channels of the first convolution get zeros."""
    nine = replace(ARCH, in_channels=9)
    out = ARCH.parameters()["input_blocks.0.0.weight"][0]
    diff = torch.randn(out, 4, 3, 3)
    path = write(tmp_path / "l.safetensors", {"lora_unet_conv_in.diff": diff})
    weights = random_weights(nine)
    actual = MergedWeights(weights, [(match(path, nine), 1.0)])["input_blocks.0.0.weight"]
    torch.testing.assert_close(actual[:, :4], weights["input_blocks.0.0.weight"][:, :4] + diff)
    assert torch.equal(actual[:, 4:], weights["input_blocks.0.0.weight"][:, 4:])


def test_the_report_counts_what_is_applied_left_and_unknown(tmp_path):
    out, inputs = ARCH.parameters()[f"{LINEAR}.weight"]
    tensors = {
        f"{kohya(LINEAR)}.lora_up.weight": torch.zeros(out, 2),
        f"{kohya(LINEAR)}.lora_down.weight": torch.zeros(2, inputs),
        "lora_te_text_model_encoder_layers_0_mlp_fc1.lora_up.weight": torch.zeros(4, 2),
        "lora_te_text_model_encoder_layers_0_mlp_fc1.lora_down.weight": torch.zeros(2, 4),
        "lora_unet_no_such_module.lora_up.weight": torch.zeros(4, 2),
        "lora_unet_no_such_module.lora_down.weight": torch.zeros(2, 4),
        "something.else": torch.zeros(1),
    }
    report = match(write(tmp_path / "mixed.safetensors", tensors)).report
    assert (report.applied, report.text_encoder, len(report.unknown)) == (1, 1, 3)
    for word in ("mixed.safetensors", "1 UNet module", "text-encoder", "3 unknown"):
        assert word in report.sentence
    assert json.loads(json.dumps(report.to_json()))["applied"] == 1


@pytest.mark.parametrize(
    "name",
    [
        "lora_te_text_model_encoder_layers_0_self_attn_q_proj",
        "lora_te1_text_model_encoder_layers_0_mlp_fc1",
        "lora_te2_text_model_encoder_layers_3_mlp_fc2",
        "text_encoder.text_model.encoder.layers.0.self_attn.q_proj",
        "text_encoder_2.text_model.encoder.layers.0.mlp.fc1",
    ],
)
def test_text_encoder_modules_are_known_as_such(name):
    assert is_text_encoder(name)


@pytest.mark.parametrize(
    ("lora_base", "model"), [("sdxl", "sd15"), ("sd15", "sdxl"), ("sd21", "sd15"), ("sd15", "sd21")]
)
def test_a_lora_of_another_base_is_refused_in_one_sentence(tmp_path, lora_base, model):
    path = make_lora(tmp_path / "style.safetensors", architecture=FULL[lora_base], rank=1)
    with pytest.raises(WrongBaseError, match=r"style\.safetensors") as caught:
        match(path, FULL[model])
    assert caught.value.message.count(".") <= 4
    assert {"sd15": "SD1", "sdxl": "SDXL", "sd21": "SD2"}[lora_base] in caught.value.message
    assert {"sd15": "SD1", "sdxl": "SDXL", "sd21": "SD2"}[model] in caught.value.message


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("lora_unet_double_blocks_0_img_attn_qkv", "Flux"),
        ("transformer.single_transformer_blocks.0.attn.to_q", "Flux"),
        ("lora_unet_joint_blocks_0_x_block_attn_qkv", "SD3"),
    ],
)
def test_a_lora_of_another_network_is_named(tmp_path, name, base):
    tensors = {
        f"{name}.lora_up.weight": torch.zeros(4, 2),
        f"{name}.lora_down.weight": torch.zeros(2, 4),
    }
    with pytest.raises(WrongBaseError, match=base):
        match(write(tmp_path / "f.safetensors", tensors))


def test_files_that_are_no_lora(tmp_path):
    checkpoint = tmp_path / "model.safetensors"
    make_checkpoint(checkpoint, family="sd15", size="tiny", seed=0)
    with pytest.raises(BadFileError, match=r"model\.safetensors"):
        read_lora(checkpoint)
    for data in (b"", b"<html>login</html>", b"\xff" * 64):
        bad = tmp_path / "bad.safetensors"
        bad.write_bytes(data)
        with pytest.raises(BadFileError, match=r"bad\.safetensors"):
            read_lora(bad)
    with pytest.raises(BadFileError, match="missing"):
        read_lora(tmp_path / "missing.safetensors")


def test_parts_that_do_not_fit_name_the_module(tmp_path):
    out, inputs = ARCH.parameters()[f"{LINEAR}.weight"]
    tensors = {
        f"{kohya(LINEAR)}.lora_up.weight": torch.zeros(out + 8, 2),
        f"{kohya(LINEAR)}.lora_down.weight": torch.zeros(2, inputs),
    }
    path = write(tmp_path / "l.safetensors", tensors)
    with pytest.raises(LoraError, match="attn1"):
        _ = merged(path)[f"{LINEAR}.weight"]


def test_a_bias_where_the_model_has_none_is_refused(tmp_path):
    """Hosts would add one; an engine has no input for it."""
    assert f"{LINEAR}.bias" not in ARCH.parameters()
    out, _ = ARCH.parameters()[f"{LINEAR}.weight"]
    path = write(tmp_path / "l.safetensors", {f"{kohya(LINEAR)}.diff_b": torch.zeros(out)})
    with pytest.raises(LoraError, match="bias"):
        match(path)


def test_a_module_named_twice_is_refused(tmp_path):
    out, inputs = ARCH.parameters()[f"{LINEAR}.weight"]
    tensors = {}
    for prefix in (kohya(LINEAR), "lora_unet_" + LINEAR.replace(".", "_")):
        tensors[f"{prefix}.lora_up.weight"] = torch.zeros(out, 2)
        tensors[f"{prefix}.lora_down.weight"] = torch.zeros(2, inputs)
    with pytest.raises(LoraError, match="twice"):
        match(write(tmp_path / "l.safetensors", tensors))


@pytest.mark.parametrize("strength", [float("nan"), float("inf"), float("-inf")])
def test_strengths_must_be_finite(tmp_path, strength):
    with pytest.raises(SettingError, match="strength"):
        MergedWeights(random_weights(ARCH), [(loras(tmp_path, 1)[0], strength)])


def test_settings_of_synthetic_files(tmp_path):
    for fields in ({"kind": "oft"}, {"names": "mine"}, {"rank": 0}, {"rank": 1000}):
        with pytest.raises(SettingError):
            make_lora(tmp_path / "l.safetensors", architecture=TINY["sd15"], **fields)
    assert not list(tmp_path.iterdir())
