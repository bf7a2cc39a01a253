"""How far one result is from another."""

from __future__ import annotations

import math

from torch import Tensor


def relative_l2(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected|, in fp64; infinite where ``actual`` is not finite."""
    difference = (actual.double() - expected.double()).norm()
    error = float(difference / expected.double().norm().clamp_min(1e-30))
    return error if math.isfinite(error) else math.inf
