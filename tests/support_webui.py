"""Real servers of the A1111 family with this checkout, driven through their API."""

from __future__ import annotations

import base64
import io
import json
import math
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load, save_file

from extension.architecture import SDXL, TINY, Architecture
from extension.model_layout import TEXT, VAE, TextLayout, text_shapes, vae_shapes
from extension.picture import to_image
from extension.synthetic import random_tensor
from extension.synthetic_lora import make_lora
from tests.support_comfyui import INPAINTING, ROOT, SMALL_SD15, free_port, link_packages
from tests.support_examples import write_control_model
from tests.support_models import random_weights

FLAGS = {
    "a1111": ["--use-cpu", "all", "--no-half", "--precision", "full", "--do-not-download-clip"],
    "forge": ["--always-cpu", "--all-in-fp32"],
    "reforge": ["--always-cpu", "--all-in-fp32"],
    "classic": ["--always-cpu", "--all-in-fp32"],
}
COMMON = ["--skip-prepare-environment", "--skip-torch-cuda-test", "--skip-version-check",
          "--skip-python-version-check", "--disable-nan-check", "--no-download-sd-model",
          "--no-hashing", "--api"]  # fmt: skip
# Writes the latents of each job, and patches the UNet where probe.json asks for it.
PROBE = """
import json, os, torch
from modules import script_callbacks, scripts, shared

def add_restart(demo, app):
    # What the button "Reload UI" calls.
    app.add_api_route("/probe/restart", lambda: shared.state.request_restart(), methods=["POST"])

script_callbacks.on_app_started(add_restart)
BASE = {base!r}

class Probe(scripts.Script):
    def title(self): return "probe"
    def show(self, is_img2img): return scripts.AlwaysVisible
    def asked(self):
        path = os.path.join(BASE, "probe.json")
        return json.load(open(path)) if os.path.exists(path) else {{}}
    def process_before_every_sampling(self, p, *args, **kwargs):
        kind = self.asked().get("patch")
        if not kind:
            return
        if kind == "forward":
            return self.replace_forward(p.sd_model)
        unet = p.sd_model.forge_objects.unet.clone()
        if kind == "attn2":
            unet.set_model_attn2_output_patch(lambda out, extra: out * 0.5)
        elif kind == "output":
            unet.set_model_output_block_patch(lambda h, hsp, options: (h * 0.8, hsp))
        elif kind == "wrapper":
            unet.set_model_unet_function_wrapper(
                lambda apply, a: apply(a["input"], a["timestep"], **a["c"]) * 0.5)
        p.sd_model.forge_objects.unet = unet
    def replace_forward(self, model):
        # As extensions do that bring a ControlNet of their own.
        if hasattr(model, "forge_objects"):
            network = model.forge_objects.unet.model.diffusion_model
            original = network.forward
        else:
            from modules import sd_hijack
            network = model.model.diffusion_model
            original = lambda *a, **k: sd_hijack.ldm_original_forward(network, *a, **k)
        network.forward = lambda *a, **k: original(*a, **k) * 0.5
        self.network = network
    def postprocess(self, p, processed, *args):
        if getattr(self, "network", None) is not None:
            self.network.__dict__.pop("forward", None)
            self.network = None
    def post_sample(self, p, ps, *args):
        from safetensors.torch import save_file
        # After hires fix: decoded pictures, one by one.
        samples = torch.stack([sample.detach().float().cpu() for sample in ps.samples])
        save_file({{"samples": samples.contiguous()}},
                  os.path.join(BASE, "latents.safetensors"))
"""
YAML = """
model:
  target: ldm.models.diffusion.ddpm.LatentDiffusion
  params:
    linear_start: 0.00085
    linear_end: 0.0120
    num_timesteps_cond: 1
    log_every_t: 200
    timesteps: 1000
    first_stage_key: jpg
    cond_stage_key: txt
    image_size: 64
    channels: 4
    cond_stage_trainable: false
    conditioning_key: crossattn
    monitor: val/loss_simple_ema
    scale_factor: 0.18215
    use_ema: False
    unet_config:
      target: ldm.modules.diffusionmodules.openaimodel.UNetModel
      params: {image_size: 32, in_channels: 4, out_channels: 4, model_channels: 320,
               attention_resolutions: [2, 1], num_res_blocks: 1, channel_mult: [1, 2],
               num_heads: 8, use_spatial_transformer: True, transformer_depth: 1,
               context_dim: 768, use_checkpoint: False, legacy: False}
    first_stage_config:
      target: ldm.models.autoencoder.AutoencoderKL
      params:
        embed_dim: 4
        ddconfig: {double_z: true, z_channels: 4, resolution: 256, in_channels: 3, out_ch: 3,
                   ch: 128, ch_mult: [1, 2, 4, 4], num_res_blocks: 2, attn_resolutions: [],
                   dropout: 0.0}
        lossconfig: {target: torch.nn.Identity}
    cond_stage_config:
      target: ldm.modules.encoders.modules.FrozenCLIPEmbedder
"""
# The smallest text encoder that open_clip knows.
OPEN_CLIP = "ViT-S-32-alt"
OPEN_WIDTH, OPEN_LAYERS = 256, 10
SMALL_SD21 = replace(TINY["sd21"], context_dim=OPEN_WIDTH)
# Both text encoders side by side; the pooled prompt and six sizes.
SMALL_SDXL = replace(TINY["sdxl"], context_dim=768 + OPEN_WIDTH, adm_channels=OPEN_WIDTH + 6 * 256)
# What the Forge family knows as SDXL: all but the widths of the blocks is as in the real one.
NARROW_SDXL = replace(SDXL, channel_mult=(1, 1, 1))
SD21_YAML = (
    YAML.replace("  params:\n", '  params:\n    parameterization: "v"\n', 1)
    .replace("modules.FrozenCLIPEmbedder", "modules.FrozenOpenCLIPEmbedder")
    .replace("model_channels: 320", "model_channels: 64, num_head_channels: 64")
    .replace("num_heads: 8, ", "use_linear_in_transformer: True, ")
    .replace("attention_resolutions: [2, 1], num_res_blocks: 1, channel_mult: [1, 2]",
             "attention_resolutions: [4, 2, 1], num_res_blocks: 2, channel_mult: [1, 2, 2, 2]")
    .replace("context_dim: 768", f"context_dim: {OPEN_WIDTH}")
    + f"      params: {{freeze: True, layer: penultimate, arch: {OPEN_CLIP}}}\n"
)  # fmt: skip
SDXL_YAML = f"""
model:
  target: sgm.models.diffusion.DiffusionEngine
  params:
    scale_factor: 0.13025
    disable_first_stage_autocast: True
    denoiser_config:
      target: sgm.modules.diffusionmodules.denoiser.DiscreteDenoiser
      params:
        num_idx: 1000
        weighting_config:
          target: sgm.modules.diffusionmodules.denoiser_weighting.EpsWeighting
        scaling_config:
          target: sgm.modules.diffusionmodules.denoiser_scaling.EpsScaling
        discretization_config:
          target: sgm.modules.diffusionmodules.discretizer.LegacyDDPMDiscretization
    network_config:
      target: sgm.modules.diffusionmodules.openaimodel.UNetModel
      params: {{adm_in_channels: {SMALL_SDXL.adm_channels}, num_classes: sequential,
               use_checkpoint: False, in_channels: 4, out_channels: 4, model_channels: 64,
               attention_resolutions: [4, 2], num_res_blocks: 2, channel_mult: [1, 2, 2],
               num_head_channels: 64, use_spatial_transformer: True,
               use_linear_in_transformer: True, transformer_depth: [1, 1, 2],
               context_dim: {SMALL_SDXL.context_dim}, spatial_transformer_attn_type: softmax,
               legacy: False}}
    conditioner_config:
      target: sgm.modules.GeneralConditioner
      params:
        emb_models:
          - is_trainable: False
            input_key: txt
            target: sgm.modules.encoders.modules.FrozenCLIPEmbedder
            params: {{layer: hidden, layer_idx: 11}}
          - is_trainable: False
            input_key: txt
            target: sgm.modules.encoders.modules.FrozenOpenCLIPEmbedder2
            params: {{arch: {OPEN_CLIP}, freeze: True, layer: penultimate,
                     always_return_pooled: True, legacy: False}}
          - is_trainable: False
            input_key: original_size_as_tuple
            target: sgm.modules.encoders.modules.ConcatTimestepEmbedderND
            params: {{outdim: 256}}
          - is_trainable: False
            input_key: crop_coords_top_left
            target: sgm.modules.encoders.modules.ConcatTimestepEmbedderND
            params: {{outdim: 256}}
          - is_trainable: False
            input_key: target_size_as_tuple
            target: sgm.modules.encoders.modules.ConcatTimestepEmbedderND
            params: {{outdim: 256}}
    first_stage_config:
      target: sgm.models.autoencoder.AutoencoderKLInferenceWrapper
      params:
        embed_dim: 4
        monitor: val/rec_loss
        ddconfig: {{attn_type: vanilla, double_z: true, z_channels: 4, resolution: 256,
                   in_channels: 3, out_ch: 3, ch: 128, ch_mult: [1, 2, 4, 4],
                   num_res_blocks: 2, attn_resolutions: [], dropout: 0.0}}
        lossconfig: {{target: torch.nn.Identity}}
"""
CLIP_CONFIG = {
    "architectures": ["CLIPModel"],
    "model_type": "clip",
    "projection_dim": 768,
    "text_config": {
        "model_type": "clip_text_model",
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "projection_dim": 768,
        "vocab_size": 49408,
        "hidden_act": "quick_gelu",
        "bos_token_id": 0,
        "eos_token_id": 2,
    },
    "vision_config": {"model_type": "clip_vision_model", "num_hidden_layers": 1},
}


class WebuiServer:
    """One host process over a data folder of its own."""

    def __init__(self, name: str, checkout, base: Path, *flags: str, device=None) -> None:
        """``device``: flags in place of those that draw on the CPU in fp32."""
        self.name, self.checkout, self.base = name, checkout, base
        self.flags = (*(FLAGS[name] if device is None else device), *flags)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = None
        self.drawn = {}
        self.log = base / "log.txt"
        extensions = base / "extensions"
        (base / "models" / "Lora").mkdir(parents=True)
        install(extensions / "we ird-name.v2")
        probe = extensions / "probe" / "scripts"
        probe.mkdir(parents=True)
        (probe / "probe.py").write_text(PROBE.format(base=str(base)))
        link_packages(base / "packages", checkout.python)
        clip = base / "openai" / "clip-vit-large-patch14"
        clip.mkdir(parents=True)
        tokenizer = Path.home() / "ComfyUI" / "comfy" / "sd1_tokenizer"
        for file in tokenizer.iterdir():
            shutil.copy(file, clip)
        (clip / "config.json").write_text(json.dumps(CLIP_CONFIG))
        if name == "classic":  # it looks for this folder where it was started
            (base / "ldm_patched").symlink_to(checkout.root / "ldm_patched")
        (base / "config.json").write_text(
            json.dumps({"live_previews_enable": False, "samples_save": False, "grid_save": False})
        )

    def start(self) -> None:
        """Start and wait until a job can be posted."""
        command = [str(self.checkout.python), str(self.checkout.root / "launch.py"), *COMMON,
                   *self.flags, "--port", str(self.port), "--data-dir", str(self.base)]  # fmt: skip
        env = {**os.environ, "ENGINE_ROOM_PACKAGES": str(self.base / "packages"),
               "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
               "PYTHONDONTWRITEBYTECODE": "1", "GRADIO_ANALYTICS_ENABLED": "False"}  # fmt: skip
        before = self.starts()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, cwd=self.base, stdout=log, stderr=log, env=env)
        self.wait_until_up(before)
        self.get("/sdapi/v1/sd-models")

    def wait_until_up(self, starts: int) -> None:
        """Wait until the host has started more often than ``starts`` times."""
        deadline = time.monotonic() + 180
        # A request before it is up makes A1111 fail: it adds to its application afterwards.
        while self.starts() <= starts:
            assert self.process.poll() is None, self.log.read_text()[-1500:]
            assert time.monotonic() < deadline, self.log.read_text()[-1500:]
            time.sleep(0.3)

    def starts(self) -> int:
        """How often the host has started, reloads of its UI included."""
        return self.log.read_text().count("Startup time") if self.log.exists() else 0

    def stop(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(20)
            self.process = None

    def get(self, path):
        """GET as JSON."""
        with urllib.request.urlopen(self.url + path, timeout=120) as answer:
            return json.load(answer)

    def post(self, path, body):
        """POST JSON as JSON; a failure shows the server's log."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            log = self.log.read_text()[-3000:]
            raise AssertionError(f"{error.read()[:500]!r}\n{log}") from error

    def script(self, word, **changes):
        """Title and arguments of a script whose title holds ``word``: defaults, and changes by
        position (``a0``)."""
        scripts = self.get("/sdapi/v1/script-info")
        info = next(s for s in scripts if word in s["name"] and not s["is_img2img"])
        values = [argument["value"] for argument in info["args"]]
        for name, value in changes.items():
            values[int(name[1:])] = value
        return info, values

    def control_unit(self, **changes):
        """A unit of the Forge family's ControlNet, with the model ``canny`` and no preprocessor."""
        names = self.get("/controlnet/model_list")["model_list"]
        model = next(name for name in names if name.startswith("canny"))
        return {"enabled": True, "module": "None", "model": model, "image": picture(), **changes}

    def draw(self, policy, *, patch=None, **job):
        """A job; its latents and infotext. ``policy`` None where our settings are unknown."""
        (self.base / "probe.json").write_text(json.dumps({"patch": patch}))
        # The hosts put back only what stood in their settings file before.
        ours = {} if policy is None else {"engine_room_policy": policy}
        settings = {**ours, "live_previews_enable": False,
                    "token_merging_ratio": 0.0, "sd_model_checkpoint": "a.safetensors"}  # fmt: skip
        fields = {"prompt": "a lighthouse", "negative_prompt": "fog", "steps": 3, "width": 64,
                  "height": 64, "seed": 1, "cfg_scale": 5.0, "sampler_name": "Euler",
                  "override_settings": {**settings, **job.pop("settings", {})},
                  "override_settings_restore_afterwards": True, **job}  # fmt: skip
        if self.name == "forge" and "enable_hr" in job:
            fields["hr_additional_modules"] = ["Use same choices"]  # its API fails without
        if job.pop("freeu", False):
            fields.pop("freeu")
            info, values = self.script("freeu", a0=True)
            fields["alwayson_scripts"] = {info["name"]: {"args": values}}
        unit = fields.pop("controlnet", None)
        if unit is not None:
            fields["alwayson_scripts"] = {"ControlNet": {"args": [self.control_unit(**unit)]}}
        kind = "img2img" if "init_images" in job else "txt2img"
        answer = self.post(f"/sdapi/v1/{kind}", fields)
        infotext = json.loads(answer["info"])["infotexts"][-1]
        # Not mapped: the next job writes the same file.
        return load((self.base / "latents.safetensors").read_bytes())["samples"], infotext

    def draw_alone(self, **job):
        """A job by the host alone, drawn once: by its seed it is the same each time."""
        key = json.dumps(job, sort_keys=True)
        if key not in self.drawn:
            self.drawn[key] = self.draw("off", **job)
        return self.drawn[key]

    def counts(self):
        """Calls served by engines and by the host, so far."""
        status = self.get("/engine-room/status")
        return status["served"], status["host"]


def install(target: Path) -> None:
    """What the host's extension manager does: clone the repository's URL."""
    target.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["git", "clone", "-q", str(ROOT), str(target)], check=True)
    # Changes that are not committed yet are what is being tested.
    names = ["ls-files", "-m", "-o", "--exclude-standard"]
    changed = subprocess.run(["git", *names], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in changed.stdout.split("\n"):
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)


def write_hypernetwork(path: Path) -> None:
    """A hypernetwork for keys and values from the text (768 wide) and of the widest blocks."""
    generator = torch.Generator().manual_seed(5)

    def layer(size: int) -> dict[str, torch.Tensor]:
        found = {}
        for name, shape in (("0", (2 * size, size)), ("1", (size, 2 * size))):
            spread = 0.5 / math.sqrt(shape[1])
            found[f"linear.{name}.weight"] = torch.randn(shape, generator=generator) * spread
            found[f"linear.{name}.bias"] = torch.randn(shape[0], generator=generator) * 0.1
        return found

    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {"step": 1, "name": path.stem, "layer_structure": [1, 2, 1]}
    layers = {size: (layer(size), layer(size)) for size in (320, 768)}
    # A1111's check of pickles does not know the entries of newer zip files.
    torch.save({**layers, **facts}, path, _use_new_zipfile_serialization=False)


def write_models(base: Path) -> None:
    """Checkpoints (fp16, text encoder and VAE of full size), LoRAs and a hypernetwork.

    ``a`` and ``b`` are alike; ``inpainting`` has 9 input channels; ``v`` is ``a`` that A1111 takes
    for a model that predicts v.
    """
    folder = base / "models" / "Stable-diffusion"
    folder.mkdir(parents=True, exist_ok=True)
    shared = {}
    for layout in (text_shapes(TEXT["sd15", "full"][0]), vae_shapes(VAE["full"])):
        for name, shape in layout:
            shared[name] = random_tensor(name, shape, 0).half()
    nine = YAML
    for old, new in (
        ("LatentDiffusion", "LatentInpaintDiffusion"),
        ("in_channels: 4, out", "in_channels: 9, out"),
        ("conditioning_key: crossattn", "conditioning_key: hybrid\n    finetune_keys: null"),
    ):
        nine = nine.replace(old, new)
    for model, arch, seed, config in (
        ("a", SMALL_SD15, 0, YAML),
        ("b", SMALL_SD15, 7, YAML),
        ("inpainting", INPAINTING, 3, nine),
    ):
        unet = {
            f"model.diffusion_model.{n}": t.half().contiguous()
            for n, t in random_weights(arch, seed).items()
        }
        save_file({**shared, **unet}, folder / f"{model}.safetensors")
        (folder / f"{model}.yaml").write_text(config)
    (folder / "v.safetensors").hardlink_to(folder / "a.safetensors")
    (folder / "v.yaml").write_text(
        YAML.replace("  params:\n", '  params:\n    parameterization: "v"\n', 1)
    )
    control = base / "models/ControlNet/canny.safetensors"
    control.parent.mkdir(parents=True, exist_ok=True)
    write_control_model(control, SMALL_SD15)
    write_hypernetwork(base / "models" / "hypernetworks" / "style.pt")
    for i, kind in enumerate(("lora", "loha")):
        make_lora(base / f"models/Lora/{kind}.safetensors", architecture=SMALL_SD15, kind=kind,
                  seed=i)  # fmt: skip


def write_larger_families(base: Path) -> None:
    """For A1111, by configs: SD2 (predicts v) and SDXL with small UNets, and a LoRA for SDXL."""
    for model, arch, config in (
        ("sd21", SMALL_SD21, SD21_YAML),
        ("sdxl", SMALL_SDXL, SDXL_YAML),
    ):
        path = base / f"models/Stable-diffusion/{model}.safetensors"
        texts = [
            replace(text, width=OPEN_WIDTH, layers=OPEN_LAYERS, projection=OPEN_WIDTH)
            if text.open_clip
            else text
            for text in TEXT[model, "full"]
        ]
        write_checkpoint(path, arch, texts)
        path.with_suffix(".yaml").write_text(config)
    make_lora(base / "models/Lora/xl.safetensors", architecture=SMALL_SDXL, names="kohya-ldm")


def write_narrow_sdxl(base: Path, cache: Path) -> None:
    """For the Forge family: SDXL with both text encoders of full size (2 GB, made once in
    ``cache``), and a LoRA for it."""
    made = cache / "sdxl.safetensors"
    if not made.exists():
        write_checkpoint(made, NARROW_SDXL, TEXT["sdxl", "full"])
    (base / "models/Stable-diffusion/sdxl.safetensors").hardlink_to(made)
    make_lora(base / "models/Lora/xl.safetensors", architecture=NARROW_SDXL, names="kohya-ldm")


def write_checkpoint(path: Path, arch: Architecture, texts: list[TextLayout]) -> None:
    """A whole checkpoint in fp16 with a VAE of full size."""
    unet = {f"model.diffusion_model.{n}": t for n, t in random_weights(arch).items()}
    tensors = {name: tensor.half().contiguous() for name, tensor in unet.items()}
    for layout in (vae_shapes(VAE["full"]), *map(text_shapes, texts)):
        tensors |= {name: random_tensor(name, shape, 0).half() for name, shape in layout}
    save_file(tensors, path)


def picture(*, mask: bool = False) -> str:
    """A base64 PNG of 64 x 64 pixels: a gradient, or a mask over its right half."""
    ramp = torch.linspace(0, 1, 64)
    columns = (ramp > 0.5).float() if mask else ramp
    channels = (
        [columns.expand(64, 64)] * 3
        if mask
        else [columns.expand(64, 64), columns.expand(64, 64).T, torch.full((64, 64), 0.5)]
    )
    buffer = io.BytesIO()
    to_image(torch.stack(channels)).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative L2; infinite where shapes differ."""
    if a.shape != b.shape:
        return math.inf
    return float((a - b).norm() / b.norm())
