"""What this machine is: GPU, compute capability, driver, backends and their versions."""

from __future__ import annotations

from functools import lru_cache

from .driver import driver_version
from .engine import BACKENDS, get_backend
from .engine_state import Machine
from .errors import EngineRoomError, MissingPackageError, UnsupportedMachineError
from .packages import install_command

CPU_BACKEND = "onnxruntime"
RTX_CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1")


@lru_cache(maxsize=1)
def backend_versions() -> dict[str, str]:
    """Versions of the backends that can be imported here."""
    found = {}
    for name in BACKENDS:
        try:
            found[name] = get_backend(name).version()
        except EngineRoomError:
            continue
    return found


def machine_of(device: str) -> Machine:
    """The facts that an engine on ``device`` (``cpu``, ``cuda:0``) depends on.

    Raises:
        UnsupportedMachineError: any other kind of device, or an AMD GPU.
    """
    import torch

    if device == "cpu":
        return Machine(backends=backend_versions())
    if not device.startswith("cuda") or torch.version.hip:
        raise UnsupportedMachineError(
            f"Engines run on NVIDIA GPUs; this host draws on '{device}'.",
            hint="The host goes on as it is.",
        )
    major, minor = torch.cuda.get_device_capability(device)
    return Machine(
        gpu=torch.cuda.get_device_name(device),
        capability=f"{major}.{minor}",
        driver=driver_version(),
        backends=backend_versions(),
    )


def default_device() -> str:
    """``cuda:0`` where torch sees a GPU and a TensorRT is installed, else ``cpu``."""
    import torch

    has_backend = any(name != CPU_BACKEND for name in backend_versions())
    return "cuda:0" if has_backend and torch.cuda.is_available() else "cpu"


def default_backend(device: str) -> str:
    """The backend for ``device``: TensorRT-RTX before TensorRT on a GPU.

    Raises:
        MissingPackageError: a GPU without any of them.
    """
    if device == "cpu":
        return CPU_BACKEND
    names = [name for name in BACKENDS if name in backend_versions() and name != CPU_BACKEND]
    if not names:
        command = install_command()
        raise MissingPackageError.of("tensorrt-rtx", "to run engines on the GPU", command)
    return names[0]


def needs_no_gpu(backend: str, capabilities: tuple[str, ...]) -> bool:
    """Whether a worker builds for these without seeing the GPU: ``tensorrt`` never does."""
    return backend != "tensorrt" and can_build_ahead(capabilities)


def can_build_ahead(capabilities: tuple[str, ...]) -> bool:
    """Whether TensorRT-RTX can name all of them, so that no GPU is needed to build.

    Any other is built as the current GPU's, on that GPU.
    """
    return all(capability in (*RTX_CAPABILITIES, "cpu") for capability in capabilities)
