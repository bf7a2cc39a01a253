"""A real ComfyUI server with this checkout and a probe pack, driven over HTTP."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from extension.architecture import SD15, TINY
from extension.synthetic_lora import make_lora
from tests.support_models import REFINER_TINY, random_weights

ROOT = Path(__file__).resolve().parents[1]
AWKWARD = "we ird-name.v2"
# What ComfyUI's detection takes for SD1.5: only these widths are fixed.
SMALL_SD15 = replace(
    SD15,
    channel_mult=(1, 2),
    num_res_blocks=(1, 1),
    transformer_depth=(1, 1),
    transformer_depth_output=(1, 1, 1, 1),
)
INPAINTING = replace(SMALL_SD15, in_channels=9)
# Models of other classes, by the name of ComfyUI's; width of prompts, and whether they predict v.
SMALL_SDXL = replace(TINY["sdxl"], adm_channels=1280 + 6 * 256)
SMALL_REFINER = replace(REFINER_TINY, adm_channels=1280 + 5 * 256)
CLASSES = {
    "SDXL": (SMALL_SDXL, False),
    "SDXL v": (SMALL_SDXL, True),
    "SDXLRefiner": (SMALL_REFINER, False),
    "SD20 v": (TINY["sd21"], True),
}

# A node pack of the test's own: conditioning, latents and control residuals from seeds, and a
# patch of each kind that reaches into the UNet.
PROBE = """
import torch, comfy.controlnet, comfy.model_base

def noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

class Cond:
    FUNCTION, CATEGORY, RETURN_TYPES = "make", "probe", ("CONDITIONING",)
    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"seed": ("INT", {}), "tokens": ("INT", {}), "width": ("INT", {})}}
    def make(self, seed, tokens, width):
        return ([[noise(seed, 1, tokens, width), {"pooled_output": noise(seed, 1, 1280)}]],)

class Model:  # small, of a class whose detection asks for full size
    FUNCTION, CATEGORY, RETURN_TYPES = "make", "probe", ("MODEL",)
    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"file": ("STRING", {}), "kind": ("STRING", {}),
                             "v_prediction": ("BOOLEAN", {})}}
    def make(self, file, kind, v_prediction):
        import comfy.model_detection, comfy.model_management, comfy.model_patcher
        import comfy.supported_models
        from safetensors.torch import load_file
        weights = load_file(file)
        found = comfy.model_detection.detect_unet_config(weights, "")
        config = getattr(comfy.supported_models, kind)(found)
        config.set_inference_dtype(torch.float32, None)
        if v_prediction:
            weights["v_pred"] = torch.zeros(0)
        if kind == "SD20":
            config.model_type = lambda *a, **k: comfy.model_base.ModelType.V_PREDICTION
        model = config.get_model(weights, "")
        model.load_model_weights(weights, "")
        return (comfy.model_patcher.ModelPatcher(
            model, load_device=comfy.model_management.get_torch_device(),
            offload_device=torch.device("cpu")),)

class Latent:
    FUNCTION, CATEGORY, RETURN_TYPES = "make", "probe", ("LATENT",)
    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"batch": ("INT", {}), "height": ("INT", {}), "width": ("INT", {})}}
    def make(self, batch, height, width):
        return ({"samples": torch.zeros(batch, 4, height, width)},)

class Residuals(comfy.controlnet.ControlBase):
    def __init__(self, seed, where):
        super().__init__()
        self.seed, self.where = seed, where
    def get_control(self, x_noisy, t, cond, batched_number, transformer_options):
        b, _, h, w = x_noisy.shape
        half = (-(-h // 2), -(-w // 2))
        sizes = [(320, h, w), (320, h, w), (320, *half), (640, *half)]
        maps = [noise(self.seed + i, 1, *s).expand(b, *s).clone() for i, s in enumerate(sizes)]
        if self.where == "t2i":
            return {"input": [maps[3], None, maps[1], maps[0]], "middle": [], "output": []}
        return {"input": [], "middle": [maps[3] * 0.5], "output": maps}
    def copy(self):
        c = Residuals(self.seed, self.where)
        self.copy_to(c)
        return c
    def cleanup(self): pass
    def get_models(self): return []

class Control:
    FUNCTION, CATEGORY, RETURN_TYPES = "apply", "probe", ("CONDITIONING",)
    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"conditioning": ("CONDITIONING",), "seed": ("INT", {}),
                             "where": (["control", "t2i"],)}}
    def apply(self, conditioning, seed, where):
        out = []
        for c in conditioning:
            d = c[1].copy()
            d["control"], d["control_apply_to_uncond"] = Residuals(seed, where), True
            out.append([c[0], d])
        return (out,)

class Patch:
    FUNCTION, CATEGORY, RETURN_TYPES = "apply", "probe", ("MODEL",)
    KINDS = ["attn2", "output", "replace", "override", "hook", "forward", "pad"]
    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "kind": (cls.KINDS,)}}
    def apply(self, model, kind):
        m = model.clone()
        if kind == "attn2":
            m.set_model_attn2_output_patch(lambda out, extra: out * 0.5)
        elif kind == "output":
            m.set_model_output_block_patch(lambda h, hsp, options: (h * 0.8, hsp))
        elif kind == "replace":
            m.set_model_attn1_replace(lambda q, k, v, extra: v * 0.5, "middle", 0, 0)
        elif kind == "override":
            m.model_options["transformer_options"]["optimized_attention_override"] = (
                lambda func, *args, **kwargs: func(*args, **kwargs) * 0.5)
        return (m,)

class SaveAll:
    FUNCTION, CATEGORY, RETURN_TYPES, OUTPUT_NODE = "save", "probe", (), True
    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"latent": ("LATENT",), "path": ("STRING", {})}}
    def save(self, latent, path):
        from safetensors.torch import save_file
        save_file({"samples": latent["samples"].float().contiguous()}, path)
        return {}

NODE_CLASS_MAPPINGS = {"ProbeModel": Model,
                       "ProbeCond": Cond, "ProbeLatent": Latent, "ProbeControl": Control,
                       "ProbePatch": Patch, "ProbeSave": SaveAll}
"""


def has_database(checkout) -> bool:
    """Whether this version keeps a database (0.3.41 and later), which must not be the user's."""
    return "--database-url" in (checkout.root / "comfy/cli_args.py").read_text("utf-8")


def overrides_attention(checkout) -> bool:
    """Whether this version lets a patch replace the attention of every block."""
    source = (checkout.root / "comfy/ldm/modules/attention.py").read_text("utf-8")
    return "optimized_attention_override" in source


class ComfyServer:
    """One server process over a base folder of its own."""

    def __init__(self, checkout, base: Path) -> None:
        self.checkout, self.base = checkout, base
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = None
        self.log = base / "log.txt"
        for name in ("custom_nodes", "input", "output", "models/diffusion_models", "models/loras"):
            (base / name).mkdir(parents=True, exist_ok=True)
        (base / "custom_nodes" / "probe.py").write_text(PROBE)
        copy_pack(base / "custom_nodes" / AWKWARD)
        link_packages(base / "packages", checkout.python)

    def start(self) -> None:
        """Start and wait until it answers."""
        command = [str(self.checkout.python), "main.py", "--cpu", "--listen", "127.0.0.1",
                   "--port", str(self.port), "--base-directory", str(self.base),
                   "--force-fp32"]  # fmt: skip
        if has_database(self.checkout):
            command += ["--database-url", f"sqlite:///{self.base}/c.db"]
        env = {**os.environ, "ENGINE_ROOM_PACKAGES": str(self.base / "packages"),
               "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=self.checkout.root, stdout=log, stderr=log, env=env
            )
        deadline = time.monotonic() + 120
        while True:
            try:
                self.get("/system_stats")
                return
            except (urllib.error.URLError, ConnectionError):
                assert self.process.poll() is None, self.log.read_text()[-3000:]
                assert time.monotonic() < deadline
                time.sleep(0.3)

    def stop(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait(20)
            self.process = None

    def get(self, path):
        """GET as JSON."""
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return json.load(answer)

    def post(self, path, body):
        """POST JSON; (status, JSON or text)."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                text, code = answer.read(), answer.status
        except urllib.error.HTTPError as error:
            text, code = error.read(), error.code
        return code, json.loads(text) if text.startswith((b"{", b"[")) else text.decode()

    def queue(self, graph):
        """Queue a workflow; its prompt id."""
        code, answer = self.post("/prompt", {"prompt": graph})
        assert code == 200, json.dumps(answer)[:2000]
        return answer["prompt_id"]

    def queue_and_start(self, graph, timeout=60):
        """Queue a workflow and wait until it runs; its prompt id."""
        prompt = self.queue(graph)
        deadline = time.monotonic() + timeout
        while not any(prompt in entry for entry in self.get("/queue")["queue_running"]):
            assert time.monotonic() < deadline, "the prompt did not start"
            time.sleep(0.02)
        return prompt

    def finish(self, prompt, timeout=300):
        """Wait for a prompt; its history entry."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            history = self.get(f"/history/{prompt}")
            if prompt in history:
                return history[prompt]
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            time.sleep(0.05)
        raise AssertionError("the prompt did not finish")

    def run(self, graph):
        """Run a workflow to its end; it must succeed."""
        entry = self.finish(self.queue(graph))
        assert entry["status"]["status_str"] == "success", json.dumps(entry["status"])[:3000]
        return entry

    def counts(self):
        """Calls served by engines and by the host, so far."""
        status = self.get("/engine_room/status")
        return status["served"], status["host"]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def copy_pack(target: Path) -> None:
    """This checkout as a user would have it."""
    skipped = (".git", ".venv", ".gpu", "tests", "benchmarks", "__pycache__", "build", "demo")
    shutil.copytree(ROOT, target, ignore=lambda folder, names: [n for n in names if n in skipped])


def link_packages(folder: Path, python: Path) -> None:
    """A private folder over this test environment's packages, under the host's Python tag."""
    out = subprocess.run(
        [str(python), "-c", "import sys; print('cp%d%d' % sys.version_info[:2])"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    tag = out.stdout.strip()
    here = next(p for p in map(Path, sys.path) if (p / "onnxruntime").is_dir())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"worker-{tag}").symlink_to(here)
    (folder / f"tensorrt-{tag}-onnxruntime-test").mkdir()
    (folder / f"tensorrt-{tag}-onnxruntime-test" / "onnxruntime").symlink_to(here / "onnxruntime")


def write_models(base: Path) -> None:
    """Checkpoints and LoRAs, scaled so that every feature moves the result."""
    for name, arch, seed in (
        ("a", SMALL_SD15, 0),
        ("b", SMALL_SD15, 7),
        ("inpaint", INPAINTING, 3),
    ):
        weights = {n: t.contiguous() for n, t in random_weights(arch, seed).items()}
        save_file(weights, base / f"models/diffusion_models/{name}.safetensors")
    for name, (arch, _) in CLASSES.items():
        weights = {n: t.contiguous() for n, t in random_weights(arch).items()}
        save_file(weights, base / f"{name}.safetensors")
    for i, kind in enumerate(("lora", "loha")):
        make_lora(
            base / f"models/loras/{kind}.safetensors", architecture=SMALL_SD15, kind=kind, seed=i
        )


def latent_of(path: Path) -> torch.Tensor:
    """The latent that a ProbeSave node wrote."""
    return load_file(path)["samples"]
