"""Prompts, sampling and pictures against the published code and closed forms."""

from __future__ import annotations

import importlib.util
import math
import sys
import types
from pathlib import Path

import pytest
import torch
from PIL import Image

from extension import text_encoder
from extension.architecture import TINY
from extension.errors import CancelledError, OutputError, SettingError, UnsupportedModelError
from extension.model import LoraChoice, Model
from extension.picture import psnr, save_png, side_by_side, tile, to_image
from extension.progress import CancelToken
from extension.sampler import Conditioning, SampleSettings, Schedule, sample
from extension.synthetic import make_checkpoint
from extension.vae import PREFIX, VaeDecoder
from tests.support_models import relative_l2

CPU = torch.device("cpu")
PROMPTS = [
    "",
    "a photo of a cat",
    "  Mixed CASE,   and\nspaces!!  ",
    "it's they'll 1234 ü ñ 日本語 🎨 <lora:x:1> (word:1.2)",
    "masterpiece, " * 60,
    "\x00\x07 control",
]


def openai_tokenizer():
    """OpenAI's own code; ``ftfy``, which mends broken encodings, is left out as in most hosts."""
    folder = Path(importlib.util.find_spec("clip").submodule_search_locations[0])
    spec = importlib.util.spec_from_file_location("clip_bpe", folder / "simple_tokenizer.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault("ftfy", types.SimpleNamespace(fix_text=lambda text: text))
    spec.loader.exec_module(module)
    return module.SimpleTokenizer()


@pytest.mark.parametrize("prompt", PROMPTS)
def test_tokens_equal_openai_clips(prompt):
    expected = openai_tokenizer().encode(prompt)
    rows = text_encoder._chunks(prompt, None)
    assert all(len(row) == 77 for row in rows)
    start, end = text_encoder.start_token(), text_encoder.end_token()
    assert (start, end) == (49406, 49407)
    inner = [t for row in rows for t in row[1:] if t != end]
    assert all(row[0] == start for row in rows)
    assert inner == expected


@pytest.fixture(scope="module", params=["sd15", "sd21", "sdxl"])
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "m.safetensors"
    make_checkpoint(path, family=request.param, size="tiny", seed=1)
    with Model(path) as opened:
        yield request.param, opened


def test_prompts_become_context_of_the_right_shape(model):
    family, opened = model
    arch = TINY[family]
    settings = SampleSettings(width=64, height=64)
    long = opened.conditioning("cat, " * 60, "", settings)
    assert long.positive.shape == (1, 154, arch.context_dim)
    assert long.negative.shape == (1, 77, arch.context_dim)
    if arch.adm_channels:
        assert long.y_positive.shape == (1, arch.adm_channels)
    cat, dog = (opened.conditioning(word, "", settings).positive for word in ("cat", "dog"))
    assert relative_l2(cat, dog) > 0.01


def test_the_vae_equals_ldms_decoder(model):
    """The original autoencoder's own code, on the same weights."""
    model_module = pytest.importorskip("ldm.modules.diffusionmodules.model")
    _, opened = model
    raw = opened.raw
    decoder = {
        n.removeprefix(f"{PREFIX}decoder."): raw[n].float()
        for n in raw
        if n.startswith(f"{PREFIX}decoder.")
    }
    widths = [decoder[f"up.{i}.block.0.conv2.weight"].shape[0] for i in range(4)]
    blocks = 1 + max(int(n.split(".")[3]) for n in decoder if n.startswith("up.0.block."))
    original = model_module.Decoder(
        ch=widths[0],
        out_ch=3,
        ch_mult=[w // widths[0] for w in widths],
        num_res_blocks=blocks - 1,
        attn_resolutions=[],
        in_channels=3,
        resolution=256,
        z_channels=4,
    )
    original.load_state_dict(decoder)
    latents = torch.randn(1, 4, 9, 13)
    scale = 0.13025 if opened.architecture.family == "sdxl" else 0.18215
    quant = (raw[f"{PREFIX}post_quant_conv.{p}"].float() for p in ("weight", "bias"))
    with torch.no_grad():
        z = torch.nn.functional.conv2d(latents / scale, *quant)
        expected = (original(z) / 2 + 0.5).clamp(0, 1)
    actual = opened.decode(latents)
    assert actual.shape == (1, 3, 72, 104)
    assert float(actual.std()) > 0.05
    assert relative_l2(actual, expected) < 1e-5


def test_a_file_without_a_vae_is_said():
    with pytest.raises(UnsupportedModelError, match="VAE"):
        VaeDecoder({}, "sd15")


# Sampling: for Gaussian data of variance s^2 around m, the ideal denoiser is known, and with it
# the exact solution of the ODE: x(sigma) = m + (x0 - m) * sqrt(s^2 + sigma^2) / sqrt(s^2 + S^2).
MEAN, SPREAD = 0.7, 0.5


def ideal(prediction):
    schedule = Schedule()

    def unet(x, timesteps, context, y):
        sigma = torch.tensor([schedule.sigma(float(t)) for t in timesteps])[:, None, None, None]
        noisy = x * (sigma**2 + 1).sqrt()
        denoised = MEAN + (noisy - MEAN) * SPREAD**2 / (SPREAD**2 + sigma**2)
        if prediction == "eps":
            return (noisy - denoised) / sigma
        scale = (sigma**2 + 1).sqrt()
        return (noisy / scale**2 - denoised) * scale / sigma

    return unet


def run(settings, unet=None):
    context = torch.zeros(1, 77, 8)
    conditioning = Conditioning(
        positive=context, negative=context, y_positive=None, y_negative=None
    )
    unet = unet or ideal(settings.prediction)
    return sample(unet, conditioning, settings, device=CPU, dtype=torch.float32)


@pytest.mark.parametrize("prediction", ["eps", "v"])
@pytest.mark.parametrize("schedule", ["normal", "karras"])
@pytest.mark.parametrize("sampler", ["euler", "dpmpp_2m"])
def test_samplers_converge_to_the_exact_solution(sampler, schedule, prediction):
    """Twice the steps, half the error or less (the last step to zero is first-order in both)."""
    errors = []
    for steps in (40, 80):
        settings = SampleSettings(
            width=64,
            height=64,
            steps=steps,
            cfg=1.0,
            seed=3,
            sampler=sampler,
            schedule=schedule,
            prediction=prediction,
        )
        most = Schedule().sigma(999)
        start = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(3))
        start = start * math.sqrt(1 + most**2)
        exact = MEAN + (start - MEAN) * SPREAD / math.sqrt(SPREAD**2 + most**2)
        errors.append(relative_l2(run(settings), exact))
    assert errors[1] < 0.025
    assert errors[0] / errors[1] > 1.7


def test_the_schedule_is_stable_diffusions():
    """Published values: sigmas of the 1000 training steps run from 0.0292 to 14.6146."""
    schedule = Schedule()
    assert schedule.sigma(0) == pytest.approx(0.0291675, rel=1e-4)
    assert schedule.sigma(999) == pytest.approx(14.6146, rel=1e-4)
    for step in (0.0, 0.25, 333.3, 998.9):
        assert schedule.timestep(schedule.sigma(step)) == pytest.approx(step, abs=1e-3)


def test_guidance_and_batches():
    seen = []

    def unet(x, timesteps, context, y):
        seen.append((x.shape[0], context.shape, timesteps.dtype))
        return context.mean(dim=(1, 2))[:, None, None, None].expand_as(x)

    conditioning = Conditioning(
        positive=torch.ones(1, 154, 8),
        negative=torch.zeros(1, 77, 8),
        y_positive=None,
        y_negative=None,
    )
    settings = SampleSettings(width=64, height=64, batch=3, steps=2, cfg=5.0)
    out = sample(unet, conditioning, settings, device=CPU, dtype=torch.float32)
    assert out.shape == (3, 4, 8, 8)
    assert seen == [(6, (6, 154, 8), torch.float32)] * 2
    single = SampleSettings(width=64, height=64, steps=1, cfg=1.0)
    seen.clear()
    sample(unet, conditioning, single, device=CPU, dtype=torch.float32)
    assert seen[0][0] == 1


def test_seeds_and_cancel():
    settings = SampleSettings(width=64, height=64, steps=2, cfg=1.0, seed=5)
    other = SampleSettings(width=64, height=64, steps=2, cfg=1.0, seed=6)
    assert torch.equal(run(settings), run(settings))
    assert not torch.equal(run(settings), run(other))
    token = CancelToken()
    token.cancel()
    context = torch.zeros(1, 77, 8)
    with pytest.raises(CancelledError):
        sample(
            ideal("eps"),
            Conditioning(positive=context, negative=context, y_positive=None, y_negative=None),
            settings,
            device=CPU,
            dtype=torch.float32,
            cancel=token,
        )


@pytest.mark.parametrize(
    "fields",
    [
        {"width": 500},
        {"height": 0},
        {"batch": 0},
        {"steps": 0},
        {"cfg": float("nan")},
        {"cfg": 0.5},
        {"seed": -1},
        {"sampler": "magic"},
        {"schedule": "x"},
        {"prediction": "x0"},
    ],
)
def test_settings_that_cannot_be(fields):
    with pytest.raises(SettingError):
        SampleSettings(**fields)


def test_pictures_are_written_whole(tmp_path):
    picture = torch.rand(3, 24, 16)
    path = save_png(tmp_path / "a" / "p.png", to_image(picture), {"seed": "4"})
    with Image.open(path) as image:
        assert image.size == (16, 24)
        assert image.text["seed"] == "4"
    sheet = side_by_side([picture, picture], ["torch", "engine"])
    assert sheet.size[0] > 32
    assert tile(torch.rand(2, 3, 8, 8)).shape == (3, 8, 16)
    (tmp_path / "file").write_text("keep")
    with pytest.raises(OutputError):
        save_png(tmp_path / "file" / "p.png", to_image(picture))


def test_psnr():
    a = torch.zeros(3, 4, 4)
    assert psnr(a, a) == math.inf
    assert psnr(a, a + 0.1) == pytest.approx(20.0, abs=1e-4)


@pytest.mark.parametrize(
    ("text", "path", "strength"),
    [("a.safetensors", "a.safetensors", 1.0), ("a.safetensors:0.5", "a.safetensors", 0.5)],
)
def test_lora_choices(text, path, strength):
    choice = LoraChoice.parse(text)
    assert (str(choice.path), choice.strength) == (path, strength)


def test_a_lora_choice_that_is_none():
    with pytest.raises(SettingError, match=r"0\.8"):
        LoraChoice.parse("a.safetensors:strong")
