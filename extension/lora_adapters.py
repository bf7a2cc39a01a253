"""What a LoRA-like module adds to a weight, in fp32.

Formulas: LoRA (Hu et al., arXiv:2106.09685); LoHa, LoKr, LoCon and Tucker forms (LyCORIS,
Yeh et al., arXiv:2309.14859); DoRA (Liu et al., arXiv:2402.09353); IA3 (arXiv:2205.05638).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import LoraError

# File suffix to part, for a module's weight; longer suffixes are tried first.
PARTS = {
    "lora_up.weight": "up",
    "lora_down.weight": "down",
    "lora_mid.weight": "mid",
    "lora_B.weight": "up",
    "lora_A.weight": "down",
    "lora_B.default.weight": "up",
    "lora_A.default.weight": "down",
    "lora_B": "up",
    "lora_A": "down",
    "lora.up.weight": "up",
    "lora.down.weight": "down",
    "lora_layer.up.weight": "up",
    "lora_layer.down.weight": "down",
    "lora_linear_layer.up.weight": "up",
    "lora_linear_layer.down.weight": "down",
    "up.weight": "up",
    "down.weight": "down",
    "hada_w1_a": "w1_a",
    "hada_w1_b": "w1_b",
    "hada_w2_a": "w2_a",
    "hada_w2_b": "w2_b",
    "hada_t1": "t1",
    "hada_t2": "t2",
    "lokr_w1": "k1",
    "lokr_w1_a": "k1_a",
    "lokr_w1_b": "k1_b",
    "lokr_w2": "k2",
    "lokr_w2_a": "k2_a",
    "lokr_w2_b": "k2_b",
    "lokr_t2": "kt2",
    "diff": "diff",
    "diff_b": "bias",
    "w_norm": "diff",
    "b_norm": "bias",
    "on_input": "on_input",
    "weight": "ia3",
    "alpha": "alpha",
    "dora_scale": "dora",
    "lora_magnitude_vector": "dora",
    "lora_magnitude_vector.weight": "dora",
    "lora_magnitude_vector.default.weight": "dora",
}
SUFFIXES = sorted(PARTS, key=len, reverse=True)
KINDS = (
    ("lora", {"up", "down"}),
    ("loha", {"w1_a", "w1_b", "w2_a", "w2_b"}),
    ("lokr", {"k1", "k2"}),
    ("lokr", {"k1_a", "k1_b", "k2"}),
    ("lokr", {"k1", "k2_a", "k2_b"}),
    ("lokr", {"k1_a", "k1_b", "k2_a", "k2_b"}),
    ("full", {"diff"}),
    ("ia3", {"ia3", "on_input"}),
    ("bias", {"bias"}),
)


def split_key(key: str) -> tuple[str, str] | None:
    """``module.suffix`` to (module, part); None where the suffix is unknown.

    Old diffusers files write ``to_q_lora.down.weight``: the module is then ``to_q``.
    """
    for suffix in SUFFIXES:
        if key.endswith(f".{suffix}"):
            return key.removesuffix(f".{suffix}").removesuffix("_lora"), PARTS[suffix]
    return None


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """One module of a file.

    Attributes:
        kind: ``lora``, ``loha``, ``lokr``, ``full``, ``ia3`` or ``bias``.
        parts: tensors by part name, as stored.
    """

    name: str
    kind: str
    parts: Mapping[str, Tensor]

    def delta(self, weight: Tensor) -> Tensor:
        """What is added to ``weight`` (fp32, any shape) at strength 1; never changes it.

        Raises:
            LoraError: the parts do not fit the weight; names the module.
        """
        try:
            change = self._change(weight)
        except (RuntimeError, ValueError, IndexError) as error:
            raise LoraError(
                f"The LoRA module '{self.name}' does not fit its weight of shape "
                f"{tuple(weight.shape)}."
            ) from error
        dora = self._part("dora")
        return change if dora is None else _decompose(weight, change, dora)

    def bias_delta(self) -> Tensor | None:
        """What is added to the module's bias at strength 1, if anything."""
        bias = self._part("bias")
        return None if bias is None else bias.reshape(-1)

    @property
    def inputs(self) -> int | None:
        """Width of the module's input, where the kind shows it."""
        down = self.parts.get("down")
        if down is not None:
            return int(down.shape[1])
        if self.kind == "loha" and "t1" not in self.parts:
            return int(self.parts["w1_b"].shape[1])
        if self.kind == "full" and self.parts["diff"].ndim > 1:
            return int(self.parts["diff"].shape[1])
        return None

    def _part(self, name: str) -> Tensor | None:
        part = self.parts.get(name)
        return None if part is None else part.float()

    def _change(self, weight: Tensor) -> Tensor:
        builders = {"lora": self._lora, "loha": self._loha, "lokr": self._lokr}
        if self.kind in builders:
            return _fit(builders[self.kind](), weight)
        if self.kind == "full":
            return _fit(self.parts["diff"].float(), weight)
        if self.kind == "ia3":
            return self._ia3(weight)
        return torch.zeros_like(weight)

    def _scale(self, rank: int) -> float:
        alpha = self.parts.get("alpha")
        return 1.0 if alpha is None else float(alpha) / rank

    def _lora(self) -> Tensor:
        up, down = self.parts["up"].float(), self.parts["down"].float()
        scale, mid = self._scale(down.shape[0]), self._part("mid")
        if mid is None:
            product = up.flatten(1) @ down.flatten(1)
        else:
            product = torch.einsum("pq...,op,qi->oi...", mid, up.flatten(1), down.flatten(1))
        return product * scale

    def _loha(self) -> Tensor:
        first = _factor(self._part("w1_a"), self._part("w1_b"), self._part("t1"))
        second = _factor(self._part("w2_a"), self._part("w2_b"), self._part("t2"))
        return first * second * self._scale(self.parts["w1_b"].shape[0])

    def _lokr(self) -> Tensor:
        rank = None
        first, second = self._part("k1"), self._part("k2")
        if first is None:
            rank = self.parts["k1_b"].shape[0]
            first = _factor(self._part("k1_a"), self._part("k1_b"), None)
        if second is None:
            rank = self.parts["k2_b"].shape[0]
            second = _factor(self._part("k2_a"), self._part("k2_b"), self._part("kt2"))
        first = first.reshape(*first.shape, *[1] * (second.ndim - first.ndim))
        product = torch.kron(first, second.contiguous())
        return product if rank is None else product * self._scale(rank)

    def _ia3(self, weight: Tensor) -> Tensor:
        factor = self.parts["ia3"].float().reshape(-1)
        axis = 1 if bool(self.parts["on_input"]) else 0
        shape = [1] * weight.ndim
        shape[axis] = -1
        return weight * factor.reshape(shape)


def _factor(a: Tensor | None, b: Tensor | None, core: Tensor | None) -> Tensor:
    """a @ b, or the Tucker form over a core [r, r, k, k] with a [r, out] and b [r, in]."""
    if a is None or b is None:
        raise ValueError("a factor is missing")
    if core is None:
        return a @ b
    return torch.einsum("ij...,jr,ip->pr...", core, b, a)


def _fit(delta: Tensor, weight: Tensor) -> Tensor:
    """Give ``delta`` the weight's shape; inputs that the LoRA does not know get zeros.

    An inpainting model's first convolution has more input channels than the LoRA's base.
    """
    if delta.numel() == weight.numel():
        return delta.reshape(weight.shape)
    if delta.ndim == 2 and weight.ndim == 4:
        delta = delta.reshape(delta.shape[0], -1, *weight.shape[2:])
    matches = delta.shape[:1] == weight.shape[:1] and delta.shape[2:] == weight.shape[2:]
    if weight.ndim != 4 or not matches or delta.shape[1] > weight.shape[1]:
        raise ValueError("the shapes do not fit")
    padded = torch.zeros_like(weight)
    padded[:, : delta.shape[1]] = delta
    return padded


def _decompose(weight: Tensor, change: Tensor, magnitude: Tensor) -> Tensor:
    """DoRA: the merged weight, normalised along its output (or input) axis, times magnitude."""
    merged = weight + change
    on_output = magnitude.numel() == weight.shape[0] and (
        magnitude.ndim == 1 or magnitude.shape[0] == weight.shape[0]
    )
    axis = 0 if on_output else 1
    others = [i for i in range(weight.ndim) if i != axis]
    norm = torch.linalg.vector_norm(merged, dim=others, keepdim=True)
    norm = norm + torch.finfo(torch.float32).eps
    shape = [1] * weight.ndim
    shape[axis] = -1
    decomposed: Tensor = merged * (magnitude.reshape(shape) / norm)
    return decomposed - weight


def make_adapter(name: str, parts: Mapping[str, Tensor]) -> Adapter | None:
    """The adapter that ``parts`` make up; None where they make none."""
    present = set(parts) - {"alpha", "dora", "mid", "t1", "t2", "kt2"}
    for kind, needed in KINDS:
        if needed <= present and present - needed <= {"bias"}:
            return Adapter(name=name, kind=kind, parts=dict(parts))
    return None
