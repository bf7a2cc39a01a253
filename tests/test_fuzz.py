"""Thousands of damaged files over every reader: one clear error or a right result, nothing else."""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import save_file

from extension.building import build_engine
from extension.checkpoint import open_checkpoint
from extension.engine_state import State
from extension.errors import EngineRoomError
from extension.kernel_cache import KernelCache
from extension.library import Library
from extension.lora import read_lora
from extension.synthetic import random_unet
from extension.synthetic_lora import make_lora
from tests.support_models import SMALL
from tests.test_jobs import ARCH, request

ROOT = Path(__file__).resolve().parents[1]
EACH = 1000
SECONDS = 5.0
MEMORY = 1_000_000


def mutations(data, count, seed):
    """Damaged copies: flips, cuts, insertions, swaps, huge numbers in the head of the file."""
    rng = random.Random(seed)
    head = min(len(data), 4096)
    for _ in range(count):
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 8))):
            kind = rng.randrange(6)
            place = rng.randrange(head if rng.random() < 0.8 else len(changed)) % len(changed)
            if kind == 0:
                changed[place] ^= 1 << rng.randrange(8)
            elif kind == 1:
                del changed[place : place + rng.randrange(1, 64)]
            elif kind == 2:
                changed[place:place] = rng.randbytes(rng.randrange(1, 64))
            elif kind == 3:
                changed[place : place + 8] = rng.choice(
                    (b"\xff" * 8, b"\x00" * 8, b"\x7f" + b"\xff" * 7, b"[" * 8, b'"../../x')
                )
            elif kind == 4:
                changed = changed[:place]
            else:
                number = str(rng.choice((-1, 2**31, 2**63, 2**70, 10**30))).encode()
                changed[place : place + 4] = number
            if not changed:
                changed = bytearray(b"\0")
        yield bytes(changed)


def attempt(read):
    """Run one reader; anything but a clear error or a result fails."""
    started = time.monotonic()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        result = read()
    except EngineRoomError as error:
        assert error.message
        result = None
    assert time.monotonic() - started < SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEMORY
    return result


def read_checkpoint(path):
    with open_checkpoint(path) as checkpoint:
        return sum(float(checkpoint[name].float().nan_to_num().sum()) for name in checkpoint)


def read_adapters(path):
    file = read_lora(path)
    try:
        return file.match(ARCH)
    finally:
        file.close()


@pytest.mark.parametrize("kind", ["checkpoint", "lora"])
def test_model_files(tmp_path, kind):
    source = tmp_path / "source.safetensors"
    if kind == "checkpoint":
        weights = {f"model.diffusion_model.{n}": t.half() for n, t in random_unet(ARCH).items()}
        save_file(weights, source)
        read = read_checkpoint
    else:
        make_lora(source, architecture=ARCH, kind="loha", rank=2)
        read = read_adapters
    whole = source.read_bytes()
    # The body is the same noise everywhere; the head decides. Cut, so that a write is quick.
    path = tmp_path / "m.safetensors"
    for data in mutations(whole, EACH // 4 if kind == "checkpoint" else EACH, seed=kind):
        path.write_bytes(data)
        attempt(lambda: read(path))
    path.unlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source.safetensors"]


def test_pickles(tmp_path):
    import torch

    source = tmp_path / "source.ckpt"
    torch.save({"state_dict": {"model.diffusion_model.x": torch.zeros(8, 8)}}, source)
    whole, path = source.read_bytes(), tmp_path / "m.ckpt"
    for data in mutations(whole, EACH, seed="pickle"):
        path.write_bytes(data)
        attempt(lambda: read_checkpoint(path))


def test_manifests_states_and_engines(tmp_path):
    """None may become ready, and none may be read, unless it is the very file."""
    library = Library(tmp_path)
    entry = build_engine(library, request())
    stem = entry.stem
    files = [library.manifest_path(stem), library.engine_path(stem)]
    library.update_state(stem, parity=[{"gpu": "CPU", "worst_relative_l2": 1.0, "limit": 2.0}])
    files.append(library.state_path(stem))
    originals = {path: path.read_bytes() for path in files}
    for path, whole in originals.items():
        for data in mutations(whole, EACH, seed=path.suffix):
            path.write_bytes(data)
            found = attempt(lambda: library.entry(stem, None))
            assert isinstance(found.state, State)
            assert found.state is not State.READY
            read = attempt(lambda: library.read_engine(stem))
            assert read in (None, originals[library.engine_path(stem)])
        path.write_bytes(whole)
    assert attempt(lambda: library.read_engine(stem)) == originals[library.engine_path(stem)]


def test_kernel_caches_and_build_histories(tmp_path):
    cache = KernelCache(tmp_path, "gpu", "1")
    cache.write(b"kernels" * 100)
    whole = cache.path.read_bytes()
    for data in mutations(whole, EACH, seed="cache"):
        cache.path.write_bytes(data)
        assert cache.read() in (b"", b"kernels" * 100)


WORKER = """
import sys, json, random
sys.path.insert(0, {root!r})
from tests.test_fuzz import *
from extension import worker_tasks
from tests.test_live import ARCH as OTHER
job = {{"format": 1, "kind": "build", **json.loads({job!r})}}
whole = json.dumps(job).encode()
done = 0
for data in mutations(whole, {count}, seed="job"):
    try:
        changed = json.loads(data)
    except ValueError:
        continue
    if not isinstance(changed, dict):
        continue
    changed |= {{"folder": {folder!r}, "out": {folder!r} + "/x.engine"}}
    events = []
    code = worker_tasks.run(changed, lambda event, **f: events.append((event, f)), 1e9)
    assert code in (0, 1)
    assert events[-1][0] in ("done", "error"), events
    done += 1
print(done)
"""


def test_jobs(tmp_path):
    """Whatever a job says, the worker answers with one last event."""
    build = request(SMALL["two-levels"])
    job = {"key": build.key.to_json(), "architecture": build.architecture.to_json()}
    code = WORKER.format(root=str(ROOT), job=json.dumps(job), folder=str(tmp_path), count=EACH // 2)
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=500
    )
    assert out.returncode == 0, out.stderr[-2000:]
    assert int(out.stdout.split()[-1]) > 20
