"""References are computed without TF32, and the host's own settings come back."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from extension.full_precision import full_precision

MATMUL, CUDNN = torch.backends.cuda.matmul, torch.backends.cudnn


@pytest.fixture(autouse=True)
def allowed():
    before = MATMUL.allow_tf32, CUDNN.allow_tf32
    MATMUL.allow_tf32 = CUDNN.allow_tf32 = True
    yield
    MATMUL.allow_tf32, CUDNN.allow_tf32 = before


def settings():
    return MATMUL.allow_tf32, CUDNN.allow_tf32


def test_off_inside_and_as_before_after_it():
    with full_precision():
        assert settings() == (False, False)
    assert settings() == (True, True)
    MATMUL.allow_tf32 = False
    with pytest.raises(ValueError, match="mine"), full_precision():
        raise ValueError("mine")
    assert settings() == (False, True)


def test_two_at_once_switch_back_once():
    entered, leave = threading.Event(), threading.Event()

    def other():
        with full_precision():
            entered.set()
            leave.wait(10)

    with full_precision():
        thread = threading.Thread(target=other)
        thread.start()
        assert entered.wait(10)
    assert settings() == (False, False)
    leave.set()
    thread.join()
    assert settings() == (True, True)


NEWER = """
import torch
from extension.full_precision import full_precision
torch.backends.cuda.matmul.fp32_precision = "tf32"
torch.backends.cudnn.conv.fp32_precision = "tf32"
torch.backends.cudnn.rnn.fp32_precision = "ieee"
def settings():
    return (torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision)
with full_precision():
    assert settings() == ("ieee", "ieee"), settings()
assert settings() == ("tf32", "tf32"), settings()
"""


@pytest.mark.skipif(not hasattr(MATMUL, "fp32_precision"), reason="torch before 2.9")
def test_a_host_that_uses_torchs_newer_settings():
    done = subprocess.run([sys.executable, "-c", NEWER], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
