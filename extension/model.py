"""A checkpoint with its LoRAs: weights to serve, texts to encode, pictures to decode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from . import text_encoder
from .architecture import Architecture
from .checkpoint import open_checkpoint
from .errors import SettingError
from .files import sha256_file
from .fingerprint import FingerprintCache
from .lora import LoraFile, LoraMatch, LoraReport, MergedWeights, read_lora
from .sampler import Conditioning, SampleSettings
from .tensor_source import TensorSource
from .vae import VaeDecoder


@dataclass(frozen=True, kw_only=True)
class LoraChoice:
    """A LoRA file and its strength."""

    path: Path
    strength: float = 1.0

    @classmethod
    def parse(cls, text: str) -> LoraChoice:
        """``FILE`` or ``FILE:STRENGTH``; a colon inside the path (a drive) is none of these."""
        path, separator, number = text.rpartition(":")
        if not separator or Path(text).exists():
            return cls(path=Path(text))
        try:
            return cls(path=Path(path), strength=float(number))
        except ValueError as error:
            raise SettingError(
                f"'{text}' is neither a file nor FILE:STRENGTH.", hint="Write lora.safetensors:0.8."
            ) from error


class RawTensors(Mapping[str, Tensor]):
    """Every tensor of a file by its full name, read when asked for."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._source.shapes:
            raise KeyError(name)
        return self._source.read(name)

    def __contains__(self, name: object) -> bool:
        return name in self._source.shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._source.shapes)

    def __len__(self) -> int:
        return len(self._source.shapes)


class Model:
    """A checkpoint file opened for use; weights are read as they are needed."""

    def __init__(self, path: str | Path, *, ema: bool = False) -> None:
        self.checkpoint = open_checkpoint(path, ema=ema)
        self.raw = RawTensors(self.checkpoint.source)
        self._loras: dict[Path, tuple[LoraFile, LoraMatch]] = {}

    @property
    def architecture(self) -> Architecture:
        """The UNet's architecture."""
        return self.checkpoint.architecture

    def match(self, path: Path) -> LoraMatch:
        """The LoRA file matched to this model; read once."""
        path = path.resolve()
        if path not in self._loras:
            file = read_lora(path)
            self._loras[path] = (file, file.match(self.architecture))
        return self._loras[path][1]

    def merged(
        self, loras: Sequence[LoraChoice], dtype: torch.dtype | None = None
    ) -> MergedWeights:
        """The weights with ``loras`` merged, computed lazily."""
        pairs = [(self.match(lora.path), lora.strength) for lora in loras]
        return MergedWeights(self.checkpoint, pairs, dtype=dtype)

    def weights(
        self, loras: Sequence[LoraChoice], dtype: torch.dtype, device: str = "cpu"
    ) -> dict[str, Tensor]:
        """The merged weights as tensors of their own on ``device``."""
        merged = self.merged(loras, dtype)
        return {name: _own(merged[name], device) for name in merged}

    def reports(self, loras: Sequence[LoraChoice]) -> list[LoraReport]:
        """What each LoRA file holds for this model."""
        return [self.match(lora.path).report for lora in loras]

    def origin(
        self, loras: Sequence[LoraChoice], cache: FingerprintCache | None = None
    ) -> dict[str, str]:
        """Where merged weights come from: fingerprints, names and strengths."""
        facts = {
            "checkpoint": self.checkpoint.path.name,
            "checkpoint_fingerprint": self.checkpoint.fingerprint(cache),
        }
        for i, lora in enumerate(lora for lora in loras if lora.strength):
            facts[f"lora_{i}"] = f"{lora.path.name} x {lora.strength:g}"
            facts[f"lora_{i}_sha256"] = sha256_file(lora.path)
        return facts

    def conditioning(self, prompt: str, negative: str, settings: SampleSettings) -> Conditioning:
        """Both prompts through the checkpoint's text encoders, or stand-ins without any."""
        contexts, ys = [], []
        for text in (prompt, negative):
            encoded = text_encoder.encode(self.raw, text)
            if encoded is None:
                encoded = text_encoder.synthetic(self.architecture, text)
            contexts.append(encoded.context)
            ys.append(self._y(encoded, settings))
        return Conditioning(
            positive=contexts[0], negative=contexts[1], y_positive=ys[0], y_negative=ys[1]
        )

    def _y(self, encoded: text_encoder.Encoded, settings: SampleSettings) -> Tensor | None:
        if not self.architecture.adm_channels or encoded.pooled is None:
            return None
        width, height = settings.width, settings.height
        return text_encoder.size_embedding(self.architecture, encoded.pooled, width, height)

    def decode(self, latents: Tensor) -> Tensor:
        """Latents [B, 4, h, w] to pictures [B, 3, 8h, 8w] in [0, 1] with the file's VAE."""
        return VaeDecoder(self.raw, self.architecture.family)(latents.cpu())

    def close(self) -> None:
        """Release every file."""
        for file, _ in self._loras.values():
            file.close()
        self._loras.clear()
        self.checkpoint.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _own(tensor: Tensor, device: str) -> Tensor:
    """A contiguous tensor that does not lie in the file's pages."""
    moved = tensor.to(device).contiguous()
    return moved.clone() if moved.data_ptr() == tensor.data_ptr() else moved
