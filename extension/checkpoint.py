"""Checkpoint files to UNet weights: opened without reading data, tensors read as asked for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from .architecture import SUPPORTED, Architecture
from .detection import describe_foreign
from .diffusers_names import ldm_names, looks_like_diffusers
from .errors import BadFileError, UnsupportedModelError
from .fingerprint import FingerprintCache, Fingerprinter
from .tensor_source import NAMES, TensorSource, open_source

PREFIXES = (
    "model.diffusion_model.",
    "diffusion_model.",
    "model.model.diffusion_model.",
    "unet.",
    "model.",
    "",
)
EMA_PREFIX = "model_ema."
# What files carry beside weights, inside the UNet's prefix, without effect on the UNet.
MARKERS = re.compile(r"(^|\.)(scaled_fp8|v_pred|ztsnr|input_scale|scale_input|comfy_quant)$")
# Parts beside the UNet in a file whose UNet has no prefix.
OTHER_PARTS = re.compile(r"(model_ema|first_stage_model|vae|cond_stage_model|conditioner)\.")
SCALES = ("scale_weight", "weight_scale")


class Checkpoint(Mapping[str, Tensor]):
    """The UNet weights of a file: LDM name to tensor, read (and dequantised) when asked for."""

    def __init__(self, path: Path, source: TensorSource, *, ema: bool = False) -> None:
        self.path = path
        self.source = source
        self._raw, self._scales = _find_unet(path, source, ema=ema)
        self.shapes = {name: source.shapes[raw] for name, raw in self._raw.items()}

    @cached_property
    def architecture(self) -> Architecture:
        """Read from the shapes; raises UnsupportedModelError in words."""
        return Architecture.from_shapes(self.shapes)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that most of the weights have in the file."""
        counts: dict[torch.dtype, int] = {}
        for raw in self._raw.values():
            dtype = self.source.dtypes[raw]
            counts[dtype] = counts.get(dtype, 0) + 1
        return max(counts, key=lambda dtype: counts[dtype])

    def prediction_type(self) -> str | None:
        """``v`` where the file says so; None where the file does not say."""
        return "v" if any(name.endswith("v_pred") for name in self.source.shapes) else None

    def __getitem__(self, name: str) -> Tensor:
        raw = self._raw[name]
        tensor = self.source.read(raw)
        if tensor.dtype == torch.float64:
            return tensor.float()
        if tensor.dtype.itemsize > 1:
            return tensor
        scale = self._scales.get(name)
        # fp8 values are exact in fp16; a product with a scale is not, so it stays in fp32.
        return tensor.half() if scale is None else tensor.float() * self.source.read(scale).float()

    def __iter__(self) -> Iterator[str]:
        return iter(self._raw)

    def __len__(self) -> int:
        return len(self._raw)

    def fingerprint(self, cache: FingerprintCache | None = None) -> str:
        """Content fingerprint of the UNet weights; from ``cache`` where the file is unchanged."""
        known = cache.get(self.path) if cache else None
        if known:
            return known
        digest = fingerprint(self)
        if cache:
            cache.put(self.path, digest)
        return digest

    def close(self) -> None:
        """Release the file."""
        self.source.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def open_checkpoint(path: str | Path, *, ema: bool = False) -> Checkpoint:
    """Open a checkpoint or a bare UNet; no weights are read.

    Args:
        ema: use the averaged twins (``model_ema.*``) where the file has them.

    Raises:
        BadFileError: the file is missing, damaged, or holds code.
        UnsupportedModelError: it holds something else than an LDM UNet; says what.
    """
    path = Path(path)
    source = open_source(path)
    try:
        checkpoint = Checkpoint(path, source, ema=ema)
        _ = checkpoint.architecture
    except UnsupportedModelError as error:
        source.close()
        raise UnsupportedModelError(
            f"'{path.name}': {error.message}", hint=error.hint, details=error.details
        ) from error
    return checkpoint


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """Content fingerprint of weights by LDM name."""
    digest = Fingerprinter()
    for name in weights:
        tensor = weights[name]
        digest.add(name, NAMES[tensor.dtype], tuple(tensor.shape), tensor_bytes(tensor))
    return digest.hexdigest()


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor in C order."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data


def require_finite(name: str, tensor: Tensor) -> None:
    """Raise BadFileError, which names the weight, where it has NaN or inf."""
    if not bool(torch.isfinite(tensor).all()):
        raise BadFileError(
            f"The weight '{name}' holds NaN or infinite values.",
            hint="The file is broken, or a merge overflowed; use another file.",
        )


def _find_unet(
    path: Path, source: TensorSource, *, ema: bool
) -> tuple[dict[str, str], dict[str, str]]:
    """LDM name to raw name of every UNet weight, and of the scales of scaled fp8 weights."""
    prefix = _prefix(path, source)
    inside = {name.removeprefix(prefix): name for name in source.shapes if name.startswith(prefix)}
    inside = {
        name: raw
        for name, raw in inside.items()
        if not MARKERS.search(name) and (prefix or not OTHER_PARTS.match(name))
    }
    scales = {
        f"{name.rpartition('.')[0]}.weight": raw
        for name, raw in inside.items()
        if name.endswith(SCALES)
    }
    found = {name: raw for name, raw in inside.items() if not name.endswith(SCALES)}
    if looks_like_diffusers(found):
        names = ldm_names({name: source.shapes[raw] for name, raw in found.items()})
        found = {names[name]: raw for name, raw in found.items()}
        scales = {names[name]: raw for name, raw in scales.items()}
    if ema:
        found = {name: _ema_twin(name, raw, source) for name, raw in found.items()}
    return found, scales


def _ema_twin(name: str, raw: str, source: TensorSource) -> str:
    twin = EMA_PREFIX + "diffusion_model" + name.replace(".", "")
    return twin if twin in source.shapes else raw


def _prefix(path: Path, source: TensorSource) -> str:
    for prefix in PREFIXES:
        if f"{prefix}input_blocks.0.0.weight" in source.shapes:
            return prefix
        if f"{prefix}conv_in.weight" in source.shapes and any(
            name.startswith((f"{prefix}down_blocks.", f"{prefix}up_blocks."))
            and "attentions" in name
            for name in source.shapes
        ):
            return prefix
    raise UnsupportedModelError(
        f"It holds no Stable Diffusion UNet: it is {describe_foreign(source.shapes)}.",
        hint=SUPPORTED,
    )
