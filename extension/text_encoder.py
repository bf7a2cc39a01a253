"""Prompts to context with the text encoders inside a checkpoint (CLIP and OpenCLIP)."""

from __future__ import annotations

import gzip
import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .architecture import Architecture
from .errors import MissingPackageError
from .model_layout import CLIP_L, OPEN_CLIP, POSITIONS, SDXL_G, SDXL_L

CHUNK = 75
HEAD_WIDTH = 64
MERGES = 48894
SIZE_WIDTH = 256
INSTALL = (
    "python -m pip install transformers tokenizers && python -m pip install --no-deps clip-anytorch"
)
# OpenCLIP's layer names to those of transformers' CLIPTextModel.
OPEN_CLIP_LAYERS = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A prompt: context [1, 77 n, D], and the pooled embedding [1, P] where there is one."""

    context: Tensor
    pooled: Tensor | None


def encode(tensors: Mapping[str, Tensor], prompt: str) -> Encoded | None:
    """Encode ``prompt`` with the text encoders among ``tensors`` (full names).

    SD1.x takes the last hidden state of CLIP, normalised; SD2.x that of OpenCLIP's last layer
    but one, normalised; SDXL both encoders' last layer but one, not normalised.

    Returns:
        None where the file has no text encoder.

    Raises:
        MissingPackageError: a package is missing; the hint has the command.
    """
    if f"{SDXL_G}token_embedding.weight" in tensors:
        small = _Encoder(_clip_state(tensors, SDXL_L), gelu="quick_gelu")
        large = _Encoder(_open_clip_state(tensors, SDXL_G), gelu="gelu")
        first = small.run(prompt, skip=1, norm=False)
        second = large.run(prompt, skip=1, norm=False)
        projection = tensors[f"{SDXL_G}text_projection"].float()
        context = torch.cat([first[0], second[0]], dim=-1)
        return Encoded(context=context, pooled=second[1] @ projection)
    if f"{OPEN_CLIP}token_embedding.weight" in tensors:
        encoder = _Encoder(_open_clip_state(tensors, OPEN_CLIP), gelu="gelu", pad=0)
        return Encoded(context=encoder.run(prompt, skip=1, norm=True)[0], pooled=None)
    if f"{CLIP_L}embeddings.token_embedding.weight" in tensors:
        encoder = _Encoder(_clip_state(tensors, CLIP_L), gelu="quick_gelu")
        return Encoded(context=encoder.run(prompt, skip=0, norm=True)[0], pooled=None)
    return None


def size_embedding(arch: Architecture, pooled: Tensor, width: int, height: int) -> Tensor:
    """SDXL's ``y``: pooled text and sinusoids of size, crop and target (for the refiner: size,
    crop and aesthetic score), each 256 wide; [1, A]."""
    numbers = [height, width, 0, 0, height, width]
    if arch.family == "refiner":
        numbers = [height, width, 0, 0, 6]
    half = SIZE_WIDTH // 2
    frequencies = torch.exp(-math.log(10000.0) * torch.arange(half) / half)
    angles = torch.tensor(numbers, dtype=torch.float32)[:, None] * frequencies
    sizes = torch.cat([angles.cos(), angles.sin()], dim=-1).reshape(1, -1)
    return torch.cat([pooled, sizes], dim=-1)


def synthetic(arch: Architecture, text: str) -> Encoded:
    """A stand-in for models without a text encoder: noise that depends on the text alone."""
    seed = int.from_bytes(text.encode()[:7].ljust(7, b"\0"), "little") ^ len(text)
    generator = torch.Generator().manual_seed(seed)
    context = torch.randn(1, POSITIONS, arch.context_dim, generator=generator)
    sizes = 5 if arch.family == "refiner" else 6
    width = max(arch.adm_channels - sizes * SIZE_WIDTH, 1)
    return Encoded(context=context, pooled=torch.randn(1, width, generator=generator))


class _Encoder:
    """One CLIP text model from transformers, with the file's weights, in fp32."""

    def __init__(self, state: Mapping[str, Tensor], *, gelu: str, pad: int | None = None) -> None:
        try:
            from transformers import CLIPTextConfig, CLIPTextModel
        except ImportError as error:
            raise MissingPackageError.of("transformers", "for prompts", INSTALL) from error
        width = state["final_layer_norm.weight"].shape[0]
        layers = 1 + max(int(n.split(".")[2]) for n in state if n.startswith("encoder.layers."))
        config = CLIPTextConfig(
            hidden_size=width,
            intermediate_size=state["encoder.layers.0.mlp.fc1.weight"].shape[0],
            num_hidden_layers=layers,
            num_attention_heads=max(width // HEAD_WIDTH, 1),
            vocab_size=state["embeddings.token_embedding.weight"].shape[0],
            hidden_act=gelu,
        )
        self._model = CLIPTextModel(config).eval()
        own = set(self._model.state_dict())
        # Newer versions of transformers dropped this prefix from the names.
        prefix = "text_model." if any(name.startswith("text_model.") for name in own) else ""
        state = {prefix + name: tensor.float() for name, tensor in state.items()}
        state = {name: tensor for name, tensor in state.items() if name in own}
        missing = self._model.load_state_dict(state, strict=False).missing_keys
        if [name for name in missing if "position_ids" not in name]:
            raise KeyError(f"the text encoder lacks {missing[:3]}")
        inner = getattr(self._model, "text_model", self._model)
        self._norm = inner.final_layer_norm
        self._pad = pad

    @torch.no_grad()
    def run(self, prompt: str, *, skip: int, norm: bool) -> tuple[Tensor, Tensor]:
        """Hidden states [1, 77 n, D] of the layer ``skip`` from the end, and the first chunk's
        end-of-text state of the last layer [1, D]."""
        ids = torch.tensor(_chunks(prompt, self._pad))
        out = self._model(input_ids=ids, output_hidden_states=True)
        hidden = out.hidden_states[-1 - skip]
        last = self._norm(out.hidden_states[-1])
        end = ids[0].tolist().index(end_token())
        if norm:
            hidden = self._norm(hidden)
        return hidden.reshape(1, -1, hidden.shape[-1]), last[:1, end]


def _clip_state(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): tensors[n] for n in tensors if n.startswith(prefix)}


def _open_clip_state(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """OpenCLIP's names to CLIPTextModel's; the joint q, k, v projection is cut in three."""
    theirs = _clip_state(tensors, prefix)
    state = {
        "embeddings.token_embedding.weight": theirs["token_embedding.weight"],
        "embeddings.position_embedding.weight": theirs["positional_embedding"],
        "final_layer_norm.weight": theirs["ln_final.weight"],
        "final_layer_norm.bias": theirs["ln_final.bias"],
    }
    for name, tensor in theirs.items():
        parts = name.split(".")
        if parts[:2] != ["transformer", "resblocks"]:
            continue
        layer, rest = f"encoder.layers.{parts[2]}", ".".join(parts[3:])
        if rest.startswith("attn.in_proj_"):
            leaf = rest.removeprefix("attn.in_proj_")
            for part, piece in zip("qkv", tensor.chunk(3), strict=True):
                state[f"{layer}.self_attn.{part}_proj.{leaf}"] = piece
        else:
            module, _, leaf = rest.rpartition(".")
            state[f"{layer}.{OPEN_CLIP_LAYERS[module]}.{leaf}"] = tensor
    return state


def _chunks(prompt: str, pad: int | None) -> list[list[int]]:
    """Token ids in rows of 77: start, up to 75 tokens, end; padded with end or ``pad``."""
    start, end = start_token(), end_token()
    ids = _tokenizer().encode(prompt).ids
    rows = [ids[i : i + CHUNK] for i in range(0, len(ids), CHUNK)] or [[]]
    fill = end if pad is None else pad
    return [[start, *row, end, *[fill] * (CHUNK - len(row))] for row in rows]


def start_token() -> int:
    """Id of the start-of-text token."""
    return int(_tokenizer().token_to_id("<|startoftext|>"))


def end_token() -> int:
    """Id of the end-of-text token."""
    return int(_tokenizer().token_to_id("<|endoftext|>"))


@lru_cache(maxsize=1)
def _tokenizer() -> Any:
    """CLIP's byte-pair encoding, from the merges that the package clip-anytorch ships."""
    spec = importlib.util.find_spec("clip")
    folders = list(spec.submodule_search_locations or []) if spec else []
    merges_file = next(
        (p for f in folders if (p := Path(f) / "bpe_simple_vocab_16e6.txt.gz").is_file()), None
    )
    try:
        from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
    except ImportError as error:
        raise MissingPackageError.of("tokenizers", "for prompts", INSTALL) from error
    if merges_file is None:
        raise MissingPackageError.of("clip-anytorch", "for prompts", INSTALL)
    lines = gzip.decompress(merges_file.read_bytes()).decode("utf-8").split("\n")
    merges = [(a, b) for a, b in (line.split() for line in lines[1 : MERGES + 1])]
    # GPT-2 names bytes with printable characters; the vocabulary starts with all 256 of them,
    # the printable ones first.
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [b for b in range(256) if b not in kept]
    letters = [*map(chr, kept), *(chr(256 + i) for i in range(len(moved)))]
    words = [*letters, *(f"{c}</w>" for c in letters), *(a + b for a, b in merges)]
    words += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, end_of_word_suffix="</w>", fuse_unk=False)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.NFC(),
            normalizers.Replace(Regex(r"\s+"), " "),
            normalizers.Strip(),
            normalizers.Lowercase(),
        ]
    )
    pattern = Regex(r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer
