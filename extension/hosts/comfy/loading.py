"""A baked engine as a MODEL: the host's sampling around a network that is only an engine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.supported_models
import comfy.supported_models_base
import torch
from comfy.patcher_extension import CallbacksMP
from torch import Tensor, nn

from ...architecture import Architecture
from ...baking import UNKNOWN
from ...binding import TORCH_DTYPES
from ...engine_state import State
from ...errors import EngineError, LibraryError, SettingError, UnsupportedModelError
from ...library import Entry
from ...machine import machine_of
from ...memory import parameter_bytes
from ...patcher_calls import active_features, read_control
from ...room import baked_job
from ...routed import RoutedUNet
from ...router import Call, Host
from .room import KEY, room

CHOICE = re.compile(r".*\[([0-9a-f]{16})\]")
USABLE = (State.READY, State.UNVERIFIED)
# What the command line knows of a model, as this host names it.
FAMILIES = {"sd1": "SD15", "sd2": "SD20", "sdxl": "SDXL", "refiner": "SDXLRefiner"}
PREDICTIONS = {"eps": "EPS", "v": "V_PREDICTION"}
PLAIN = (bool, int, float, str, type(None))


def model_facts(model: Any) -> dict[str, Any]:
    """What ``load`` needs to sample without the checkpoint: kind, prediction, sigmas, latents."""
    base = model.model
    config = base.model_config
    skipped = ("dtype", "device", "disable_unet_model_creation")
    return {
        "kind": type(config).__name__,
        "prediction": base.model_type.name,
        "sampling": _plain(config.sampling_settings),
        "latent_format": type(base.latent_format).__name__,
        "unet": _plain({k: v for k, v in config.unet_config.items() if k not in skipped}),
    }


def _plain(values: Any) -> dict[str, Any]:
    """The entries that JSON can hold; nothing where a damaged manifest has no object."""
    if not isinstance(values, Mapping):
        return {}
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, PLAIN)
        or (isinstance(value, list | tuple) and all(isinstance(item, PLAIN) for item in value))
    }


def choices() -> list[str]:
    """Baked engines, newest first, as the node lists them."""
    return [
        f"{entry.manifest.label} [{entry.stem}]"
        for entry in room().library.entries()
        if entry.manifest is not None
        and entry.key.weights == "baked"
        and entry.manifest.model.get("prediction") != UNKNOWN
    ]


def load(choice: str) -> tuple[Any, str]:
    """The MODEL of a listed engine, and a report.

    Raises:
        LibraryError: there is no such engine, or it was made for another GPU or version.
        UnsupportedModelError: its manifest does not say what it is.
    """
    match = CHOICE.fullmatch(choice)
    if match is None:
        raise LibraryError(
            f"'{choice}' is no baked engine.",
            hint="Build one with the node Build TRT engine, weights: baked.",
        )
    device = comfy.model_management.get_torch_device()
    entry = room().library.entry(match[1], machine_of(place_of(device)))
    if entry.state not in USABLE or entry.manifest is None:
        raise LibraryError(f"The engine {entry.stem} cannot be used here: {entry.text}.")
    arch = Architecture.from_json(entry.manifest.model.get("architecture") or {})
    base = _base_model(entry, arch, device)
    offload = comfy.model_management.unet_offload_device()
    size = entry.bytes_on_disk + entry.manifest.activation_bytes
    patcher = BakedPatcher(base, load_device=device, offload_device=offload, size=size)
    patcher.add_callback_with_key(CallbacksMP.ON_DETACH, KEY, _unload)
    return patcher, _report(entry, arch)


def _report(entry: Entry, arch: Architecture) -> str:
    assert entry.manifest is not None
    weights = parameter_bytes(arch, entry.key.io_dtype) / 1e6
    return f"{entry.manifest.label}; {weights:.0f} MB of weights inside; {entry.text}."


def _base_model(entry: Entry, arch: Architecture, device: torch.device) -> Any:
    """The host's model around the engine, of the class that the manifest names."""
    assert entry.manifest is not None
    facts = entry.manifest.model
    config = _config(facts, arch)
    dtype = TORCH_DTYPES[entry.key.io_dtype]
    config.set_inference_dtype(dtype, None)
    kind = _model_type(facts)
    config.model_type = lambda *args, **kwargs: kind
    base = config.get_model({}, "", device=device)
    base.diffusion_model = BakedNetwork(entry, arch, dtype)
    base.eval()
    return base


def _config(facts: Mapping[str, Any], arch: Architecture) -> Any:
    name = facts.get("kind") or FAMILIES.get(arch.family, "")
    found: Any = getattr(comfy.supported_models, str(name), None)
    known = isinstance(found, type) and issubclass(found, comfy.supported_models_base.BASE)
    if not known or found not in comfy.supported_models.models:
        raise UnsupportedModelError(f"The engine holds a '{name}', which this host does not know.")
    unet = {"in_channels": arch.in_channels, **_plain(facts.get("unet"))}
    unet.setdefault("adm_in_channels", arch.adm_channels or None)
    config: Any = found({**unet, "disable_unet_model_creation": True})
    config.sampling_settings.update(_plain(facts.get("sampling")))
    return config


def _model_type(facts: Mapping[str, Any]) -> Any:
    said = str(facts.get("prediction") or "eps")
    name = PREDICTIONS.get(said, said)
    if name not in comfy.model_base.ModelType.__members__:
        raise UnsupportedModelError(f"The engine predicts '{said}', which this host does not know.")
    return comfy.model_base.ModelType[name]


class BakedNetwork(nn.Module):
    """The engine in the place of the network; there is no host behind it to fall back to."""

    def __init__(self, entry: Entry, arch: Architecture, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.stem = entry.stem
        self._entry, self._arch = entry, arch
        self._features: list[str] = []
        self._routed = RoutedUNet(
            arch,
            {},
            _nobody,
            fingerprint=entry.key.fingerprint,
            pool=room().pool,
            counters=room().counters,
            on_miss=self._provide,
        )
        self._routed.modes = ("baked",)

    def _provide(self, call: Call, answer: Host) -> bool:
        if room().pool.holds(self.stem):
            return False
        room().tiers.failed.pop(self.stem, None)
        return room().tiers.provide(baked_job(self._arch, self._entry, call.device))

    def forward(
        self,
        x: Tensor,
        timesteps: Tensor,
        context: Tensor,
        y: Tensor | None = None,
        control: Any = None,
        transformer_options: Mapping[str, Any] | None = None,
        **extra: Any,
    ) -> Tensor:
        """One call of the network; raises EngineError that says what to connect instead."""
        features = active_features(transformer_options or {}, extra, control)
        shape = self._routed.describe(x, context, control is not None).shape
        residuals, problem = read_control(control, self._arch, shape)
        features += [problem] if problem else []
        arguments = (x, timesteps.float(), context, y, residuals)
        out = self._routed.serve(*arguments, features=features)
        if out is None:
            raise self._refusal(shape.label)
        return out

    def _refusal(self, wanted: str) -> EngineError:
        reasons = self._routed.counters.to_json()["reasons"]
        why = room().tiers.failed.get(self.stem) or (reasons[0]["text"] if reasons else "")
        shape = self._entry.key.shape
        width, height = shape.pixels
        self._routed.counters.reset()
        return EngineError(
            f"The engine {self.stem} draws {shape.label}; this is {wanted}: {why}.",
            hint=f"Connect an empty latent of {width}x{height} and a plain prompt, or load the "
            "checkpoint and use the node TensorRT, which serves every size and feature.",
        )


class BakedPatcher(comfy.model_patcher.ModelPatcher):  # type: ignore[misc]
    """Refuses what would have to change weights that are frozen into an engine."""

    def add_patches(
        self, patches: Any, strength_patch: float = 1.0, strength_model: float = 1.0
    ) -> Any:
        """LoRAs and merges."""
        if strength_patch == 0 and strength_model == 1:
            return []
        raise _frozen("A LoRA or merge")

    def add_hook_patches(self, *args: Any, **kwargs: Any) -> Any:
        """LoRAs by hooks."""
        raise _frozen("A scheduled LoRA")

    def get_key_patches(self, filter_prefix: str | None = None) -> Any:
        """What merges and exports read."""
        raise _frozen("A merge or export")


def _frozen(what: str) -> SettingError:
    return SettingError(
        f"{what} cannot work on a baked engine: its weights are frozen.",
        hint="Build the engine with the LoRA in it, or load the checkpoint and use the node "
        "TensorRT.",
    )


def _unload(patcher: Any, unpatch_all: bool = True) -> None:
    """The host takes the model out of memory: the engine goes with it."""
    if unpatch_all:
        room().pool.remove(patcher.model.diffusion_model.stem)


def _nobody(*args: Any) -> Tensor:
    raise AssertionError("there is no host behind a baked engine")


def place_of(device: Any) -> str:
    """A torch device as engines name it."""
    device = torch.device(device)
    return f"cuda:{device.index or 0}" if device.type == "cuda" else str(device)
