"""What NVIDIA's driver says of this machine, without torch: CUDA version and GPUs."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU: name and compute capability, such as ``8.9``."""

    name: str
    capability: str


@lru_cache(maxsize=1)
def driver_version() -> str:
    """The driver's own version, such as ``580.95.05``; that of its CUDA where it is not told."""
    version = ctypes.create_string_buffer(80)
    nvml = _library("nvml.dll", "libnvidia-ml.so.1")
    if nvml is None or nvml.nvmlInit_v2():
        return driver_cuda()
    failed = nvml.nvmlSystemGetDriverVersion(version, len(version))
    nvml.nvmlShutdown()
    return driver_cuda() if failed else version.value.decode("ascii", "replace")


def driver_cuda() -> str:
    """The CUDA version that the driver supports, such as ``13.0``; empty without a driver."""
    driver, number = _driver(), ctypes.c_int()
    if driver is None or driver.cuDriverGetVersion(ctypes.byref(number)):
        return ""
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def gpus() -> list[Gpu]:
    """The GPUs that the driver offers to this process; none without a driver."""
    driver, count = _driver(), ctypes.c_int()
    if driver is None or driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    return [_gpu(driver, index) for index in range(count.value)]


def _driver() -> Any:
    return _library("nvcuda.dll", "libcuda.so.1")


def _library(windows: str, linux: str) -> Any:
    try:
        return ctypes.CDLL(windows if sys.platform == "win32" else linux)
    except OSError:
        return None


def _gpu(driver: Any, index: int) -> Gpu:
    device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDeviceGetName(name, len(name), device)
    numbers = []
    for attribute in (MAJOR, MINOR):
        number = ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
        numbers.append(number.value)
    return Gpu(name=name.value.decode("utf-8", "replace"), capability=f"{numbers[0]}.{numbers[1]}")
