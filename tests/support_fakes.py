"""Contract fakes: as much of each host as its adapter touches, for machines without the hosts.

Each fake does what the real host's source was seen to do (``shared/reference/hosts.md``); the
suites against real hosts keep them honest.
"""

from __future__ import annotations

import copy
import sys
import types
from collections import defaultdict

import torch
from ldm.modules.diffusionmodules.openaimodel import UNetModel

from extension.patcher_calls import read_control
from extension.unet import Control
from tests.support_ldm import ldm_unet, run_ldm
from tests.support_models import SMALL, random_weights

ARCH = SMALL["sd15"]


class HostUNet(UNetModel):
    """LDM's UNet with a forward of the hosts' form; counts its calls."""

    resize = "before"
    calls = 0

    def forward(
        self,
        x,
        timesteps=None,
        context=None,
        y=None,
        control=None,
        transformer_options=None,
        **more,
    ):
        type(self).calls += 1
        shape = types.SimpleNamespace(
            batch=x.shape[0], height=x.shape[2], width=x.shape[3], tokens=context.shape[1]
        )
        inputs = {"x": x, "timesteps": timesteps, "context": context, "y": y}
        residuals = _whole(read_control(control, ARCH, shape)[0]) if control else None
        out = run_ldm(self, inputs, residuals, self.resize)
        # As the hosts do: their lists are consumed, and patches act inside.
        for part in control or ():
            control[part].clear()
        options = transformer_options or {}
        return out * 0.5 if options.get("patches") else out


def _whole(control):
    """Residuals with zeros where there are none, as the oracle reads them."""
    outputs = [0.0 if tensor is None else tensor for tensor in control.output]
    return Control(input=[0.0] * len(outputs), middle=control.middle or [0.0], output=outputs)


def host_unet(seed=0, resize="before"):
    """A module with random weights whose class has the host's forward."""
    module = ldm_unet(ARCH, random_weights(ARCH, seed))
    module.__class__ = type("HostUNet", (HostUNet,), {"resize": resize, "calls": 0})
    return module


def install(monkeypatch, modules):
    """Put fake modules in place, and forget our adapters before and after."""
    for name in [n for n in sys.modules if n.startswith("extension.hosts")]:
        monkeypatch.delitem(sys.modules, name)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, leaf = name.rpartition(".")
        if parent in modules:
            setattr(modules[parent], leaf, module)


def module(name, **contents):
    """A module with contents."""
    made = types.ModuleType(name)
    made.__dict__.update(contents)
    made.__path__ = []
    return made


# ComfyUI


class Kinds:
    """WrappersMP and CallbacksMP: plain strings."""

    DIFFUSION_MODEL = "diffusion_model"
    SAMPLER_SAMPLE = "sampler_sample"
    ON_PRE_RUN = "on_pre_run"
    ON_DETACH = "on_detach"


class Executor:
    """comfy.patcher_extension.WrapperExecutor: each wrapper gets its own as its executor."""

    def __init__(self, original, owner, wrappers, idx=0):
        self.original, self.class_obj, self.wrappers, self.idx = original, owner, wrappers, idx

    @classmethod
    def new_class_executor(cls, original, owner, wrappers):
        return cls(original, owner, wrappers)

    def __call__(self, *args, **kwargs):
        following = Executor(self.original, self.class_obj, self.wrappers, self.idx + 1)
        return following.execute(*args, **kwargs)

    def execute(self, *args, **kwargs):
        if self.idx == len(self.wrappers):
            return self.original(*args, **kwargs)
        return self.wrappers[self.idx](self, *args, **kwargs)


class ComfyPage:
    """server.PromptServer: what it sends to browsers is kept."""

    def __init__(self):
        self.last_node_id = "7"
        self.sent, self.said = [], []

    def send_sync(self, event, data):
        self.sent.append((event, data))

    def send_progress_text(self, text, node):
        self.said.append((node, text))


class ComfyPatcher:
    """comfy.model_patcher.ModelPatcher: clones share the model and copy options deeply."""

    def __init__(self, base, load_device=None, offload_device=None):
        self.model, self.patches = base, {}
        self.load_device, self.offload_device = load_device, offload_device
        self.additional_models = {}
        self.size = self.model_size()
        self.wrappers = defaultdict(lambda: defaultdict(list))
        self.callbacks = defaultdict(lambda: defaultdict(list))
        self.model_options = {"transformer_options": {}}

    def clone(self):
        made = ComfyPatcher(self.model, self.load_device, self.offload_device)
        made.additional_models = {
            key: [model.clone() for model in models]
            for key, models in self.additional_models.items()
        }
        for name in ("wrappers", "callbacks"):
            for kind, keyed in getattr(self, name).items():
                for key, found in keyed.items():
                    getattr(made, name)[kind][key] = list(found)
        made.model_options = copy.deepcopy(self.model_options)
        return made

    def add_wrapper_with_key(self, kind, key, wrapper):
        self.wrappers[kind][key].append(wrapper)

    def add_callback_with_key(self, kind, key, callback):
        self.callbacks[kind][key].append(callback)

    def get_wrappers(self, kind, key):
        return self.wrappers[kind].get(key, [])

    def remove_wrappers_with_key(self, kind, key):
        self.wrappers[kind].pop(key, None)

    def remove_callbacks_with_key(self, kind, key):
        self.callbacks[kind].pop(key, None)

    def model_size(self):
        return 0

    def set_additional_models(self, key, models):
        self.additional_models[key] = models

    def remove_additional_models(self, key):
        self.additional_models.pop(key, None)

    def tell(self, kind, *args):
        for found in self.callbacks[kind].values():
            for callback in found:
                callback(self, *args)

    def chain(self, kind):
        """Options are copied deeply for a run, wrappers too."""
        wrappers = copy.deepcopy(dict(self.wrappers[kind]))
        return [wrapper for found in wrappers.values() for wrapper in found]

    def run(self, x, timesteps, context, *, control=None, patches=None, calls=1, **extra):
        """A sampling run of independent calls; the last one's result."""

        def sampler(wrap, sigmas, extra_args, callback, noise):
            for _ in range(calls):
                out = self.call(noise, timesteps, context, control, patches, extra)
            return out

        return self.sample(sampler, x)

    def walk(self, x, timesteps, context, *, calls):
        """A sampling run that writes into its noise and draws random numbers in every step."""

        def sampler(wrap, sigmas, extra_args, callback, noise):
            for _ in range(calls):
                out = self.call(noise, timesteps, context, None, None, {})
                noise += 0.1 * out + 0.1 * torch.randn(noise.shape)
            return noise

        return self.sample(sampler, x)

    def sample(self, sampler, noise):
        self.model.current_patcher = self
        self.tell(Kinds.ON_PRE_RUN)
        executor = Executor(sampler, None, self.chain(Kinds.SAMPLER_SAMPLE))
        return executor.execute(self, None, {}, None, noise)

    def call(self, x, timesteps, context, control, patches, extra):
        kind = Kinds.DIFFUSION_MODEL
        options = {"patches": patches or {}, "wrappers": {kind: dict(self.wrappers[kind])}}
        lists = {part: list(found) for part, found in control.items()} if control else None
        unet = self.model.diffusion_model
        executor = Executor(unet.forward, unet, self.chain(kind))
        return executor.execute(x, timesteps, context, None, lists, options, **extra)


class DynamicPatcher(ComfyPatcher):
    """ModelPatcherDynamic of newer hosts: plain parameters are not there while it runs."""

    dynamic = True

    def is_dynamic(self):
        return self.dynamic

    def model_size(self):
        return 1000

    def clone(self, disable_dynamic=False):
        made = super().clone()
        made.__class__ = DynamicPatcher
        made.dynamic = self.dynamic and not disable_dynamic
        return made

    def run(self, *args, **options):
        layer = self.model.diffusion_model.out[2]
        weight = layer.weight
        if self.dynamic:
            layer.comfy_cast_weights, layer.weight_function = True, [lambda tensor: tensor]
        try:
            return super().run(*args, **options)
        finally:
            layer.weight_function, layer.weight = [], weight


class Interrupted(Exception):  # noqa: N818
    """comfy.model_management.InterruptProcessingException."""


def throw(state):
    """As the host does: the flag is cleared by what it raises."""
    if state.interrupted:
        state.interrupted = False
        raise Interrupted


def comfy(monkeypatch, folder):
    """Fake ComfyUI modules over ``folder``; a patcher of a small model."""
    state = types.SimpleNamespace(interrupted=False)
    management = module(
        "comfy.model_management",
        processing_interrupted=lambda: state.interrupted,
        throw_exception_if_processing_interrupted=lambda: throw(state),
        interrupt_current_processing=lambda value=True: setattr(state, "interrupted", value),
        InterruptProcessingException=Interrupted,
        get_torch_device=lambda: torch.device("cpu"),
    )
    bar = type(
        "ProgressBar",
        (),
        # The server's hook behind it looks for an interrupt.
        {"__init__": lambda s, n: None, "update_absolute": lambda s, n: throw(state)},
    )
    fakes = {
        "comfy": module("comfy"),
        "comfy.model_management": management,
        "comfy.model_patcher": module("comfy.model_patcher", ModelPatcher=ComfyPatcher),
        "comfy.utils": module("comfy.utils", ProgressBar=bar),
        "comfy.patcher_extension": module(
            "comfy.patcher_extension",
            CallbacksMP=Kinds,
            WrappersMP=Kinds,
            WrapperExecutor=Executor,
        ),
        "server": module("server", PromptServer=types.SimpleNamespace(instance=ComfyPage())),
        "folder_paths": module("folder_paths", models_dir=str(folder)),
    }
    install(monkeypatch, fakes)
    base = types.SimpleNamespace(
        diffusion_model=host_unet(), current_patcher=None, current_weight_patches_uuid=None
    )

    class Base:
        """Weakly referable, as the real one is."""

    made = Base()
    made.__dict__.update(vars(base))
    return ComfyPatcher(made)


# The A1111 family


class Options(types.SimpleNamespace):
    """shared.opts."""


class SdUnetOption:
    model_name = label = None


class SdUnet(torch.nn.Module):
    pass


def webui(monkeypatch, folder, *, forge):
    """Fake WebUI modules; the namespace that a job would see."""
    unet = host_unet(resize="before" if forge else "after")
    kind = type(unet)
    kind.__module__ = "ldm.modules.diffusionmodules.openaimodel"
    model = types.SimpleNamespace(
        model=types.SimpleNamespace(diffusion_model=unet),
        sd_checkpoint_info=types.SimpleNamespace(model_name="a", title="a.safetensors"),
        applied_token_merged_ratio=0,
        lowvram=False,
        current_lora_hash="",
    )
    state = types.SimpleNamespace(
        job="", interrupted=False, skipped=False, textinfo="", sampling_step=0
    )
    shared = module(
        "modules.shared",
        opts=Options(engine_room_policy="wait"),
        cmd_opts=types.SimpleNamespace(lowvram=False, medvram=False, no_half=True),
        sd_model=model,
        state=state,
        loaded_hypernetworks=[],
    )
    hijack = types.SimpleNamespace(circular_enabled=False)
    sd_unet = module(
        "modules.sd_unet", SdUnetOption=SdUnetOption, SdUnet=SdUnet, apply_unet=lambda: None
    )
    fakes = {
        "modules": module("modules"),
        "modules.shared": shared,
        "modules.paths": module("modules.paths", models_path=str(folder)),
        "modules.devices": module("modules.devices", device=torch.device("cpu")),
        "modules.lowvram": module("modules.lowvram", module_in_gpu=None),
        "modules.sd_unet": sd_unet,
        "modules.sd_hijack": module(
            "modules.sd_hijack", ldm_original_forward=HostUNet.forward, model_hijack=hijack
        ),
    }
    if forge:
        fakes["modules_forge"] = module("modules_forge")
        fakes["modules_forge"].__spec__ = types.SimpleNamespace()
        patcher = ForgePatcher(types.SimpleNamespace(diffusion_model=unet))
        model.forge_objects = types.SimpleNamespace(unet=patcher)
    install(monkeypatch, fakes)
    return types.SimpleNamespace(shared=shared, model=model, unet=unet, hijack=hijack)


class ForgePatcher:
    """Forge's UnetPatcher: options are copied deeply by a clone."""

    def __init__(self, base):
        self.model, self.model_options = base, {"transformer_options": {}}

    def clone(self):
        made = ForgePatcher(self.model)
        made.model_options = copy.deepcopy(self.model_options)
        return made

    def set_model_unet_function_wrapper(self, wrapper):
        self.model_options["model_function_wrapper"] = wrapper

    def run(self, x, timesteps, context, **more):
        """One step: the wrapper, if there is one, around apply_model."""
        base = Applied(self.model.diffusion_model)
        conditions = {"context": context, "transformer_options": {}, **more}
        if "control" in more:  # made anew for each call, with the network that made it
            lists = {part: list(found) for part, found in more["control"].items()}
            conditions |= {"control": lists, "control_model": object()}
        wrapper = self.model_options.get("model_function_wrapper")
        if wrapper is None:
            return base.apply_model(x, timesteps, **conditions)
        return wrapper(base.apply_model, {"input": x, "timestep": timesteps, "c": conditions})


class Applied:
    """KModel: scales and casts, then the network."""

    def __init__(self, unet):
        self.diffusion_model = unet

    def apply_model(self, x, t, **conditions):
        return self.diffusion_model.forward(x, t, **conditions)
