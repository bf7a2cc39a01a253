"""What the worker does: emit and export graphs, build engines, test a backend. No torch."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .architecture import TINY, Architecture
from .engine import get_backend
from .engine.interface import BuildSpec
from .errors import BadFileError, EngineRoomError, MissingPackageError, WorkerError
from .files import atomic_write, replace_file
from .key import EngineKey
from .onnx_graph import ExternalTensor, ExternalWeights, emit_graph
from .progress import Phase, Timeline
from .safetensors_file import read_header
from .shapes import Shape

SAFETENSORS = "unet.safetensors"
ONNX = "unet.onnx"
SELFTEST_ENGINE = "selftest.engine"
SELFTEST_SHAPE = Shape(batch=1, height=8, width=8)
UNET_PREFIX = "model.diffusion_model."
Send = Callable[..., None]
Job = Mapping[str, Any]


def run(job: Job, send: Send, tick: float) -> int:
    """Run ``job``, report through ``send``, and return the exit code."""
    tasks = {"emit": emit, "export": export, "build": build, "selftest": selftest, "probe": probe}
    with contextlib.suppress(OSError, AttributeError):
        os.nice(int(job.get("nice", 0)))
    try:
        task = tasks.get(job.get("kind", ""))
        if task is None:
            raise WorkerError(f"The job has the unknown kind {job.get('kind')!r}.")
        result = task(job, send, tick)
    except EngineRoomError as error:
        send("error", **error.to_json())
    except ImportError as error:
        missing = MissingPackageError.of(error.name or "onnx", "to build engines")
        send("error", **missing.to_json())
    except MemoryError:
        send("error", code="build", message="The build ran out of memory.", hint="Close programs.")
    except Exception as error:
        message = f"The worker failed: {type(error).__name__}: {error}"
        send("error", code="worker", message=message, hint="")
    else:
        send("done", result=result)
        return 0
    return 1


@contextlib.contextmanager
def ticking(timeline: Timeline, send: Send, tick: float) -> Iterator[None]:
    """Send progress every ``tick`` seconds, also while a native call is silent."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(tick):
            send("progress", **timeline.now().to_json())

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def emit(job: Job, send: Send, tick: float) -> dict[str, Any]:
    """Write a graph with weights as inputs to ``out``."""
    model = emit_graph(
        Architecture.from_json(job["architecture"]),
        Shape.from_json(job["shape"]) if job.get("shape") else None,
        dtype=job["dtype"],
        control=bool(job.get("control")),
        metadata=job.get("metadata"),
    )
    data = model.SerializeToString(deterministic=True)
    atomic_write(Path(job["out"]), data)
    return {"bytes": len(data), "nodes": len(model.graph.node)}


def export(job: Job, send: Send, tick: float) -> dict[str, Any]:
    """Write ``unet.onnx`` beside the ``unet.safetensors`` in ``folder``, and check the pair."""
    from onnx import checker

    folder = Path(job["folder"])
    shape = Shape.from_json(job["shape"]) if job.get("shape") else None
    architecture = Architecture.from_json(job["architecture"])
    data = _pair_graph(folder, architecture, shape, job["dtype"], job.get("metadata"))
    unchecked = folder / f".{ONNX}.unchecked"
    try:
        atomic_write(unchecked, data)
        checker.check_model(str(unchecked))
        replace_file(unchecked, folder / ONNX)
    finally:
        unchecked.unlink(missing_ok=True)
    return {"bytes": len(data)}


def _pair_graph(
    folder: Path,
    architecture: Architecture,
    shape: Shape | None,
    dtype: str,
    metadata: Mapping[str, str] | None,
) -> bytes:
    header = read_header(folder / SAFETENSORS)
    tensors = {
        name.removeprefix(UNET_PREFIX): ExternalTensor(offset=info.offset, nbytes=info.nbytes)
        for name, info in header.tensors.items()
    }
    stored = {"fp16": "F16", "fp32": "F32", "bf16": "BF16"}[dtype]
    wrong = [name for name, info in header.tensors.items() if info.dtype != stored]
    if wrong:
        raise BadFileError(f"'{wrong[0]}' in {SAFETENSORS} is not {dtype}.")
    external = ExternalWeights(location=SAFETENSORS, tensors=tensors)
    model = emit_graph(architecture, shape, dtype=dtype, external=external, metadata=metadata)
    return bytes(model.SerializeToString(deterministic=True))


def build(job: Job, send: Send, tick: float) -> dict[str, Any]:
    """Compile the engine of ``key`` into ``out``; baked weights lie in ``folder``."""
    key, folder = EngineKey.from_json(job["key"]), Path(job["folder"])
    architecture = Architecture.from_json(job["architecture"]).for_shape(key.shape)
    if architecture.id != key.architecture:
        raise WorkerError("The job's architecture is not that of its key.")
    expected = float(job.get("expected_seconds", 30.0))
    timeline = Timeline(
        [
            Phase(name="writing the graph", seconds=0.5),
            Phase(name="compiling", seconds=max(expected - 1.0, 0.5)),
            Phase(name="writing the engine", seconds=0.5),
        ]
    )
    backend, started = get_backend(key.backend), time.monotonic()
    if backend.version() != key.backend_version:
        raise WorkerError(
            f"The engine is for {key.backend} {key.backend_version}; the worker has "
            f"{backend.version()}.",
            hint="Update the packages of Engine Room, and build again.",
        )
    with ticking(timeline, send, tick):
        model, out = folder / ONNX, Path(job["out"])
        _write_graph(model, key, architecture, folder)
        spec = _spec(key, architecture)
        result = backend.build(model, spec, out, lambda fraction, phase: timeline.enter(phase))
        timeline.enter("writing the engine")
        data = out.read_bytes()
    send("progress", **timeline.done().to_json())
    return {
        "engine_bytes": len(data),
        "engine_sha256": hashlib.sha256(data).hexdigest(),
        "build_seconds": time.monotonic() - started,
        "activation_bytes": result.activation_bytes,
        "details": dict(result.details),
    }


def _write_graph(model: Path, key: EngineKey, architecture: Architecture, folder: Path) -> None:
    if key.weights == "baked":
        data = _pair_graph(folder, architecture, key.shape, key.io_dtype, None)
    else:
        graph = emit_graph(architecture, key.shape, dtype=key.io_dtype)
        data = bytes(graph.SerializeToString(deterministic=True))
    atomic_write(model, data)


def _spec(key: EngineKey, architecture: Architecture) -> BuildSpec:
    shared = key.weights == "shared"
    return BuildSpec(
        weights=key.weights,
        capabilities=key.capabilities,
        conv_format=key.conv3x3_format,
        io_dtype=key.io_dtype,
        weight_inputs=tuple(architecture.parameters()) if shared else (),
    )


def probe(job: Job, send: Send, tick: float) -> dict[str, Any]:
    """Try an engine that was built elsewhere: a bad one may crash this process, not the host."""
    data = Path(job["engine"]).read_bytes()
    if hashlib.sha256(data).hexdigest() != job["sha256"]:
        raise BadFileError("The engine changed while it was read.")
    timeline = Timeline([Phase(name="trying the engine", seconds=3.0)])
    with ticking(timeline, send, tick):
        get_backend(job["backend"]).probe(data)
    return {"bytes": len(data)}


def selftest(job: Job, send: Send, tick: float) -> dict[str, Any]:
    """Build a tiny engine with ``backend`` in ``folder`` and report what it took."""
    backend = get_backend(job["backend"])
    shape = SELFTEST_SHAPE
    architecture = TINY["sd15"].for_shape(shape)
    capabilities = tuple(job.get("capabilities") or ("cpu",))
    key = EngineKey(
        architecture=architecture.id,
        shape=shape,
        io_dtype="fp32",
        weights="shared",
        backend=backend.name,
        backend_version=backend.version(),
        capabilities=capabilities,
    )
    details = {
        "key": key.to_json(),
        "architecture": architecture.to_json(),
        "folder": job["folder"],
        "out": str(Path(job["folder"]) / SELFTEST_ENGINE),
        "expected_seconds": job.get("expected_seconds", 8.0),
    }
    return build(details, send, tick)
