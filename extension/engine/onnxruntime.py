"""ONNX Runtime on the CPU: the reference engine for tests, demos and machines without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BuildError, EngineError, MissingPackageError
from ..files import atomic_write
from ..packages import import_private
from .interface import BuildResult, BuildSpec, Engine, ProgressCallback, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

PROTOBUF_LIMIT = 2**31 - 2**20
ELEMENTS = {"tensor(float16)": "fp16", "tensor(float)": "fp32", "tensor(bfloat16)": "bf16"}


class OnnxRuntimeBackend:
    """Backend whose engine file is an ONNX model; baked weights lie inside it."""

    name = "onnxruntime"

    def version(self) -> str:
        """Version of the package, such as ``1.32.0``."""
        return str(_module().__version__)

    def build(
        self, model: Path, spec: BuildSpec, out: Path, progress: ProgressCallback
    ) -> BuildResult:
        """Put graph and (baked) weights into one file and prove that a session can be made.

        Raises:
            BuildError: the graph is refused, or baked weights exceed what one file can hold.
        """
        import onnx

        progress(0.0, "reading the graph")
        graph = onnx.load(str(model), load_external_data=False)
        _embed_weights(graph, model.parent)
        progress(0.3, "compiling")
        data = graph.SerializeToString()
        try:
            _session(data)
        except Exception as error:
            raise BuildError(f"ONNX Runtime refuses the graph: {error}") from error
        progress(0.9, "writing the engine")
        atomic_write(out, data)
        return BuildResult(activation_bytes=0, details={"nodes": len(graph.graph.node)})

    def probe(self, data: bytes) -> None:
        """Make a session; raises EngineError where ONNX Runtime refuses the bytes."""
        try:
            _session(data)
        except MissingPackageError:
            raise
        except Exception as error:
            raise EngineError(f"ONNX Runtime refuses the engine: {error}") from error

    def load(self, data: bytes, *, device: str, cache: bytes = b"") -> Engine:
        """Load verified bytes; ``device`` must be ``cpu``."""
        if device != "cpu":
            raise EngineError(f"The onnxruntime backend runs on the CPU, not on '{device}'.")
        return OnnxRuntimeEngine(data)


class OnnxRuntimeEngine:
    """A session over torch's own memory: weights and inputs are not copied."""

    def __init__(self, data: bytes) -> None:
        import torch

        self._session: Any = _session(data, threads=torch.get_num_threads())
        inputs = {i.name: _spec(i) for i in self._session.get_inputs()}
        self.weight_names = tuple(name for name in inputs if "." in name)
        self.weights: Mapping[str, TensorSpec] = {n: inputs[n] for n in self.weight_names}
        self.inputs: Mapping[str, TensorSpec] = {
            name: spec for name, spec in inputs.items() if "." not in name
        }
        self.outputs: Mapping[str, TensorSpec] = {
            o.name: _spec(o) for o in self._session.get_outputs()
        }
        self.activation_bytes, self.cache_refused = 0, False
        self._bound: dict[str, Any] = {}

    def bind(self, weights: Mapping[str, Tensor]) -> None:
        """Point weight inputs at ``weights`` (contiguous CPU tensors of the engine's dtype)."""
        for name, tensor in weights.items():
            self._bound[name] = _ort_value(tensor)

    def run(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Run one call; the result is a new tensor."""
        import torch

        if len(self._bound) != len(self.weight_names):
            missing = [name for name in self.weight_names if name not in self._bound]
            raise EngineError(f"{len(missing)} weights are not bound, '{missing[0]}' first.")
        feeds = {name: _ort_value(_as(inputs[name], self.inputs[name])) for name in self.inputs}
        result = self._session.run_with_ort_values(["out"], {**feeds, **self._bound})[0]
        return torch.from_numpy(result.numpy())

    def kernel_cache(self) -> bytes:
        """Nothing is compiled for a CPU."""
        return b""

    def close(self) -> None:
        """Release the session; may be called twice."""
        self._session, self._bound = None, {}


@lru_cache(maxsize=1)
def _module() -> Any:
    try:
        onnxruntime = import_private("onnxruntime", "onnxruntime")
    except ImportError as error:
        raise MissingPackageError.of("onnxruntime", "to run engines on the CPU") from error
    onnxruntime.disable_telemetry_events()
    return onnxruntime


def _session(data: bytes, *, threads: int = 1) -> Any:
    ort = _module()
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    # Torch works between the calls: no thread waits busily for the next.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def _spec(node: Any) -> TensorSpec:
    return TensorSpec(dtype=ELEMENTS.get(node.type, node.type), shape=tuple(node.shape))


def _embed_weights(model: Any, folder: Path) -> None:
    """Put the external weights of our own graphs into the model itself.

    Not by ``onnx.load``: it refuses files with a second hard link, as ours may be.
    """
    places = {t.name: {e.key: e.value for e in t.external_data} for t in model.graph.initializer}
    total = sum(int(place.get("length", 0)) for place in places.values())
    if total > PROTOBUF_LIMIT:
        raise BuildError(
            f"A baked ONNX Runtime engine of {total / 1e9:.1f} GB exceeds the 2 GB that one ONNX "
            "file can hold.",
            hint="Build it shared, or export it in fp16.",
        )
    for tensor in model.graph.initializer:
        place = places[tensor.name]
        if not place:
            continue
        with (folder / Path(place["location"]).name).open("rb") as file:
            file.seek(int(place["offset"]))
            tensor.raw_data = file.read(int(place["length"]))
        tensor.data_location = tensor.DEFAULT
        del tensor.external_data[:]


def _as(tensor: Tensor, spec: TensorSpec) -> Tensor:
    import torch

    dtypes = {"fp16": torch.float16, "fp32": torch.float32, "bf16": torch.bfloat16}
    return tensor.detach().to(device="cpu", dtype=dtypes[spec.dtype]).contiguous()


def _ort_value(tensor: Tensor) -> Any:
    """An OrtValue over the tensor's memory, which it keeps alive."""
    return _module().OrtValue.ortvalue_from_numpy(tensor.detach().numpy())
