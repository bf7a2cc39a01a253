"""A host's live UNet module: its architecture, its weights by LDM name, and what forbids engines.

Everything is read from the module itself at the time of asking, so that in-memory merges count.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .architecture import Architecture
from .detection import detect
from .errors import UnsupportedModelError

ATTENTION = ("attn1", "attn2")
PLAIN = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
OURS = "engine_room"  # marks a forward function of our own
# Attributes of a layer that change what it computes, where they are set.
MARKS = {
    "_forward_hooks": "a hook",
    "_forward_pre_hooks": "a hook",
    "weight_function": "a weight that is patched on the fly",
    "bias_function": "a bias that is patched on the fly",
    "forge_online_loras": "a LoRA that is applied on the fly",
    "scale_weight": "a scaled fp8 weight",
}


def live_architecture(unet: nn.Module, *, resize: str = "before") -> Architecture:
    """The architecture of a live LDM UNet; head count and fp32 attention from its layers.

    Args:
        resize: where the host's up path resizes odd latents; see Architecture.

    Raises:
        UnsupportedModelError: it is something else, or its layers contradict each other.
    """
    shapes = {name: tuple(p.shape) for name, p in unet.named_parameters()}
    heads = {
        name: (int(module.heads), _precision(module))
        for name, module in unet.named_modules()
        if name.rpartition(".")[2] in ATTENTION and hasattr(module, "heads")
    }
    if not heads:
        return detect(shapes, resize=resize)
    fp32 = {precision for _, precision in heads.values()}
    if len(fp32) > 1:
        raise UnsupportedModelError("Some attention layers compute in fp32 and some do not.")
    counts = {count for count, _ in heads.values()}
    widths = {shapes[f"{name}.to_q.weight"][0] // count for name, (count, _) in heads.items()}
    options: dict[str, Any] = {"fp32_attention": fp32.pop(), "resize": resize}
    if len(counts) == len(widths) == 1:
        # Either way is the same model; the customary one lets hosts share engines.
        usual = detect(shapes, **options)
        if usual.num_heads in counts or usual.head_channels in widths:
            return usual
    if len(counts) == 1:
        return detect(shapes, num_heads=counts.pop(), **options)
    if len(widths) == 1:
        return detect(shapes, head_channels=widths.pop(), **options)
    first = next(iter(heads))
    raise UnsupportedModelError(
        f"The attention layers have neither one head count nor one head width ('{first}' first)."
    )


def _precision(attention: nn.Module) -> bool | None:
    if not hasattr(attention, "attn_precision"):
        return None
    precision: object = attention.attn_precision
    return precision is torch.float32


class LiveWeights(Mapping[str, Tensor]):
    """The parameters of a live module by LDM name, as they are at each access.

    Only weak references to the module are kept.
    """

    def __init__(self, unet: nn.Module, arch: Architecture) -> None:
        self._unet = weakref.ref(unet)
        self._names = tuple(arch.parameters())
        self._owners: dict[str, tuple[weakref.ref[nn.Module], str]] = {}
        self.refresh()

    def refresh(self) -> None:
        """Look the owners up again: a host may have replaced modules."""
        unet = self._unet()
        modules = {} if unet is None else dict(unet.named_modules())
        self._owners.clear()
        for name in self._names:
            owner, _, leaf = name.rpartition(".")
            if owner in modules:
                self._owners[name] = (weakref.ref(modules[owner]), leaf)

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor | None = self.get(name)
        if tensor is None:
            raise KeyError(name)
        return tensor

    def get(self, name: str, default: Any = None) -> Any:
        """As a dict's; every call of an engine asks for every weight."""
        owner = self._owners.get(name)
        module = None if owner is None else owner[0]()
        tensor = None if owner is None or module is None else module._parameters.get(owner[1])
        return default if tensor is None else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def problem(self, device: torch.device | None = None) -> str | None:
        """Why no engine may read these weights now, in words that name the layer; None if one may.

        Every parameter must be there, plain, and the only thing its layer computes with.

        Args:
            device: of the call; a model that is only partly there is short of memory already.
        """
        unet = self._unet()
        if unet is None:
            return "the model is gone"
        for name, module in unet.named_modules():
            found = module_problem(module)
            if found:
                return f"{found} in '{name or 'the UNet'}'"
        live = dict(unet.named_parameters())
        away = next((n for n, p in live.items() if device not in (None, p.device)), None)
        if away:
            return f"'{away}' is not on {device}: the host is saving memory"
        missing = next((name for name in self._names if name not in live), None)
        if missing:
            return f"the weight '{missing}' is not an ordinary parameter now"
        if len(live) != len(self._names):
            extra = next(name for name in sorted(live) if name not in set(self._names))
            return f"there is the additional weight '{extra}'"
        return None


def module_problem(module: nn.Module) -> str | None:
    """What makes a layer compute something else than its weights say."""
    forward = module.__dict__.get("forward")
    if forward is not None and not hasattr(forward, OURS) and not _is_idle_hypertile(module):
        return "a replaced forward function"
    for name, words in MARKS.items():
        if _is_set(getattr(module, name, None)):
            return words
    if getattr(module, "padding_mode", "zeros") != "zeros":
        return "tiling"
    return next(filter(None, map(parameter_problem, module._parameters.items())), None)


def _is_idle_hypertile(module: nn.Module) -> bool:
    """Whether A1111's HyperTile wrapped this layer earlier and is switched off now."""
    params = getattr(module, "__webui_hypertile_params", None)
    original = getattr(getattr(params, "forward", None), "__self__", None)
    return params is not None and not params.enabled and original is module


def _is_set(value: object) -> bool:
    return value is not None if isinstance(value, Tensor) else bool(value)


def parameter_problem(item: tuple[str, Tensor | None]) -> str | None:
    """Why a parameter cannot be read as it is."""
    name, parameter = item
    if parameter is None:
        return None
    if type(parameter) not in (nn.Parameter, Tensor) or parameter.dtype not in PLAIN:
        return f"a quantised {name}"
    return f"a {name} that is not loaded" if parameter.device.type == "meta" else None
