"""Freeze weights into an engine, and recognise live weights that an engine holds."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import threads
from .architecture import Architecture
from .building import PAIR_PREFIX, BuildRequest, build_engine
from .calibration import write_calibration
from .checkpoint import Checkpoint, tensor_bytes
from .errors import CancelledError, WeightsChangedError
from .files import ensure_folder, temporary_folder
from .fingerprint import Fingerprinter
from .library import Entry, Library
from .log import logger
from .model import LoraChoice, Model
from .onnx_export import ExportResult, export_pair
from .progress import CancelToken, ProgressSink
from .serving import Target
from .shapes import Shape
from .tensor_source import NAMES, open_source
from .worker_tasks import SAFETENSORS

UNKNOWN = "unknown"  # prediction type of weights that came without a checkpoint


def bake(
    library: Library,
    arch: Architecture,
    weights: Mapping[str, Tensor],
    shape: Shape,
    target: Target,
    *,
    label: str,
    source: Mapping[str, Any],
    model: Mapping[str, Any] | None = None,
    expected: str = "",
    on_progress: ProgressSink = lambda progress: None,
    cancel: CancelToken | None = None,
) -> Entry:
    """Export ``weights``, build the engine with them frozen in, and write its references.

    Args:
        weights: LDM name to tensor; read once, while they are exported.
        label: of the weights, for people.
        source: fingerprints and names of checkpoint and LoRAs, for the manifest.
        model: what a host needs to sample without the checkpoint, for the manifest.
        expected: fingerprint that the weights should have, where they may change meanwhile.

    Raises:
        WeightsChangedError: they have another fingerprint than ``expected``.
        EngineRoomError: as ``export_pair`` and ``build_engine``.
    """
    cancel = cancel or CancelToken()
    with pair_folder(library) as folder:
        pair = export_pair(weights, arch, folder, dtype=target.dtype, cancel=cancel)
        if expected and pair.fingerprint != expected:
            raise WeightsChangedError("The weights have changed while they were exported.")
        return bake_pair(
            library,
            pair,
            arch,
            shape,
            target,
            label=label,
            source=source,
            model=model,
            on_progress=on_progress,
            cancel=cancel,
        )


@contextlib.contextmanager
def pair_folder(library: Library) -> Iterator[Path]:
    """A folder for an ONNX pair that is only on its way into an engine."""
    folder = temporary_folder(ensure_folder(library.folder), PAIR_PREFIX)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def bake_pair(
    library: Library,
    pair: ExportResult,
    arch: Architecture,
    shape: Shape,
    target: Target,
    *,
    label: str,
    source: Mapping[str, Any],
    model: Mapping[str, Any] | None = None,
    on_progress: ProgressSink = lambda progress: None,
    cancel: CancelToken | None = None,
) -> Entry:
    """Build the engine with an exported pair's weights frozen in, and write its references.

    Args:
        pair: is left as it is, for engines of other shapes.

    Raises:
        EngineRoomError: as ``build_engine``.
    """
    cancel = cancel or CancelToken()
    request = BuildRequest(
        key=target.key(arch, shape, fingerprint=pair.fingerprint),
        architecture=arch,
        label=f"{arch.label}, {shape.label}, {target.dtype}, baked: {label}",
        pair=pair.folder,
        source=source,
        model={**(model or {}), "architecture": arch.to_json()},
    )
    entry = build_engine(library, request, on_progress=on_progress, cancel=cancel)
    references = library.calibration_path(entry.stem)
    if not references.exists():
        file = pair.folder / SAFETENSORS
        with Checkpoint(file, open_source(file)) as written:
            write_calibration(
                references,
                arch,
                written,
                shape,
                dtype=target.dtype,
                device=target.device,
                pause=cancel.raise_if_cancelled,
            )
    return entry


def bake_model(
    library: Library,
    model: Model,
    loras: Sequence[LoraChoice],
    shape: Shape,
    target: Target,
    *,
    on_progress: ProgressSink = lambda progress: None,
    cancel: CancelToken | None = None,
) -> Entry:
    """``bake`` a checkpoint file with LoRA files merged into it."""
    return bake(
        library,
        model.architecture,
        model.merged(loras, target.torch_dtype),
        shape,
        target,
        label=model.checkpoint.path.name,
        source=model.origin(loras),
        model={"prediction": model.checkpoint.prediction_type() or "eps"},
        on_progress=on_progress,
        cancel=cancel,
    )


def fingerprint_of(
    weights: Mapping[str, Tensor],
    dtype: torch.dtype,
    pause: Callable[[], None] = lambda: None,
) -> str:
    """Content fingerprint of weights in ``dtype``: that of an engine they are baked into.

    Args:
        pause: called between tensors; may raise to stop.
    """
    digest = Fingerprinter()
    with torch.inference_mode(False), torch.no_grad():
        for name in weights:
            tensor = weights[name].detach().to(device="cpu", dtype=dtype)
            digest.add(name, NAMES[dtype], tuple(tensor.shape), tensor_bytes(tensor.contiguous()))
            pause()
    return digest.hexdigest()


class LiveFingerprint:
    """The fingerprint of a model's live weights, computed in the background, once an epoch.

    It is begun at an epoch's second call: some epochs last one call only.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights
        self._lock = threading.Lock()
        self._epoch: Hashable = object()
        self._found: str | None = None
        self._cancel = CancelToken()
        self._thread: threading.Thread | None = None

    def get(self, epoch: Hashable, dtype: torch.dtype) -> str | None:
        """The fingerprint of ``epoch``; None until it is known."""
        with self._lock:
            if epoch != self._epoch:
                self._cancel.cancel()
                self._epoch, self._found, self._thread = epoch, None, None
            elif self._thread is None:
                self._cancel = cancel = CancelToken()
                arguments = (epoch, dtype, cancel)
                self._thread = threads.start(
                    self._work, *arguments, name="fingerprint", stop=cancel.cancel
                )
            return self._found

    def _work(self, epoch: Hashable, dtype: torch.dtype, cancel: CancelToken) -> None:
        try:
            found = fingerprint_of(self._weights, dtype, cancel.raise_if_cancelled)
        except CancelledError:
            return
        except Exception as error:
            logger.debug("The weights have no fingerprint: %s", error)
            return
        with self._lock:
            if epoch == self._epoch:
                self._found = found
