"""LoRA files: what they are for, and weights with any number of them merged."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .architecture import Architecture
from .detection import describe_foreign
from .errors import BadFileError, LoraError, SettingError, WrongBaseError
from .lora_adapters import Adapter, make_adapter, split_key
from .lora_names import CONTEXT_BASES, CROSS_ATTENTION, foreign_base, is_text_encoder, resolve
from .tensor_source import TensorSource, open_source


@dataclass(frozen=True, kw_only=True)
class LoraReport:
    """What a file holds for a model.

    Attributes:
        file: its name.
        applied: UNet modules that are merged.
        text_encoder: modules for text encoders, which are the host's business.
        unknown: keys that fit nothing: they have no effect.
    """

    file: str
    applied: int
    text_encoder: int
    unknown: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """For people."""
        text = f"{self.file}: {self.applied} UNet modules"
        if self.text_encoder:
            text += f", {self.text_encoder} text-encoder modules left to the host"
        if self.unknown:
            sample = ", ".join(self.unknown[:3])
            text += f", {len(self.unknown)} unknown keys without effect ({sample})"
        return text

    def to_json(self) -> dict[str, Any]:
        """The fields as a JSON object."""
        return {**asdict(self), "unknown": list(self.unknown)}


@dataclass(frozen=True, kw_only=True)
class LoraMatch:
    """A file matched to an architecture: adapters by LDM module, and the report."""

    adapters: Mapping[str, Adapter]
    report: LoraReport


class LoraFile:
    """A LoRA file, read lazily."""

    def __init__(self, path: Path, source: TensorSource) -> None:
        self.path = path
        self.source = source
        self.modules: dict[str, dict[str, str]] = {}
        self.unknown: list[str] = []
        for key in source.shapes:
            split = split_key(key)
            if split is None:
                self.unknown.append(key)
                continue
            self.modules.setdefault(split[0], {})[split[1]] = key
        if not any(self._is_adapter(parts) for parts in self.modules.values()):
            raise BadFileError(
                f"'{path.name}' is no LoRA: it is {describe_foreign(source.shapes)}.",
                hint="Choose a LoRA, LoCon, LoHa, LoKr or DoRA file.",
            )

    @staticmethod
    def _is_adapter(parts: Mapping[str, str]) -> bool:
        return bool(set(parts) - {"ia3", "alpha", "dora", "on_input"}) or "on_input" in parts

    def adapter(self, module: str) -> Adapter | None:
        """The module's adapter; None where its keys make up none."""
        parts = {part: self.source.read(key) for part, key in self.modules[module].items()}
        return make_adapter(module, parts)

    def base(self) -> str | None:
        """The family this file was made for, where names or widths tell."""
        for module, parts in self.modules.items():
            base = foreign_base(module)
            if base:
                return base
            if CROSS_ATTENTION.search(module) and not is_text_encoder(module):
                width = self._input_width(parts)
                if width in CONTEXT_BASES:
                    return CONTEXT_BASES[width]
        return None

    def _input_width(self, parts: Mapping[str, str]) -> int | None:
        for part, axis in (("down", 1), ("w1_b", 1), ("diff", 1)):
            if part in parts and len(self.source.shapes[parts[part]]) > axis:
                return self.source.shapes[parts[part]][axis]
        return None

    def match(self, arch: Architecture) -> LoraMatch:
        """Resolve the file's modules against ``arch``.

        Raises:
            WrongBaseError: it was made for another base model; names both.
        """
        self._check_base(arch)
        adapters: dict[str, Adapter] = {}
        unknown, text_encoder = list(self.unknown), 0
        shapes = arch.parameters()
        for module, parts in self.modules.items():
            target = resolve(module, arch)
            if target is None and is_text_encoder(module):
                text_encoder += 1
                continue
            adapter = None if target is None else self.adapter(module)
            if adapter is None or target is None:
                unknown.extend(parts.values())
                continue
            self._check_fit(adapter, target, shapes, arch)
            if target in adapters:
                raise LoraError(f"'{self.path.name}' names the module '{target}' twice.")
            adapters[target] = adapter
        if not adapters and not text_encoder:
            raise WrongBaseError(
                f"'{self.path.name}' fits no module of this model, which is {arch.label}."
            )
        report = LoraReport(
            file=self.path.name,
            applied=len(adapters),
            text_encoder=text_encoder,
            unknown=tuple(unknown),
        )
        return LoraMatch(adapters=adapters, report=report)

    def _check_base(self, arch: Architecture) -> None:
        base = self.base()
        known = CONTEXT_BASES.get(arch.context_dim)
        if base is not None and base != known:
            raise WrongBaseError(
                f"'{self.path.name}' was made for {base}; this model is {arch.label}."
            )

    def _check_fit(
        self,
        adapter: Adapter,
        target: str,
        shapes: Mapping[str, tuple[int, ...]],
        arch: Architecture,
    ) -> None:
        weight = shapes[f"{target}.weight"]
        padded = target == "input_blocks.0.0"
        if adapter.inputs is not None and len(weight) > 1:
            expected = weight[1]
            fitting = (expected, math.prod(weight[1:]))
            if adapter.inputs not in fitting and not (padded and adapter.inputs < expected):
                raise WrongBaseError(
                    f"'{self.path.name}' was made for another model than {arch.label}: "
                    f"'{target}' takes {expected} channels, the LoRA {adapter.inputs}."
                )
        if "bias" in adapter.parts and f"{target}.bias" not in shapes:
            raise LoraError(
                f"'{self.path.name}' adds a bias to '{target}', which has none in this model.",
                hint="Engines cannot follow that; use the host without an engine for this LoRA.",
            )

    def close(self) -> None:
        """Release the file."""
        self.source.close()


def read_lora(path: str | Path) -> LoraFile:
    """Open a LoRA file.

    Raises:
        BadFileError: missing, damaged, holding code, or no LoRA; says what it is.
    """
    path = Path(path)
    return LoraFile(path, open_source(path))


class MergedWeights(Mapping[str, Tensor]):
    """Weights with LoRAs merged, computed when asked for.

    Each is W + sum of strength x delta in fp32, every delta taken from the pristine W, then
    rounded once to W's dtype (or ``dtype``): the order does not matter up to rounding, and
    without LoRAs the tensors are the base's own, bit for bit.

    Args:
        base: LDM name to tensor.
        loras: matches with their strengths; zero strengths are dropped.
    """

    def __init__(
        self,
        base: Mapping[str, Tensor],
        loras: Sequence[tuple[LoraMatch, float]],
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        for match, strength in loras:
            if not math.isfinite(strength):
                raise SettingError(
                    f"The strength of '{match.report.file}' is {strength}; use a finite number."
                )
        self.base = base
        self.dtype = dtype
        self._changes: dict[str, list[tuple[Adapter, float]]] = {}
        for match, strength in loras:
            for target, adapter in match.adapters.items():
                if strength:
                    self._add(target, adapter, strength)

    def _add(self, target: str, adapter: Adapter, strength: float) -> None:
        if adapter.kind != "bias":
            self._changes.setdefault(f"{target}.weight", []).append((adapter, strength))
        if "bias" in adapter.parts:
            self._changes.setdefault(f"{target}.bias", []).append((adapter, strength))

    @property
    def touched(self) -> frozenset[str]:
        """Names of the tensors that differ from the base."""
        return frozenset(self._changes)

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.base[name]
        dtype = self.dtype or tensor.dtype
        changes = self._changes.get(name)
        if not changes:
            return tensor.to(dtype)
        weight = tensor.float()
        merged = weight.clone()
        for adapter, strength in changes:
            delta = adapter.bias_delta() if name.endswith(".bias") else adapter.delta(weight)
            if delta is None or delta.shape != weight.shape:
                raise LoraError(f"The LoRA module '{adapter.name}' does not fit '{name}'.")
            merged += strength * delta
        return merged.to(dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.base)

    def __len__(self) -> int:
        return len(self.base)
