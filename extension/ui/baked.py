"""Freeze the loaded model, LoRAs included, into engines: one for each shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..baking import bake_pair, pair_folder
from ..onnx_export import export_pair
from ..progress import CancelToken, Progress
from ..shapes import Shape
from .facts import UiHost


def bake_live(
    host: UiHost,
    shapes: Sequence[Shape],
    loras: Sequence[str],
    strength: float,
    on_progress: Callable[[Progress], None],
    cancel: CancelToken,
) -> str:
    """Build a baked engine for each shape from the loaded checkpoint and LoRAs; what was built.

    The weights are read once, before anything is built: the host draws on meanwhile.

    Raises:
        EngineRoomError: no model is loaded, or a build failed.
    """
    room, targets = host.room(), [host.job(shape).target for shape in shapes]
    label = ", ".join([host.checkpoint() or "model", *(f"{n} x {strength:g}" for n in loras)])
    merged = {f"lora_{i}": f"{name} x {strength:g}" for i, name in enumerate(loras)}
    stems = []
    with pair_folder(room.library) as folder:
        with host.merged(loras, strength) as live:
            pair = export_pair(
                live.weights, live.arch, folder, dtype=targets[0].dtype, cancel=cancel
            )
        for shape, target in zip(shapes, targets, strict=True):
            entry = bake_pair(
                room.library,
                pair,
                live.arch,
                shape,
                target,
                label=label,
                source={**live.source, **merged},
                model=live.model,
                on_progress=on_progress,
                cancel=cancel,
            )
            room.tiers.failed.pop(entry.stem, None)
            stems.append(f"{shape.label}: {entry.stem}")
    return f"Baked {label}; {'; '.join(stems)}. Used whenever these very weights are loaded."
