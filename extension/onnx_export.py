"""Export UNet weights as an ONNX pair: ``unet.onnx`` over the data of ``unet.safetensors``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from .architecture import Architecture
from .checkpoint import require_finite, tensor_bytes
from .engine.interface import DTYPES, check_choice
from .errors import BadFileError
from .files import ensure_folder, replace_file, write_failure
from .fingerprint import Fingerprinter
from .jobs import WorkerSetup, run_job
from .onnx_graph import METADATA_PREFIX
from .packages import worker_folders
from .progress import CancelToken, Phase, ProgressSink, Timeline
from .safetensors_file import Entry, write_safetensors
from .shapes import Shape
from .synthetic import DTYPES as TORCH_DTYPES
from .tensor_source import NAMES
from .worker_tasks import ONNX, SAFETENSORS, UNET_PREFIX

BYTES_PER_SECOND = 400e6
PENDING = f".{SAFETENSORS}.new"


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """A pair on disk.

    Attributes:
        fingerprint: of the weights as written.
        nbytes: of both files.
    """

    folder: Path
    fingerprint: str
    nbytes: int


def export_pair(
    weights: Mapping[str, Tensor],
    arch: Architecture,
    folder: str | Path,
    *,
    dtype: str,
    shape: Shape | None = None,
    origin: Mapping[str, str] | None = None,
    on_progress: ProgressSink = lambda progress: None,
    cancel: CancelToken | None = None,
) -> ExportResult:
    """Write the pair; weights are computed, checked and written one at a time.

    The safetensors file alone is a valid merged UNet checkpoint. An earlier pair in ``folder``
    is replaced; its ONNX file goes first, so that no mixed pair can be read.

    Args:
        weights: LDM name to tensor (for example MergedWeights).
        dtype: ``fp16``, ``fp32`` or ``bf16``.
        shape: static sizes; None exports symbolic ones.
        origin: facts stored in both files under ``engine_room.*``.

    Raises:
        OutputError: no space, or the folder cannot be written.
        BadFileError: a weight holds NaN or infinity, or overflows ``dtype``; names it.
    """
    check_choice("precision", dtype, DTYPES)
    folder, cancel = ensure_folder(Path(folder)), cancel or CancelToken()
    shapes = arch.parameters()
    kind = NAMES[TORCH_DTYPES[dtype]]
    entries = [Entry(UNET_PREFIX + name, kind, s) for name, s in shapes.items()]
    total = sum(entry.nbytes for entry in entries)
    timeline = _timeline(total)
    facts = {METADATA_PREFIX + key: text for key, text in (origin or {}).items()}
    facts[METADATA_PREFIX + "architecture"] = arch.id
    digest = Fingerprinter()

    def tick() -> None:
        cancel.raise_if_cancelled()
        on_progress(timeline.now())

    data = _stream(weights, shapes, dtype, digest, tick)
    write_safetensors(folder / PENDING, entries, data, facts)
    _publish(folder)
    timeline.enter("writing the graph")
    on_progress(timeline.now())
    fingerprint = digest.hexdigest()
    graph_bytes = _write_graph(
        folder, arch, shape, dtype, {**(origin or {}), "weights": fingerprint}, cancel
    )
    on_progress(timeline.done())
    return ExportResult(folder=folder, fingerprint=fingerprint, nbytes=total + graph_bytes)


def _publish(folder: Path) -> None:
    """The written weights take the place of an earlier pair."""
    try:
        (folder / ONNX).unlink(missing_ok=True)
        replace_file(folder / PENDING, folder / SAFETENSORS)
    except OSError as error:
        raise write_failure(folder / ONNX, error) from error
    finally:
        (folder / PENDING).unlink(missing_ok=True)


def _write_graph(
    folder: Path,
    arch: Architecture,
    shape: Shape | None,
    dtype: str,
    metadata: Mapping[str, str],
    cancel: CancelToken,
) -> int:
    """Have the worker write the ONNX file, because it needs onnx; returns its bytes."""
    job = {
        "kind": "export",
        "folder": str(folder),
        "architecture": arch.to_json(),
        "shape": shape.to_json() if shape else None,
        "dtype": dtype,
        "metadata": dict(metadata),
    }
    result = run_job(job, cancel=cancel, setup=WorkerSetup(packages=worker_folders("")))
    return int(result["bytes"])


def _timeline(nbytes: int) -> Timeline:
    return Timeline(
        [
            Phase(name="writing the weights", seconds=nbytes / BYTES_PER_SECOND),
            Phase(name="writing the graph", seconds=2.0),
        ]
    )


def _stream(
    weights: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: str,
    digest: Fingerprinter,
    tick: Callable[[], None],
) -> Iterator[memoryview]:
    target = TORCH_DTYPES[dtype]
    for name, shape in shapes.items():
        source = weights[name].detach().cpu()
        require_finite(name, source)
        tensor = source.to(target)
        if tensor.dtype != source.dtype and dtype == "fp16":
            _require_range(name, tensor)
        view = tensor_bytes(tensor)
        digest.add(name, NAMES[target], shape, view)
        tick()
        yield view


def _require_range(name: str, tensor: Tensor) -> None:
    try:
        require_finite(name, tensor)
    except BadFileError as error:
        raise BadFileError(
            f"The weight '{name}' is too large for fp16.", hint="Export in bf16 or fp32."
        ) from error
