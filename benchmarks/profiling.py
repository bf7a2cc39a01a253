"""The kernels of one call: launches and microseconds, by kind and by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

# In this order: a fused kernel's name may hold several words.
KINDS = {
    "attention": ("mha", "flash", "fmha", "attention", "softmax"),
    "convolution": ("convfwd", "conv", "fprop", "implicit"),
    "product": ("matmul", "gemm", "nvjet", "cutlass", "splitk"),
    "norm": ("norm", "welford", "reduce", "mean", "var_"),
}


def kind_of(name: str) -> str:
    """``attention``, ``convolution``, ``product``, ``norm`` or ``other``, by the kernel's name."""
    lower = name.lower()
    for kind, words in KINDS.items():
        if any(word in lower for word in words):
            return kind
    return "other"


def kernels(call: Callable[[], object], longest: int = 14) -> dict[str, Any]:
    """Profile one ``call``, which must have run before."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    events = [e for e in profiler.key_averages() if e.device_time_total]
    events.sort(key=lambda e: -e.device_time_total)
    by_kind: Counter[str] = Counter()
    for event in events:
        by_kind[kind_of(event.key)] += round(event.device_time_total)
    return {
        "launches": sum(e.count for e in events),
        "microseconds": round(sum(e.device_time_total for e in events)),
        "by_kind": dict(by_kind.most_common()),
        "longest": [[e.key[:110], e.count, round(e.device_time_total)] for e in events[:longest]],
    }
