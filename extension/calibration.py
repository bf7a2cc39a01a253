"""Reference inputs and outputs of a baked engine, so that it can be verified without its weights.

One safetensors file beside the engine, written when it is built: for each timestep of the parity
gate the inputs, and the fp32 output of torch with the weights that were baked in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from .accuracy import relative_l2
from .architecture import Architecture
from .binding import TORCH_DTYPES
from .checkpoint import tensor_bytes
from .dispatch import run_unet
from .engine.interface import Engine
from .engine.turns import turns
from .errors import BadFileError, EngineError
from .full_precision import reference_math
from .ops_torch import TorchUNet
from .parity import TIMESTEPS, ParityResult, limit_for, random_inputs
from .safetensors_file import Entry, write_safetensors
from .shapes import Shape
from .tensor_source import SafetensorsSource

OUTPUT, NOISE = "out", "noise"


def write_calibration(
    path: Path,
    arch: Architecture,
    weights: Mapping[str, Tensor],
    shape: Shape,
    *,
    dtype: str,
    device: str,
    pause: Callable[[], None] = lambda: None,
) -> None:
    """Compute the references on ``device`` and write them; raises OutputError on a full disk.

    Args:
        dtype: of the engine: what rounding to it costs torch is kept too, for the limit.
        pause: called between slices of work.
    """
    place, arch = torch.device(device), arch.for_shape(shape)
    exact, rounded = TorchUNet(arch, weights), TorchUNet(arch, weights, TORCH_DTYPES[dtype])
    tensors: dict[str, Tensor] = {}
    with reference_math(place):
        for seed, timestep in enumerate(TIMESTEPS):
            inputs = random_inputs(arch, shape, timestep, seed=seed, device=place)
            expected = run_unet(exact, inputs)
            pause()
            noise = 0.0
            if dtype != "fp32":
                noise = relative_l2(run_unet(rounded, inputs), expected)
                pause()
            found = {**inputs, OUTPUT: expected, NOISE: torch.tensor([noise])}
            tensors.update({f"{seed}.{name}": t.float().cpu() for name, t in found.items()})
    entries = [Entry(name, "F32", tuple(t.shape)) for name, t in tensors.items()]
    write_safetensors(path, entries, (tensor_bytes(t.contiguous()) for t in tensors.values()))


def check_calibrated(
    engine: Engine, path: Path, *, device: str, pause: Callable[[], None] = lambda: None
) -> ParityResult:
    """Compare an engine with the references.

    Raises:
        EngineError: there are none, or they do not fit the engine.
    """
    worst = noise = 0.0
    for call in _read(path):
        expected, rounding = call.pop(OUTPUT), call.pop(NOISE)
        wrong = [n for n, spec in engine.inputs.items() if _shape(call.get(n)) != spec.shape]
        if wrong:
            raise EngineError(f"The references do not fit the engine: '{wrong[0]}' differs.")
        inputs = {
            name: call[name].to(device=device, dtype=TORCH_DTYPES[spec.dtype])
            for name, spec in engine.inputs.items()
        }
        with turns.work():
            worst = max(worst, relative_l2(engine.run(inputs).cpu(), expected))
        noise = max(noise, float(rounding))
        pause()
    return ParityResult(worst=worst, noise=noise, limit=limit_for(noise))


def _shape(tensor: Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tuple(tensor.shape)


def _read(path: Path) -> list[dict[str, Tensor]]:
    """The calls by timestep, copied out of the file."""
    calls: list[dict[str, Tensor]] = [{} for _ in TIMESTEPS]
    try:
        source = SafetensorsSource(path)
    except (BadFileError, OSError) as error:
        raise EngineError(
            f"The engine {path.name.split('.')[0]} has no references to verify it with: {error}",
            hint="Remove the engine and build it again.",
        ) from error
    try:
        for name in source.shapes:
            index, _, leaf = name.partition(".")
            if index.isdecimal() and int(index) < len(calls):
                calls[int(index)][leaf] = source.read(name).clone()
    finally:
        source.close()
    if any(OUTPUT not in call or NOISE not in call for call in calls):
        raise EngineError(f"'{path.name}' lacks references.", hint="Build the engine again.")
    return calls
