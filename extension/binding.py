"""Host tensors to engine inputs: by pointer where everything fits, else an accounted copy.

An input is *bound* when the engine reads the host's own memory; pointer, dtype, device, shape,
strides and alignment are compared before every call, so contents need no check. It is *staged*
when a copy in the engine's dtype and layout is needed; a copy is valid for one weights epoch.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .engine.interface import Engine, TensorSpec
from .errors import EngineError, MemoryShortError
from .memory import shortfall

ALIGNMENT = 256
TORCH_DTYPES = {"fp16": torch.float16, "fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class BindingReport:
    """What one refresh did: counts of inputs by kind, pointers changed, bytes of copies."""

    bound: int
    staged: int
    changed: int
    staged_bytes: int


@dataclass
class _Staged:
    copy: Tensor
    source: weakref.ref[Tensor]
    pointer: int
    epoch: Hashable


class _Seen:
    """What a weight was at the last refresh: enough to tell that nothing changed."""

    __slots__ = ("dtype", "epoch", "pointer", "ref", "stride")

    def __init__(self, tensor: Tensor, epoch: Hashable) -> None:
        self.ref = weakref.ref(tensor)
        self.pointer, self.dtype, self.stride = tensor.data_ptr(), tensor.dtype, tensor.stride()
        self.epoch = epoch

    def same(self, tensor: Tensor | None) -> bool:
        return (
            tensor is not None
            and self.ref() is tensor
            and self.pointer == tensor.data_ptr()
            and self.dtype is tensor.dtype
            and self.stride == tensor.stride()
        )


class _Snapshot:
    """All weights of one refresh, to compare with at the next call: some 700 of them, each call."""

    def __init__(self, seen: Mapping[str, _Seen], epoch: Hashable, report: BindingReport) -> None:
        self._known = [(name, weight.same) for name, weight in seen.items()]
        self._epoch = epoch
        self.report = report

    def holds(self, weights: Mapping[str, Tensor], epoch: Hashable) -> bool:
        if self.report.staged and self._epoch != epoch:
            return False
        get = weights.get
        return all(same(get(name)) for name, same in self._known)


@dataclass
class _State:
    snapshot: _Snapshot | None = None
    seen: dict[str, _Seen] = field(default_factory=dict)
    staged: dict[str, _Staged] = field(default_factory=dict)
    staged_bytes: int = 0
    pointers: dict[str, int] = field(default_factory=dict)

    def hold(self, name: str, entry: _Staged) -> None:
        self.drop(name)
        self.staged[name] = entry
        self.staged_bytes += _nbytes(entry.copy)

    def drop(self, name: str) -> None:
        held = self.staged.pop(name, None)
        if held is not None:
            self.staged_bytes -= _nbytes(held.copy)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def fits(tensor: Tensor, spec: TensorSpec, device: torch.device) -> bool:
    """Whether the engine can read ``tensor``'s memory as it is."""
    if tensor.dtype != TORCH_DTYPES[spec.dtype] or tuple(tensor.shape) != spec.shape:
        return False
    if tensor.device != device or type(tensor) not in (Tensor, torch.nn.Parameter):
        return False
    layout = torch.channels_last if spec.format == "hwc8" else torch.contiguous_format
    aligned = device.type == "cpu" or tensor.data_ptr() % ALIGNMENT == 0
    return aligned and tensor.is_contiguous(memory_format=layout)


def stage(tensor: Tensor, spec: TensorSpec, device: torch.device, out: Tensor | None) -> Tensor:
    """Copy ``tensor`` in the engine's dtype and layout, into ``out`` where there is one."""
    layout = torch.channels_last if spec.format == "hwc8" else torch.contiguous_format
    if out is None:
        out = torch.empty(
            spec.shape, dtype=TORCH_DTYPES[spec.dtype], device=device, memory_format=layout
        )
    return out.copy_(tensor)


class Binding:
    """The weights of one loaded engine.

    Args:
        engine: the engine to bind.
        device: where it runs.
        staging_budget: bytes of copies allowed; None is no limit.
    """

    def __init__(
        self, engine: Engine, device: torch.device, *, staging_budget: int | None = None
    ) -> None:
        self.engine = engine
        self.device = device
        self.staging_budget = staging_budget
        self._state = _State()

    def refresh(self, weights: Mapping[str, Tensor], epoch: Hashable) -> BindingReport:
        """Make every weight input read ``weights`` as they are now.

        Cheap when nothing changed: one comparison per input. Copies are redone when ``epoch``,
        or the tensor behind them, changed.

        Raises:
            EngineError: a weight is missing or has another shape; the engine must not run.
            MemoryShortError: copies exceed the budget or the memory; none is kept.
        """
        snapshot, self._state.snapshot = self._state.snapshot, None
        if snapshot is None or not snapshot.holds(weights, epoch):
            try:
                report = self._bind(weights, epoch)
            except MemoryShortError:
                self.release()
                raise
            except torch.cuda.OutOfMemoryError as error:
                self.release()
                raise MemoryShortError(shortfall(error)) from error
            snapshot = _Snapshot(self._state.seen, epoch, replace(report, changed=0))
            self._state.snapshot = snapshot
            return report
        self._state.snapshot = snapshot
        return snapshot.report

    def _bind(self, weights: Mapping[str, Tensor], epoch: Hashable) -> BindingReport:
        changed: dict[str, Tensor] = {}
        seen: dict[str, _Seen] = {}
        for name, spec in self.engine.weights.items():
            known = self._state.seen.get(name)
            source = weights.get(name)
            is_copied = name in self._state.staged
            if known and known.same(source) and (not is_copied or known.epoch == epoch):
                continue
            source = _pick(source, name, spec)
            tensor = source
            if fits(source, spec, self.device):
                self._state.drop(name)
            else:
                tensor = self._stage(name, source, spec, epoch)
            seen[name] = _Seen(source, epoch)
            if self._state.pointers.get(name) != tensor.data_ptr():
                changed[name] = tensor
        if changed:
            self.engine.bind(changed)
            self._state.pointers.update({n: t.data_ptr() for n, t in changed.items()})
        self._state.seen.update(seen)
        staged = len(self._state.staged)
        return BindingReport(
            bound=len(self.engine.weights) - staged,
            staged=staged,
            changed=len(changed),
            staged_bytes=self.staged_bytes,
        )

    @property
    def staged_bytes(self) -> int:
        """Bytes of the copies that are held."""
        return self._state.staged_bytes

    def release(self) -> None:
        """Drop every copy."""
        self._state = _State()

    def _stage(self, name: str, tensor: Tensor, spec: TensorSpec, epoch: Hashable) -> Tensor:
        held = self._state.staged.get(name)
        if held is not None:
            same = held.source() is tensor and held.pointer == tensor.data_ptr()
            if same and held.epoch == epoch:
                return held.copy
        else:
            self._check_budget(name, spec)
        # Hosts switch inference mode on, and a copy made in it could not be changed outside.
        with torch.inference_mode(False), torch.no_grad():
            copy = stage(tensor.detach(), spec, self.device, held.copy if held else None)
        self._state.hold(name, _Staged(copy, weakref.ref(tensor), tensor.data_ptr(), epoch))
        return copy

    def _check_budget(self, name: str, spec: TensorSpec) -> None:
        if self.staging_budget is None:
            return
        size = torch.Size(spec.shape).numel() * TORCH_DTYPES[spec.dtype].itemsize
        if self.staged_bytes + size > self.staging_budget:
            raise MemoryShortError(
                f"Copies of the weights would exceed the {self.staging_budget / 1e6:.0f} MB "
                f"allowed for them, at '{name}'.",
                hint="Raise the staging budget, or keep the model in the engine's precision.",
            )


def _pick(tensor: Tensor | None, name: str, spec: TensorSpec) -> Tensor:
    if tensor is None:
        raise EngineError(f"The model has no weight '{name}', which the engine needs.")
    if tuple(tensor.shape) != spec.shape:
        raise EngineError(
            f"The weight '{name}' has the shape {tuple(tensor.shape)}; the engine needs "
            f"{spec.shape}."
        )
    return tensor
