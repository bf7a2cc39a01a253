"""Which TensorRT a machine gets, and what is said where none fits, before any download."""

from __future__ import annotations

from dataclasses import replace

import pytest

from extension.backend_choice import Surroundings, choose, cuda_build, surroundings
from extension.driver import driver_cuda, driver_version, gpus
from extension.errors import UnsupportedMachineError
from extension.machine import machine_of, needs_no_gpu

RTX_4090 = Surroundings(
    system="Windows",
    processor="AMD64",
    python=(3, 10),
    torch_cuda="12.1",
    driver_cuda="12.8",
    gpu="NVIDIA GeForce RTX 4090",
    capability="8.9",
)


@pytest.mark.parametrize(
    ("changes", "backend", "cuda"),
    [
        ({}, "tensorrt_rtx", 12),
        ({"capability": "7.5"}, "tensorrt_rtx", 12),
        ({"capability": "8.6", "system": "Linux", "processor": "x86_64"}, "tensorrt_rtx", 12),
        ({"capability": "12.0", "torch_cuda": "12.8"}, "tensorrt_rtx", 12),
        ({"capability": "12.0", "torch_cuda": "13.0", "driver_cuda": "13.0"}, "tensorrt_rtx", 13),
        ({"torch_cuda": "11.8"}, "tensorrt_rtx", 12),
        ({"torch_cuda": "14.1", "driver_cuda": "14.1"}, "tensorrt_rtx", 13),
        ({"capability": "8.0", "gpu": "NVIDIA A100"}, "tensorrt", 12),
        ({"capability": "9.0", "gpu": "NVIDIA H200"}, "tensorrt", 12),
        ({"capability": "10.0", "gpu": "NVIDIA B200"}, "tensorrt", 12),
    ],
)
def test_what_fits(changes, backend, cuda):
    choice = choose(replace(RTX_4090, **changes))
    assert (choice.backend, choice.cuda) == (backend, cuda)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"driver_cuda": "", "capability": "", "gpu": ""}, "No NVIDIA driver"),
        ({"capability": "", "gpu": ""}, "No NVIDIA GPU"),
        ({"capability": "7.0", "gpu": "Tesla V100"}, r"Tesla V100 has compute capability 7\.0"),
        ({"capability": "6.1", "gpu": "NVIDIA GeForce GTX 1080"}, "GTX 1080"),
        ({"torch_cuda": None}, "without CUDA"),
        ({"driver_cuda": "11.4"}, r"supports CUDA 11\.4; .* needs CUDA 12"),
        ({"torch_cuda": "13.0"}, r"supports CUDA 12\.8; .* needs CUDA 13"),
        ({"system": "Darwin", "processor": "arm64"}, "Darwin"),
        ({"processor": "i386"}, "i386"),
        ({"python": (3, 9)}, r"3\.9"),
    ],
)
def test_what_does_not(changes, words):
    with pytest.raises(UnsupportedMachineError, match=words) as caught:
        choose(replace(RTX_4090, **changes))
    assert caught.value.hint


def test_a_torch_without_cuda_takes_what_the_driver_has():
    assert cuda_build(replace(RTX_4090, torch_cuda=None)) == 12
    assert cuda_build(replace(RTX_4090, torch_cuda=None, driver_cuda="13.0")) == 13
    assert cuda_build(replace(RTX_4090, torch_cuda=None, driver_cuda="")) == 13


@pytest.mark.parametrize(
    ("backend", "capability", "expected"),
    [
        ("tensorrt_rtx", "8.9", True),
        ("tensorrt_rtx", "9.0", False),
        ("tensorrt", "8.0", False),
        ("tensorrt", "8.9", False),
        ("onnxruntime", "cpu", True),
    ],
)
def test_which_worker_builds_without_seeing_the_gpu(backend, capability, expected):
    """The A100 is an 8.0, which TensorRT-RTX can name; its own backend still needs it."""
    assert needs_no_gpu(backend, (capability,)) is expected


@pytest.mark.parametrize("device", ["mps", "xpu:0", "privateuseone:0"])
def test_no_engine_runs_on_other_devices(device):
    with pytest.raises(
        UnsupportedMachineError, match=f"NVIDIA GPUs; this host draws on '{device}'"
    ):
        machine_of(device)


def test_this_machine_is_read_without_an_error():
    machine = surroundings()
    assert bool(machine.capability) == bool(gpus())
    assert machine.driver_cuda == driver_cuda()
    assert bool(driver_version()) == bool(driver_cuda())
