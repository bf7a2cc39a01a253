"""Freeze the loaded model, LoRAs included, into engines: one for each shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..baking import bake
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
    """Build a baked engine for each shape from the weights as they are now; what was built.

    Args:
        loras: merged into the weights by the host already; for the label.

    Raises:
        EngineRoomError: no model is loaded, or a build failed.
    """
    live, room = host.live(), host.room()
    label = ", ".join([host.checkpoint() or "model", *(f"{n} x {strength:g}" for n in loras)])
    merged = {f"lora_{i}": f"{name} x {strength:g}" for i, name in enumerate(loras)}
    stems = []
    for shape in shapes:
        entry = bake(
            room.library,
            live.arch,
            live.weights,
            shape,
            host.job(shape).target,
            label=label,
            source={**live.source, **merged},
            model=live.model,
            on_progress=on_progress,
            cancel=cancel,
        )
        room.tiers.failed.pop(entry.stem, None)
        stems.append(f"{shape.label}: {entry.stem}")
    return f"Baked {label}; {'; '.join(stems)}. Used whenever these very weights are loaded."
