"""Compile an ONNX file with TensorRT (worker process; no torch)."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import BuildError
from ..files import atomic_write
from ..log import logger
from .interface import BuildResult, BuildSpec, ProgressCallback
from .trt_api import EDITIONS, capability_enum

HWC8_CHANNELS = 8
ACTIVATION_LINE = re.compile(r"Total Activation Memory: (\d+) bytes")


def build(
    trt: ModuleType, name: str, model: Path, spec: BuildSpec, out: Path, progress: ProgressCallback
) -> BuildResult:
    """Parse ``model`` and write the compiled engine to ``out``.

    Raises:
        BuildError: the parser or the builder failed; its messages are in the details.
    """
    log = make_logger(trt)
    builder = trt.Builder(log)
    network = builder.create_network(_network_flags(trt))
    progress(0.0, "reading the graph")
    parser = trt.OnnxParser(network, log)
    if not _parse(parser, model):
        faults = [_parser_fault(parser.get_error(i)) for i in range(parser.num_errors)]
        raise _failure("TensorRT cannot read the graph", faults or log.faults)
    if spec.conv_format == "hwc8":
        _use_hwc8(trt, network, set(spec.weight_inputs))
    config = builder.create_builder_config()
    if EDITIONS[name].ahead_of_time:
        _set_capabilities(trt, config, spec.capabilities)
    monitor = _make_monitor(trt, progress)
    config.progress_monitor = monitor
    progress(0.05, "compiling")
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise _failure("TensorRT could not build the engine", log.faults)
    progress(0.98, "writing the engine")
    atomic_write(out, memoryview(plan))
    return BuildResult(
        activation_bytes=log.activation_bytes,
        details={"layers": network.num_layers, "inputs": network.num_inputs},
    )


def _parse(parser: Any, model: Path) -> bool:
    """Read ``model`` and the weights beside it from inside its folder.

    On Windows the parser opens no path with characters beyond the system's own code page.
    """
    before = Path.cwd()
    os.chdir(model.parent)
    try:
        return bool(parser.parse_from_file(model.name))
    finally:
        os.chdir(before)


def make_logger(trt: ModuleType) -> Any:
    """An ILogger that passes messages to ours, keeps the errors and the activation size."""

    class Log(trt.ILogger):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.faults: list[str] = []
            self.activation_bytes = 0

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.ERROR:
                self.faults.append(message)
            match = ACTIVATION_LINE.search(message)
            if match:
                self.activation_bytes = int(match.group(1))
            # TensorRT's warnings are meant for developers; a user reads them as faults.
            logger.debug("TensorRT: %s", message)

    return Log()


def _make_monitor(trt: ModuleType, progress: ProgressCallback) -> Any:
    """Show that phases pass; the share of time is the caller's model, not TensorRT's steps."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[name-defined,misc]
        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            if parent == "Building engine":
                progress(0.05, "compiling")

        def phase_finish(self, phase: str) -> None:
            pass

        def step_complete(self, phase: str, step: int) -> bool:
            return True

    return Monitor()


def _network_flags(trt: ModuleType) -> int:
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)


def _set_capabilities(trt: ModuleType, config: Any, capabilities: tuple[str, ...]) -> None:
    config.num_compute_capabilities = len(capabilities)
    for index, capability in enumerate(capabilities):
        config.set_compute_capability(capability_enum(trt, capability), index)


def _use_hwc8(trt: ModuleType, network: Any, weights: set[str]) -> None:
    """Take 3x3 convolution weights in HWC8, whose bytes are torch's channels_last."""
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        if tensor.name in weights and takes_hwc8(tuple(tensor.shape)):
            tensor.allowed_formats = 1 << int(trt.TensorFormat.HWC8)


def takes_hwc8(shape: tuple[int, ...]) -> bool:
    """Whether a weight of ``shape`` is a 3x3 convolution of whole groups of 8 channels."""
    return len(shape) == 4 and shape[2:] == (3, 3) and shape[1] % HWC8_CHANNELS == 0


def _parser_fault(error: Any) -> str:
    return f"{error.node_operator()} '{error.node_name()}': {error.desc()}"


def last_fault(log: Any) -> str:
    """TensorRT's last error message, shortened."""
    return log.faults[-1].strip()[:300] if log.faults else "it gave no reason"


def _failure(what: str, faults: list[str]) -> BuildError:
    first = faults[0].strip() if faults else "it gave no reason"
    return BuildError(
        f"{what}: {first[:300]}",
        hint="The log has all messages; 'python -m extension doctor' checks the installation.",
        details={"messages": faults[:20]},
    )
