"""ComfyUI's own UNet and LoRA code as oracles, run in its own environment where it is present."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file, save_file

from extension.lora import MergedWeights, read_lora
from extension.ops_torch import TorchUNet
from extension.shapes import Shape
from extension.synthetic_lora import KINDS, NAMINGS, make_lora
from tests.support_hosts import require_host
from tests.support_models import SMALL, control_of, random_inputs, random_weights, relative_l2

UNET = """
import json, sys, torch
sys.argv += []
import comfy.cli_args
comfy.cli_args.args.cpu = True
import comfy.ops, comfy.model_detection as detection
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from safetensors.torch import load_file, save_file
folder = sys.argv[1]
state = load_file(folder + "/weights.safetensors")
inputs = load_file(folder + "/inputs.safetensors")
heads = json.loads(sys.argv[2])
config = detection.detect_unet_config(state, "")
config.update(heads)
unet = UNetModel(**config, operations=comfy.ops.disable_weight_init).eval()
missing, unexpected = unet.load_state_dict(state, strict=False)
assert not missing and not unexpected, (missing, unexpected)
control = None
if "control_middle_0" in inputs:
    n = sum(k.startswith("control_output_") for k in inputs)
    # Popped from the end, one for each input block: the list is the other way round.
    control = {"input": [inputs[f"control_input_{i}"] for i in reversed(range(n))],
               "middle": [inputs["control_middle_0"]],
               "output": [inputs[f"control_output_{i}"] for i in range(n)]}
with torch.no_grad():
    out = unet(inputs["x"], inputs["timesteps"], context=inputs["context"], y=inputs.get("y"),
               control=control, transformer_options={})
save_file({"out": out.contiguous()}, folder + "/out.safetensors")
print(json.dumps("done"))
"""


@pytest.mark.parametrize("control", [False, True])
@pytest.mark.parametrize("name", ["sd15", "sdxl", "two-levels"])
def test_the_torch_interpreter_equals_comfyuis_unet(tmp_path, name, control):
    """Odd latents too, where the up path is resized before the convolution."""
    comfy, arch = require_host("comfyui"), SMALL[name]
    shape = Shape(batch=2, height=13, width=11, control=control)
    weights, inputs = random_weights(arch), random_inputs(arch, shape)
    save_file(weights, tmp_path / "weights.safetensors")
    save_file({n: t.contiguous() for n, t in inputs.items()}, tmp_path / "inputs.safetensors")
    heads = (
        f'{{"num_heads": -1, "num_head_channels": {arch.head_channels}}}'
        if arch.head_channels
        else f'{{"num_heads": {arch.num_heads}, "num_head_channels": -1}}'
    )
    comfy.run(UNET, tmp_path, heads)
    expected = load_file(tmp_path / "out.safetensors")["out"]
    args = [inputs[n] for n in ("x", "timesteps", "context")]
    actual = TorchUNet(arch, weights)(*args, inputs.get("y"), control_of(inputs))
    assert relative_l2(actual, expected) <= 1e-5


LORA = """
import json, sys, torch, types
import comfy.cli_args
comfy.cli_args.args.cpu = True
import comfy.lora, comfy.lora_convert, comfy.model_detection as detection
from safetensors.torch import load_file, save_file
folder, strength = sys.argv[1], float(sys.argv[2])
state = load_file(folder + "/weights.safetensors")
config = detection.detect_unet_config(state, "")
prefixed = {"diffusion_model." + k: v for k, v in state.items()}
class Model:
    model_config = types.SimpleNamespace(unet_config=config)
    def state_dict(self): return prefixed
names = comfy.lora.model_lora_keys_unet(Model(), {})
out = {}
import os
for file in sorted(os.listdir(folder + "/loras")):
    lora = comfy.lora_convert.convert_lora(load_file(folder + "/loras/" + file))
    loaded = comfy.lora.load_lora(lora, names)
    for key, patch in loaded.items():
        key = key if isinstance(key, str) else key[0]
        weight = prefixed[key].clone()
        merged = comfy.lora.calculate_weight([(strength, patch, 1.0, None, None)], weight, key)
        out[file + "|" + key.removeprefix("diffusion_model.")] = merged.contiguous()
save_file(out, folder + "/merged.safetensors")
print(json.dumps(len(out)))
"""


def test_merging_equals_comfyuis_own_loader(tmp_path):
    """Every kind in every naming: the same modules found, and the same weights.

    DoRA is left out: ComfyUI divides by the norm of the base weight where the paper and LyCORIS,
    whom we follow, divide by that of the merged weight.
    """
    comfy, arch = require_host("comfyui"), SMALL["sd15"]
    weights = random_weights(arch)
    save_file(weights, tmp_path / "weights.safetensors")
    (tmp_path / "loras").mkdir()
    files = {}
    for kind in KINDS:
        for naming in NAMINGS:
            if kind == "dora" or (naming == "peft" and kind != "lora"):
                continue
            path = tmp_path / "loras" / f"{kind}-{naming}.safetensors"
            make_lora(path, architecture=arch, kind=kind, names=naming, seed=len(files))
            files[path.name] = read_lora(path).match(arch)
    comfy.run(LORA, tmp_path, 0.7)
    theirs = load_file(tmp_path / "merged.safetensors")
    found = {}
    for key, expected in theirs.items():
        file, name = key.split("|")
        actual = MergedWeights(weights, [(files[file], 0.7)])[name]
        assert relative_l2(actual, expected) <= 1e-6, key
        assert relative_l2(weights[name], expected) > 1e-2, key
        found.setdefault(file, set()).add(name)
    for file, match in files.items():
        ours = {f"{module}.weight" for module in match.adapters}
        assert found.get(file, set()) <= ours, file
        if "kohya.s" in file:  # ComfyUI knows fewer of the other spellings
            assert found.get(file) == ours, file


PARTIAL = """
import json, torch
import comfy.cli_args
comfy.cli_args.args.cpu = True
import comfy.ops
from comfy.model_patcher import ModelPatcher
from extension.hosts.comfy.routing import weights_epoch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.diffusion_model = torch.nn.Module()
        self.diffusion_model.layer = comfy.ops.disable_weight_init.Linear(8, 8)

cpu = torch.device("cpu")
model = Model()
layer = model.diffusion_model.layer
torch.nn.init.ones_(layer.weight)
patcher = ModelPatcher(model, cpu, cpu)
patcher.add_patches({"diffusion_model.layer.weight": ("diff", (torch.ones(8, 8),))})
patcher.load(cpu, full_load=True)
patched, before = layer.weight.clone(), weights_epoch(model, 1)
same = weights_epoch(model, 1) == before
patcher.partially_unload(cpu, 1)
print(json.dumps({
    "same": same,
    "weight_changed": not torch.equal(patched, layer.weight),
    "told": weights_epoch(model, 1) != before,
}))
"""


def test_weights_that_comfyui_takes_back_in_mid_run_are_another_epoch():
    """To make room for another model it undoes a LoRA in the layers that it moves away."""
    found = require_host("comfyui").run(PARTIAL)
    assert found == {"same": True, "weight_changed": True, "told": True}
