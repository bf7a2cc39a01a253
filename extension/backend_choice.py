"""Which TensorRT fits a machine; looked at before anything is downloaded.

Compute capabilities: NVIDIA's support matrices of TensorRT-RTX (1.0 to 1.5) and TensorRT 10.
"""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass

from .driver import driver_cuda, gpus
from .errors import UnsupportedMachineError
from .machine import RTX_CAPABILITIES

RTX_CARDS = tuple(name for name in RTX_CAPABILITIES if name != "8.0")
OLDEST_CAPABILITY = (7, 5)
OLDEST_PYTHON = (3, 10)
CUDA_BUILDS = (12, 13)
PROCESSORS = ("x86_64", "amd64", "aarch64", "arm64")
SYSTEMS = ("Linux", "Windows")


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What the choice depends on.

    Attributes:
        system, processor: as ``platform`` names them.
        torch_cuda: CUDA version that torch was built for; None for a torch without CUDA.
        driver_cuda: CUDA version that the driver supports; empty without a driver.
        gpu, capability: of the first GPU; empty where there is none.
    """

    system: str
    processor: str
    python: tuple[int, int]
    torch_cuda: str | None
    driver_cuda: str
    gpu: str
    capability: str


@dataclass(frozen=True, kw_only=True)
class BackendChoice:
    """A backend and the CUDA version that its packages are for (12 or 13)."""

    backend: str
    cuda: int


def surroundings() -> Surroundings:
    """This machine."""
    found = gpus()
    return Surroundings(
        system=platform.system(),
        processor=platform.machine(),
        python=sys.version_info[:2],
        torch_cuda=_torch_cuda(),
        driver_cuda=driver_cuda(),
        gpu=found[0].name if found else "",
        capability=found[0].capability if found else "",
    )


def _torch_cuda() -> str | None:
    try:
        import torch
    except ImportError:
        return None
    return torch.version.cuda


def choose(machine: Surroundings) -> BackendChoice:
    """The backend for ``machine``.

    Raises:
        UnsupportedMachineError: none runs here; names what is in the way and what to do.
    """
    _check_platform(machine)
    _check_gpu(machine)
    backend = "tensorrt_rtx" if machine.capability in RTX_CARDS else "tensorrt"
    return BackendChoice(backend=backend, cuda=cuda_build(machine))


def cuda_build(machine: Surroundings) -> int:
    """Whether packages for CUDA 12 or 13 fit: torch's own version where it is one of them.

    Raises:
        UnsupportedMachineError: the driver is too old for it.
    """
    wanted = _major(machine.torch_cuda) or max(CUDA_BUILDS)
    build = min(max(wanted, CUDA_BUILDS[0]), CUDA_BUILDS[-1])
    driver = _major(machine.driver_cuda)
    if driver and driver < build:
        if driver >= CUDA_BUILDS[0] and not machine.torch_cuda:
            return driver
        raise UnsupportedMachineError(
            f"The NVIDIA driver supports CUDA {machine.driver_cuda}; TensorRT for this torch "
            f"needs CUDA {build}.",
            hint="Update the NVIDIA driver, restart, and try again.",
        )
    return build


def _major(version: str | None) -> int:
    text = (version or "").split(".")[0]
    return int(text) if text.isdigit() else 0


def _check_platform(machine: Surroundings) -> None:
    if machine.system not in SYSTEMS or machine.processor.lower() not in PROCESSORS:
        raise UnsupportedMachineError(
            f"There is no TensorRT for {machine.system} on {machine.processor}.",
            hint="Pictures come from the host as always. Engines need Linux or Windows.",
        )
    if machine.python < OLDEST_PYTHON:
        raise UnsupportedMachineError(
            f"Engine Room needs Python 3.10 or newer; the host runs on "
            f"{machine.python[0]}.{machine.python[1]}.",
            hint="Reinstall the host with Python 3.10.",
        )


def _check_gpu(machine: Surroundings) -> None:
    if not machine.driver_cuda or not machine.capability:
        raise UnsupportedMachineError(
            "No NVIDIA GPU was found." if machine.driver_cuda else "No NVIDIA driver was found.",
            hint="Engines need an NVIDIA card of the RTX 20 series or newer and its driver.",
        )
    if tuple(map(int, machine.capability.split("."))) < OLDEST_CAPABILITY:
        raise UnsupportedMachineError(
            f"{machine.gpu} has compute capability {machine.capability}; engines need 7.5.",
            hint="Pictures come from the host as always. Cards from the RTX 20 series on can run "
            "engines.",
        )
    if machine.torch_cuda is None:
        raise UnsupportedMachineError(
            "The host's torch is a build without CUDA, so it does not use the NVIDIA GPU.",
            hint="Install the host's own CUDA build of torch first.",
        )
