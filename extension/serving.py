"""From a library to a UNet that serves: build what is missing, verify, load, route."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import torch
from torch import Tensor

from .architecture import Architecture
from .building import BuildRequest, build_engine
from .calibration import check_calibrated
from .engine import get_backend
from .engine.interface import Engine
from .engine.scratch import scratch_bytes
from .engine.turns import turns
from .engine_state import Machine, State
from .errors import EngineError, EngineRoomError, SettingError
from .jobs import Limits, WorkerSetup, run_job
from .kernel_cache import KernelCache
from .key import EngineKey
from .library import Entry, Library
from .machine import CPU_BACKEND, RTX_CAPABILITIES, can_build_ahead, default_backend, machine_of
from .ops_torch import TorchUNet
from .packages import worker_folders
from .parity import ParityResult, check
from .progress import CancelToken, ProgressSink
from .routed import RoutedUNet
from .router import Candidate
from .shapes import Shape
from .synthetic import DTYPES

PROBE_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where engines run, and in which precision.

    Attributes:
        device: torch device.
        backend: compiles and runs the engines.
        dtype: of engines and of the host's UNet.
        capabilities: to build for; those of ``device`` by default.
    """

    device: str
    backend: str = ""
    dtype: str = ""
    capabilities: tuple[str, ...] = ()
    machine: Machine = field(init=False)

    def __post_init__(self) -> None:
        machine = machine_of(self.device)
        defaults = {
            "machine": machine,
            "backend": self.backend or self._default_backend(),
            "dtype": self.dtype or ("fp32" if self._on_cpu() else "fp16"),
            "capabilities": self.capabilities or (machine.capability,),
        }
        for capability in self.capabilities:
            if not can_build_ahead((capability,)) and capability != machine.capability:
                raise SettingError(
                    f"The compute capability '{capability}' cannot be built for here.",
                    hint=f"Use {', '.join(RTX_CAPABILITIES)}, or leave it out for this machine.",
                )
        for name, value in defaults.items():
            object.__setattr__(self, name, value)

    def _on_cpu(self) -> bool:
        return self.device == "cpu" and self.capabilities in ((), ("cpu",))

    def _default_backend(self) -> str:
        ahead = self.device == "cpu" and not self._on_cpu()
        return "tensorrt_rtx" if ahead else default_backend(self.device)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The precision as torch knows it."""
        return DTYPES[self.dtype]

    @classmethod
    def of_key(cls, key: EngineKey, device: str) -> Target:
        """The target that an engine was built for, on ``device``."""
        return cls(
            device=device,
            backend=key.backend,
            dtype=key.io_dtype,
            capabilities=key.capabilities,
        )

    def key(self, arch: Architecture, shape: Shape, *, fingerprint: str = "") -> EngineKey:
        """Key of the engine for ``arch`` and ``shape``: baked if there is a fingerprint."""
        shared = not fingerprint
        is_tensorrt = self.backend.startswith("tensorrt")
        return EngineKey(
            architecture=arch.for_shape(shape).id,
            shape=shape,
            io_dtype=self.dtype,
            weights="shared" if shared else "baked",
            backend=self.backend,
            backend_version=get_backend(self.backend).version(),
            capabilities=self.capabilities,
            conv3x3_format="hwc8" if shared and is_tensorrt and self.dtype != "fp32" else "linear",
            fingerprint=fingerprint,
        )


def build_shared(
    library: Library,
    arch: Architecture,
    shape: Shape,
    target: Target,
    *,
    on_progress: ProgressSink = lambda progress: None,
    cancel: CancelToken | None = None,
) -> Entry:
    """The shared engine for ``arch`` and ``shape``, built if the library lacks it."""
    label = f"{arch.label}, {shape.label}, {target.dtype}, shared"
    request = BuildRequest(key=target.key(arch, shape), architecture=arch, label=label)
    return build_engine(library, request, on_progress=on_progress, cancel=cancel)


def needed_bytes(entry: Entry) -> int:
    """Bytes of GPU memory that an engine takes on top, without copies of weights."""
    activations = entry.manifest.activation_bytes if entry.manifest else 0
    weights = entry.bytes_on_disk if entry.key.weights == "baked" else 0
    return weights + max(activations - scratch_bytes(), 0)


def load_engine(library: Library, entry: Entry, target: Target) -> Engine:
    """Load an engine's verified bytes on the target's device, with the kernels of past starts.

    One that was built elsewhere and never ran on this machine is first tried in a child process.

    Raises:
        LibraryError: its bytes are not those of the manifest.
        EngineError: the backend refuses it.
    """
    state = library.entry(entry.stem, target.machine).state
    if entry.stem not in library.built and state is not State.READY:
        try_in_child(library, entry)
    backend = get_backend(entry.key.backend)
    kernels = KernelCache(library.folder, target.machine.gpu, entry.key.backend_version)
    data = library.read_engine(entry.stem)
    # Hosts switch inference mode on, and buffers made in it could not be written outside.
    kept = kernels.read()
    with turns.work(), torch.inference_mode(False):
        engine = backend.load(data, device=target.device, cache=kept)
    kernels.write(engine.kernel_cache(), instead=kept if engine.cache_refused else b"")
    return engine


def try_in_child(library: Library, entry: Entry) -> None:
    """Load an engine in the worker; raises EngineError where that fails, crashes or hangs."""
    backend = entry.key.backend
    assert entry.manifest is not None
    library.read_engine(entry.stem)
    job = {
        "kind": "probe",
        "backend": backend,
        "engine": str(library.engine_path(entry.stem)),
        "sha256": entry.manifest.engine_sha256,
    }
    setup = WorkerSetup(packages=worker_folders(backend), hide_gpu=backend == CPU_BACKEND)
    try:
        run_job(job, limits=Limits(seconds=PROBE_SECONDS), setup=setup)
    except EngineRoomError as error:
        raise EngineError(
            f"The engine {entry.stem} cannot be loaded here: {error.message}",
            hint="Remove it; it is built again when it is needed.",
            details=error.details,
        ) from error


def verify(
    library: Library,
    entry: Entry,
    engine: Engine,
    arch: Architecture,
    weights: Mapping[str, Tensor] | None,
    target: Target,
    *,
    pause: Callable[[], None] = lambda: None,
) -> ParityResult:
    """Compare with the reference on this machine, and record the figures; see ``check``.

    A baked engine without its ``weights`` at hand is compared with the references beside it.

    Raises:
        EngineError: the weights cannot be bound, or there are no references.
    """
    key = entry.key
    dtype, device = key.io_dtype, target.device
    if key.weights == "baked" and weights is None:
        references = library.calibration_path(entry.stem)
        result = check_calibrated(engine, references, device=device, pause=pause)
    else:
        result = check(engine, arch, key.shape, weights, dtype=dtype, device=device, pause=pause)
    library.add_parity(
        entry.stem,
        {
            "gpu": target.machine.gpu,
            "driver": target.machine.driver,
            "backend_version": key.backend_version,
            "dtype": dtype,
            "worst_relative_l2": result.worst,
            "limit": result.limit,
            "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        },
    )
    return result


def load_verified(
    library: Library,
    entry: Entry,
    arch: Architecture,
    target: Target,
    *,
    pause: Callable[[], None] = lambda: None,
) -> Engine:
    """``load_engine``; an engine that this machine has not verified yet is verified first.

    The host may change its weights meanwhile, so that is done with random ones alone.

    Raises:
        ParityError: it computes something else than the model.
        EngineRoomError: as ``load_engine`` and ``verify``, and whatever ``pause`` raises.
    """
    engine = load_engine(library, entry, target)
    try:
        if library.entry(entry.stem, target.machine).state is not State.READY:
            verify(library, entry, engine, arch, None, target, pause=pause).require(entry.stem)
        pause()
    except BaseException:
        engine.close()
        raise
    return engine


def candidate_of(entry: Entry, target: Target, *, ready: bool) -> Candidate:
    """What the router needs to know of an engine."""
    key = entry.key
    return Candidate(
        stem=entry.stem,
        architecture=key.architecture,
        shape=key.shape,
        dtype=key.io_dtype,
        device=target.device,
        weights=key.weights,
        fingerprint=key.fingerprint or None,
        ready=ready,
    )


def host_unet(arch: Architecture, weights: Mapping[str, Tensor], target: Target) -> TorchUNet:
    """The torch UNet over the same tensors that a shared engine is bound to."""
    return TorchUNet(arch, weights, target.torch_dtype)


def serve_with(
    library: Library,
    entry: Entry,
    arch: Architecture,
    weights: Mapping[str, Tensor],
    target: Target,
    *,
    fingerprint: str | None = None,
) -> RoutedUNet:
    """Load and, where this machine has not done so yet, verify an engine; route through it.

    Raises:
        ParityError: it computes something else; it stays out of service.
    """
    engine = load_engine(library, entry, target)
    state = library.entry(entry.stem, target.machine).state
    if state is not State.READY:
        verify(library, entry, engine, arch, weights, target).require(entry.stem)
    unet = RoutedUNet(arch, weights, host_unet(arch, weights, target), fingerprint=fingerprint)
    unet.add_engine(candidate_of(entry, target, ready=True), engine)
    library.update_state(entry.stem, last_used=time.time())
    return unet


def facts(entry: Entry) -> dict[str, Any]:
    """An entry as a JSON object."""
    manifest = entry.manifest
    return {
        "id": entry.stem,
        "state": entry.state.value,
        "text": entry.text,
        "label": manifest.label if manifest else "",
        "bytes": entry.bytes_on_disk,
        "build_seconds": manifest.build_seconds if manifest else None,
        "key": manifest.key.to_json() if manifest else None,
        "source": dict(manifest.source) if manifest else {},
        "parity": entry.changing.get("parity", []),
    }
