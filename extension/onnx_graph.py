"""From an architecture to an ONNX model: weights as inputs, or in a safetensors file beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import __version__
from .architecture import Architecture
from .errors import SettingError
from .ops_onnx import IR_VERSION, OPSET, Dim, OnnxOps, Value, element_type
from .ops_shapes import skip_shapes
from .shapes import Shape
from .unet import EMITTER_VERSION, Control, input_blocks, run

if TYPE_CHECKING:
    from onnx import ModelProto

METADATA_PREFIX = "engine_room."
OUTPUT = "out"


@dataclass(frozen=True, kw_only=True)
class ExternalTensor:
    """Where a weight's bytes lie: absolute offset and length in the external file."""

    offset: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class ExternalWeights:
    """A safetensors file beside the ONNX file that holds every weight."""

    location: str
    tensors: Mapping[str, ExternalTensor]


def emit_graph(
    arch: Architecture,
    shape: Shape | None = None,
    *,
    dtype: str,
    control: bool = False,
    external: ExternalWeights | None = None,
    metadata: Mapping[str, str] | None = None,
) -> ModelProto:
    """Write the UNet as an ONNX model.

    Args:
        arch: the configuration.
        shape: static sizes; None gives symbolic batch, height, width and tokens.
        dtype: of every input, output and weight but ``timesteps`` (fp32): fp16, fp32 or bf16.
        control: with control inputs, where ``shape`` is None (else ``shape.control`` decides).
        external: weights as initializers in that file; None makes them inputs of the graph.
        metadata: extra entries, stored under ``engine_room.*``.

    Returns:
        The model, without any weight in memory.

    Raises:
        SettingError: unknown dtype, or a file that lacks a weight.
    """
    from onnx import helper

    if dtype not in ("fp16", "fp32", "bf16"):
        raise SettingError(f"The precision '{dtype}' is unknown.", hint="Use fp16, fp32 or bf16.")
    if shape is not None:
        arch, control = arch.for_shape(shape), shape.control
    ops = OnnxOps(dtype)
    inputs = graph_inputs(arch, shape, control=control)
    result = _interpret(ops, arch, inputs)
    values = [_value_info(name, dims, dtype) for name, dims in inputs.items()]
    initializers = list(ops.initializers.values())
    if external is None:
        values += [_value_info(name, dims, dtype) for name, dims in ops.parameters.items()]
    else:
        initializers += _external_initializers(ops.parameters, external, dtype)
    graph = helper.make_graph(
        [*ops.nodes, helper.make_node("Identity", [result.name], [OUTPUT], name="/out")],
        "unet",
        values,
        [_value_info(OUTPUT, (inputs["x"][0], arch.out_channels, *inputs["x"][2:]), dtype)],
        initializer=initializers,
    )
    model = helper.make_model(
        graph,
        producer_name="engine-room",
        producer_version=__version__,
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
    )
    facts = {"architecture": arch.id, "emitter": str(EMITTER_VERSION), **(metadata or {})}
    helper.set_model_props(model, {METADATA_PREFIX + key: text for key, text in facts.items()})
    return model


def graph_inputs(
    arch: Architecture, shape: Shape | None, *, control: bool
) -> dict[str, tuple[Dim, ...]]:
    """Name and dimensions of every input that is not a weight, in the engine's order."""
    dims: tuple[Dim, ...] = ("batch", "height", "width", "tokens")
    if shape is not None:
        dims = (shape.batch, shape.height, shape.width, shape.tokens)
    batch, height, width, tokens = dims
    inputs: dict[str, tuple[Dim, ...]] = {
        "x": (batch, arch.in_channels, height, width),
        "timesteps": (batch,),
        "context": (batch, tokens, arch.context_dim),
    }
    if arch.adm_channels:
        inputs["y"] = (batch, arch.adm_channels)
    if control:
        inputs |= _control_inputs(arch, shape)
    return inputs


def _control_inputs(arch: Architecture, shape: Shape | None) -> dict[str, tuple[Dim, ...]]:
    if shape is not None:
        sizes: list[tuple[Dim, ...]] = list(skip_shapes(arch, shape))
    else:
        level, sizes = 0, []
        for block in input_blocks(arch):
            level += block.kind == "down"
            sizes.append(("batch", block.channels, f"height_{level}", f"width_{level}"))
    found = {f"control_input_{i}": dims for i, dims in enumerate(sizes)}
    found["control_middle_0"] = sizes[-1]
    return found | {f"control_output_{i}": dims for i, dims in enumerate(sizes)}


def _interpret(ops: OnnxOps, arch: Architecture, inputs: Mapping[str, tuple[Dim, ...]]) -> Value:
    values = {name: Value(name, dims) for name, dims in inputs.items()}
    control: Control[Value] | None = None
    if "control_middle_0" in values:
        count = sum(name.startswith("control_input_") for name in values)
        control = Control(
            input=[values[f"control_input_{i}"] for i in range(count)],
            middle=[values["control_middle_0"]],
            output=[values[f"control_output_{i}"] for i in range(count)],
        )
    return run(
        ops,
        arch,
        values["x"],
        values["timesteps"],
        values["context"],
        values.get("y"),
        control,
    )


def _value_info(name: str, dims: tuple[Dim, ...], dtype: str) -> Any:
    from onnx import helper

    return helper.make_tensor_value_info(
        name, element_type("fp32" if name == "timesteps" else dtype), list(dims)
    )


def _external_initializers(
    parameters: Mapping[str, tuple[int, ...]], external: ExternalWeights, dtype: str
) -> list[Any]:
    from onnx import StringStringEntryProto, TensorProto

    found = []
    for name, dims in parameters.items():
        where = external.tensors.get(name)
        if where is None:
            raise SettingError(f"'{external.location}' lacks the weight '{name}'.")
        tensor = TensorProto(
            name=name,
            data_type=element_type(dtype),
            dims=dims,
            data_location=TensorProto.EXTERNAL,
        )
        for key, text in (
            ("location", external.location),
            ("offset", where.offset),
            ("length", where.nbytes),
        ):
            tensor.external_data.append(StringStringEntryProto(key=key, value=str(text)))
        found.append(tensor)
    return found
