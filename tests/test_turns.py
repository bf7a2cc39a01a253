"""CUDA graphs are captured in turns with whatever waits for a device; on fakes of torch.cuda."""

from __future__ import annotations

import ast
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import extension
from extension import parity
from extension.engine import cuda_graph
from extension.engine.cuda_graph import CallGraph
from extension.engine.torch_graph import TorchGraphEngine
from extension.engine.turns import Turns, turns
from extension.errors import EngineError
from extension.library import Library
from extension.pool import EnginePool
from extension.routed import RoutedUNet
from extension.router import Candidate
from extension.serving import Target, build_shared, load_engine
from extension.shapes import Shape
from tests.support_models import SMALL, random_inputs, random_weights

ARCH, SHAPE = SMALL["two-levels"], Shape(batch=2, height=8, width=8)
INVALID = RuntimeError("CUDA error: operation failed due to a previous error during capture\nmore")


class Device:
    """What a CUDA graph does, by hand: ``fails`` and ``replays`` are a test's to set."""

    def __init__(self):
        self.log, self.capturing, self.fails, self.replays = [], False, None, None
        self.out = torch.zeros(4)

    def enqueue(self):
        self.log.append("captured" if self.capturing else "plain")
        if not self.capturing:
            self.out.copy_(torch.arange(4.0))

    def make(self):
        def begin(capture_error_mode):
            assert capture_error_mode == "thread_local"
            self.capturing = True

        def end():
            self.capturing = False
            if self.fails is not None:
                raise self.fails

        def replay():
            self.log.append("replay")
            self.out.copy_(torch.arange(4.0) if self.replays is None else self.replays)

        return SimpleNamespace(capture_begin=begin, capture_end=end, replay=replay)

    def run(self, graph, times):
        """What was done in so many calls."""
        self.log.clear()
        for _ in range(times):
            graph.run(self.enqueue, self.out)
            assert torch.equal(self.out, torch.arange(4.0))
        return list(self.log)


@pytest.fixture
def device(monkeypatch):
    made = Device()
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(cuda_graph, "_capture_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", made.make)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    return made


@pytest.fixture
def graph(device):
    return CallGraph(torch.device("cuda"))


def test_plain_then_captured_and_compared_once(device, graph):
    assert device.run(graph, 1) == ["plain"]
    assert device.run(graph, 3) == ["captured", "plain", "replay", "replay", "replay"]
    graph.invalidate()
    assert device.run(graph, 3) == ["plain", "captured", "replay", "replay"]


@pytest.mark.parametrize("own", [False, True])
def test_a_capture_is_put_off_while_others_work(device, graph, own):
    """Also while this thread does, such as in a verification that a call waits for."""
    device.run(graph, 1)
    if own:
        with turns.work():
            assert device.run(graph, 3) == ["plain"] * 3
    else:
        entered, leave = threading.Event(), threading.Event()

        def work():
            with turns.work():
                entered.set()
                leave.wait(20)

        thread = threading.Thread(target=work)
        thread.start()
        assert entered.wait(20)
        assert device.run(graph, 3) == ["plain"] * 3
        leave.set()
        thread.join()
    assert device.run(graph, 1)[0] == "captured"


def test_after_a_capture_that_failed_calls_stay_plain(device, graph, caplog):
    """Another thread of the host has waited for the device meanwhile."""
    device.fails = INVALID
    assert device.run(graph, 4) == ["plain", "captured", "plain", "plain", "plain"]
    device.fails = None
    graph.invalidate()
    assert device.run(graph, 3) == ["plain"] * 3
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.endswith("operation failed due to a previous error during capture")
    with turns.capture() as free:
        assert free


def test_what_is_wrong_with_the_engine_is_not_hidden_by_the_capture(device, graph):
    def refuse():
        raise EngineError("the engine's own fault")

    device.run(graph, 1)
    with pytest.raises(EngineError, match="own fault"):
        graph.run(refuse, device.out)
    device.fails = torch.cuda.OutOfMemoryError("no memory")
    with pytest.raises(torch.cuda.OutOfMemoryError):
        graph.run(device.enqueue, device.out)
    with turns.capture() as free:
        assert free


@pytest.mark.parametrize("wrong", [[0, 1, 2, 3.1], [0, 1, 2, float("nan")], [0, 0, 0, 0]])
def test_a_graph_that_computes_something_else_is_refused(device, graph, wrong):
    device.run(graph, 1)
    device.replays = torch.tensor(wrong)
    with pytest.raises(EngineError, match="CUDA graph computes something else"):
        graph.run(device.enqueue, device.out)


def test_an_output_that_is_not_finite_is_for_the_watch(device, graph):
    bad = torch.tensor([0, 1, 2, float("inf")])
    device.enqueue = lambda: device.out.copy_(bad)
    device.replays = bad
    for _ in range(3):
        graph.run(device.enqueue, device.out)
    assert graph.captured


def test_work_waits_for_a_capture_but_not_for_its_own():
    made, order = Turns(), []
    with made.capture() as free:
        assert free
        with made.work(), made.work():
            order.append("own")
        thread = threading.Thread(target=lambda: order.append(_enter(made)))
        thread.start()
        thread.join(0.2)
        order.append("end")
    thread.join(20)
    assert order == ["own", "end", "entered"]


def _enter(made):
    with made.work():
        return "entered"


def test_one_capture_at_a_time():
    made, found = Turns(), []

    def attempt():
        with made.capture() as free:
            found.append(free)

    with made.capture() as free:
        assert free
        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()
    attempt()
    assert found == [False, True]


def capturable():
    with turns.capture() as free:
        return free


class Watched(TorchGraphEngine):
    """Notes whether its calls could be captured."""

    def __init__(self):
        super().__init__(ARCH, SHAPE, dtype="fp32", device="cpu")
        self.found = []

    def run(self, inputs):
        self.found.append(capturable())
        return super().run(inputs)


def test_only_the_calls_of_a_job_are_captured():
    """A verification runs in a thread of its own, beside a host that may wait for the device."""
    engine, weights = Watched(), random_weights(ARCH)
    parity.check(engine, ARCH, SHAPE, weights, dtype="fp32", device="cpu").require("engine")
    assert set(engine.found) == {False}
    pool = EnginePool()
    candidate = Candidate(
        stem="engine",
        architecture=ARCH.for_shape(SHAPE).id,
        shape=SHAPE,
        dtype="fp32",
        device="cpu",
        weights="shared",
    )
    pool.add(candidate, engine)
    inputs = random_inputs(ARCH, SHAPE, 1)
    engine.found.clear()
    unet = RoutedUNet(ARCH, weights, lambda *args: None, pool=pool)
    assert unet(*(inputs[name] for name in ("x", "timesteps", "context"))) is not None
    assert engine.found == [True]
    pool.close()


def test_nothing_is_captured_while_an_engine_is_loaded(tmp_path, monkeypatch):
    library, target = Library(tmp_path), Target(device="cpu")
    entry = build_shared(library, ARCH, SHAPE, target)
    found = []
    monkeypatch.setattr(
        "extension.serving.get_backend",
        lambda name: SimpleNamespace(
            load=lambda data, **options: (
                found.append(capturable())
                or SimpleNamespace(kernel_cache=lambda: b"", cache_refused=False)
            )
        ),
    )
    load_engine(library, entry, target)
    assert found == [False]


WAITS = ("torch.cuda.synchronize", "torch.cuda.empty_cache")
ALONE = ("commands/bench.py",)  # one thread, in a process of its own


def waits_outside_a_turn(tree, inside=False):
    """Lines that wait for a whole device without having their turn."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in WAITS and not inside:
            yield node.lineno
        turn = isinstance(node, ast.With) and any(
            ast.unparse(item.context_expr) == "turns.work()" for item in node.items
        )
        yield from waits_outside_a_turn(node, inside or turn)


def test_whoever_waits_for_a_device_takes_turns():
    root = Path(extension.__file__).parent
    sources = [p for p in root.rglob("*.py") if p.relative_to(root).as_posix() not in ALONE]
    found = {p.name: list(waits_outside_a_turn(ast.parse(p.read_text()))) for p in sources}
    assert {name: lines for name, lines in found.items() if lines} == {}
    bad = "def f():\n    with turns.work():\n        pass\n    torch.cuda.synchronize()\n"
    assert list(waits_outside_a_turn(ast.parse(bad))) == [4]
