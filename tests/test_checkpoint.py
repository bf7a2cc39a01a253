"""Checkpoints of every layout and dtype; everything else is refused in words."""

from __future__ import annotations

import pickle

import pytest
import torch
from safetensors.torch import save_file

from extension.architecture import TINY
from extension.checkpoint import fingerprint, open_checkpoint, require_finite
from extension.diffusers_names import ldm_names, ldm_to_diffusers
from extension.errors import BadFileError, UnsupportedModelError
from extension.fingerprint import FingerprintCache, Fingerprinter
from extension.lora import read_lora
from extension.synthetic import FAMILIES, make_checkpoint, random_unet
from tests.support_models import SMALL

ARCH = SMALL["two-levels"]
WEIGHTS = random_unet(ARCH, seed=3)
PREFIXES = ["", "model.diffusion_model.", "diffusion_model.", "unet.", "model."]


def write(path, weights, prefix="model.diffusion_model.", extra=None):
    tensors = {prefix + name: t.contiguous() for name, t in weights.items()}
    save_file({**tensors, **(extra or {})}, path)
    return path


def same(checkpoint, weights, exact=True):
    assert set(checkpoint) == set(weights)
    for name, tensor in weights.items():
        found = checkpoint[name].float()
        assert (
            torch.equal(found, tensor.float()) if exact else torch.allclose(found, tensor.float())
        )


@pytest.mark.parametrize("prefix", PREFIXES)
def test_every_prefix(tmp_path, prefix):
    extra = {"first_stage_model.decoder.conv_in.weight": torch.zeros(2)}
    with open_checkpoint(write(tmp_path / "m.safetensors", WEIGHTS, prefix, extra)) as checkpoint:
        assert checkpoint.architecture == ARCH
        same(checkpoint, WEIGHTS)


@pytest.mark.parametrize("suffix", ["ckpt", "pt", "pth", "bin"])
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("zipped", [True, False])
def test_pickles_without_code(tmp_path, suffix, nested, zipped):
    path = tmp_path / f"m.{suffix}"
    state = {f"model.diffusion_model.{n}": t for n, t in WEIGHTS.items()}
    obj = {"state_dict": state, "epoch": 3} if nested else state
    torch.save(obj, path, _use_new_zipfile_serialization=zipped)
    with open_checkpoint(path) as checkpoint:
        same(checkpoint, WEIGHTS)


def test_pickles_are_opened_as_torch_2_1_opens_them(tmp_path, monkeypatch):
    """It maps a file only where it is given a name."""

    def old(file, *, mmap=False, **settings):
        if mmap and not isinstance(file, str):
            raise ValueError("f must be a string filename in order to use mmap argument")
        return load(file, mmap=mmap, **settings)

    load = torch.load
    monkeypatch.setattr(torch, "load", old)
    path = tmp_path / "m.ckpt"
    torch.save({f"model.diffusion_model.{n}": t for n, t in WEIGHTS.items()}, path)
    with open_checkpoint(path) as checkpoint:
        same(checkpoint, WEIGHTS)


class Payload:
    def __reduce__(self):
        return (open, ("/tmp/engine-room-was-here", "w"))


@pytest.mark.parametrize("opener", [open_checkpoint, read_lora])
def test_pickles_with_code_are_refused_and_not_run(tmp_path, opener):
    path = tmp_path / "m.ckpt"
    marker = tmp_path / "ran"
    Payload.__reduce__ = lambda self: (open, (str(marker), "w"))
    torch.save({"state_dict": {"a": torch.zeros(1)}, "callback": Payload()}, path)
    with pytest.raises(BadFileError, match="Python code") as caught:
        opener(path)
    assert "safetensors" in caught.value.hint
    assert not marker.exists()
    path.write_bytes(pickle.dumps(Payload()))
    with pytest.raises(BadFileError):
        opener(path)
    assert not marker.exists()


@pytest.mark.parametrize(
    "data", [b"", b"<html>404</html>", b"PK\x03\x04 not a zip", b"\x80\x02garbage", b"hello"]
)
@pytest.mark.parametrize("suffix", ["ckpt", "safetensors"])
def test_files_that_are_none(tmp_path, data, suffix):
    path = tmp_path / f"m.{suffix}"
    path.write_bytes(data)
    with pytest.raises(BadFileError, match=r"m\."):
        open_checkpoint(path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_are_kept(tmp_path, dtype):
    weights = {n: t.to(dtype) for n, t in WEIGHTS.items()}
    with open_checkpoint(write(tmp_path / "m.safetensors", weights)) as checkpoint:
        assert checkpoint.dtype == dtype
        assert {t.dtype for t in checkpoint.values()} == {dtype}
        same(checkpoint, weights)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_is_read_exactly(tmp_path, dtype):
    weights = {n: t.to(dtype) for n, t in WEIGHTS.items()}
    with open_checkpoint(write(tmp_path / "m.safetensors", weights)) as checkpoint:
        assert checkpoint.dtype == dtype
        same(checkpoint, weights)


@pytest.mark.parametrize("scale_name", ["scale_weight", "weight_scale"])
def test_scaled_fp8_is_dequantised(tmp_path, scale_name):
    weights, extra = (
        {},
        {"model.diffusion_model.scaled_fp8": torch.zeros(2).to(torch.float8_e4m3fn)},
    )
    expected = {}
    for i, (name, tensor) in enumerate(WEIGHTS.items()):
        scaled = name.endswith("weight") and tensor.ndim > 1
        scale = torch.tensor(0.25 + 0.01 * i if scaled else 1.0)
        quantised = (tensor / scale).to(torch.float8_e4m3fn)
        weights[name] = quantised if scaled else tensor.half()
        expected[name] = quantised.float() * scale if scaled else tensor.half().float()
        if scaled:
            layer = f"model.diffusion_model.{name.removesuffix('.weight')}"
            extra[f"{layer}.{scale_name}"] = scale
            extra[f"{layer}.scale_input"] = scale.clone()
    with open_checkpoint(write(tmp_path / "m.safetensors", weights, extra=extra)) as checkpoint:
        assert checkpoint.architecture == ARCH
        same(checkpoint, expected)


def test_averaged_twins_are_used_only_when_asked(tmp_path):
    twins = {f"model_ema.diffusion_model{n.replace('.', '')}": t * 2 for n, t in WEIGHTS.items()}
    path = write(tmp_path / "m.safetensors", WEIGHTS, extra=twins)
    with open_checkpoint(path) as checkpoint:
        same(checkpoint, WEIGHTS)
    with open_checkpoint(path, ema=True) as checkpoint:
        same(checkpoint, {n: t * 2 for n, t in WEIGHTS.items()})


@pytest.mark.parametrize("name", SMALL)
def test_diffusers_names_are_converted(tmp_path, name):
    arch = SMALL[name]
    names = ldm_to_diffusers(arch)
    assert len(set(names.values())) == len(names)
    shapes = {names[n]: s for n, s in arch.parameters().items()}
    assert ldm_names(shapes) == {theirs: ldm for ldm, theirs in names.items()}
    weights = random_unet(arch)
    path = write(tmp_path / "m.safetensors", {names[n]: t for n, t in weights.items()}, "")
    with open_checkpoint(path) as checkpoint:
        # Head counts are not in the shapes, so SD2-like models keep their defaults.
        assert checkpoint.architecture.parameters() == arch.parameters()
        same(checkpoint, weights)


def test_published_diffusers_names():
    """Spot checks against the released SD1.5 and SDXL UNets."""
    from extension.architecture import SD15, SDXL

    sd15, sdxl = ldm_to_diffusers(SD15), ldm_to_diffusers(SDXL)
    assert sd15["input_blocks.4.0.skip_connection.weight"] == (
        "down_blocks.1.resnets.0.conv_shortcut.weight"
    )
    assert sd15["output_blocks.5.2.conv.bias"] == "up_blocks.1.upsamplers.0.conv.bias"
    assert sd15["output_blocks.2.1.conv.bias"] == "up_blocks.0.upsamplers.0.conv.bias"
    assert sd15["time_embed.2.weight"] == "time_embedding.linear_2.weight"
    assert sdxl["label_emb.0.0.weight"] == "add_embedding.linear_1.weight"
    assert sdxl["middle_block.1.transformer_blocks.9.ff.net.0.proj.weight"] == (
        "mid_block.attentions.0.transformer_blocks.9.ff.net.0.proj.weight"
    )
    assert sdxl["output_blocks.3.1.proj_in.weight"] == "up_blocks.1.attentions.0.proj_in.weight"


def test_other_models_are_named(tmp_path):
    for names, kind in (
        (["double_blocks.0.img_attn.qkv.weight"], "Flux"),
        (["encoder.conv_in.weight", "decoder.conv_in.weight"], "VAE"),
        (["lora_unet_down_blocks_0_x.lora_down.weight"], "LoRA"),
    ):
        path = tmp_path / "other.safetensors"
        save_file({name: torch.zeros(2, 2) for name in names}, path)
        with pytest.raises(UnsupportedModelError, match=kind) as caught:
            open_checkpoint(path)
        assert "other.safetensors" in caught.value.message


def test_markers_are_ignored_and_extra_weights_are_not(tmp_path):
    extra = {"v_pred": torch.zeros(0), "ztsnr": torch.zeros(0)}
    with open_checkpoint(write(tmp_path / "m.safetensors", WEIGHTS, extra=extra)) as checkpoint:
        assert checkpoint.prediction_type() == "v"
    extra = {"model.diffusion_model.time_embed.cond_proj.weight": torch.zeros(4, 4)}
    path = write(tmp_path / "m.safetensors", WEIGHTS, extra=extra)
    with pytest.raises(UnsupportedModelError, match="cond_proj"):
        open_checkpoint(path)


def test_missing_weights_are_named(tmp_path):
    fewer = {n: t for n, t in WEIGHTS.items() if not n.startswith("output_blocks.1.0.emb")}
    path = write(tmp_path / "m.safetensors", fewer)
    with pytest.raises(UnsupportedModelError, match=r"output_blocks.1.0.emb_layers.1.weight"):
        open_checkpoint(path)


def test_not_finite_weights_are_named():
    for value in (float("nan"), float("inf"), float("-inf")):
        tensor = torch.zeros(4, 4)
        tensor[2, 1] = value
        with pytest.raises(BadFileError, match=r"'a\.weight'"):
            require_finite("a.weight", tensor)


def test_the_fingerprint_is_of_contents_not_of_files(tmp_path):
    first = open_checkpoint(write(tmp_path / "a.safetensors", WEIGHTS)).fingerprint()
    other_layout = write(tmp_path / "b.safetensors", WEIGHTS, "", {"vae.x": torch.ones(3)})
    assert open_checkpoint(other_layout).fingerprint() == first == fingerprint(WEIGHTS)
    changed = {**WEIGHTS, "out.2.bias": WEIGHTS["out.2.bias"] + 1e-3}
    assert fingerprint(changed) != first
    assert fingerprint({n: t.half() for n, t in WEIGHTS.items()}) != first


def test_fingerprints_do_not_depend_on_order():
    entries = [("a", "F16", (2,), b"1234"), ("b", "F16", (2,), b"5678")]
    digests = set()
    for order in (entries, entries[::-1]):
        digest = Fingerprinter()
        for entry in order:
            digest.add(*entry)
        digests.add(digest.hexdigest())
    swapped = Fingerprinter()
    swapped.add("a", "F16", (2,), b"5678")
    swapped.add("b", "F16", (2,), b"1234")
    assert len(digests) == 1
    assert swapped.hexdigest() not in digests


def test_the_fingerprint_cache_follows_the_file(tmp_path):
    path = write(tmp_path / "m.safetensors", WEIGHTS)
    cache = FingerprintCache(tmp_path / "cache.json")
    assert cache.get(path) is None
    known = open_checkpoint(path).fingerprint(cache)
    assert cache.get(path) == known
    write(path, {**WEIGHTS, "out.2.bias": WEIGHTS["out.2.bias"] + 1})
    assert cache.get(path) is None
    for damage in (b"", b"{", b"[]", b'{"format": 1}', b'{"format": 1, "files": {"x": 3}}'):
        cache.path.write_bytes(damage)
        assert cache.get(path) is None
        cache.put(path, known)
        assert cache.get(path) == known


@pytest.mark.parametrize("family", FAMILIES)
def test_synthetic_checkpoints(tmp_path, family):
    """The real layout, deterministic, small, and said to be synthetic."""
    paths = [tmp_path / f"{i}.safetensors" for i in range(3)]
    for path, seed in zip(paths, (5, 5, 6), strict=True):
        make_checkpoint(path, family=family, size="tiny", seed=seed)
    first, second, other = (path.read_bytes() for path in paths)
    assert first == second != other
    assert len(first) < 60e6
    with open_checkpoint(paths[0]) as checkpoint:
        assert checkpoint.architecture == TINY[family]
        assert "random weights" in checkpoint.source.metadata["engine_room.synthetic"]
        kinds = {name.split(".")[0] for name in checkpoint.source.shapes}
    text = "conditioner" if family == "sdxl" else "cond_stage_model"
    assert kinds == {"model", "first_stage_model", text}
