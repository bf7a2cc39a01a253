"""What a loaded model predicts, as each host of the family keeps it."""

from __future__ import annotations

from typing import Any

NAMES = {"epsilon": "eps", "EPS": "eps", "v_prediction": "v", "V_PREDICTION": "v"}


def prediction_of(model: Any) -> str:
    """``eps``, ``v``, or the host's own word for anything else."""
    inner = getattr(getattr(getattr(model, "forge_objects", None), "unet", None), "model", None)
    said = (
        getattr(getattr(inner, "predictor", None), "prediction_type", None)  # Forge
        or getattr(getattr(inner, "model_type", None), "name", None)  # reForge, Forge Classic
        or getattr(model, "parameterization", None)  # AUTOMATIC1111
        or "eps"
    )
    return NAMES.get(str(said), str(said))
