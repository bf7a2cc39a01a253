"""Decide per UNet call: which engine serves it and how, or the host, and why. Pure logic."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import Any

from .shapes import Shape

INSTANT = "instant"  # the torch UNet as a CUDA graph: nothing is built for it

# One engine call costs about as much as this many rows of work, beside its own rows: it settles
# ties towards fewer, larger calls.
CALL_OVERHEAD_ROWS = 0.25


class Reason(Enum):
    """Why the host serves a call; the value is the stable code."""

    NO_ENGINE = "no-engine"
    SIZE = "size"
    TOKENS = "tokens"
    CONTROL = "control"
    FEATURE = "feature"
    PRECISION = "precision"
    DEVICE = "device"
    INPUTS = "inputs"
    NOT_READY = "not-ready"
    WEIGHTS = "weights"
    MEMORY = "memory"
    ENGINE_FAILED = "engine-failed"
    NOT_FINITE = "not-finite"
    SLOWER = "slower"
    MODEL = "model"


@dataclass(frozen=True, kw_only=True)
class Call:
    """One UNet call as a host adapter describes it.

    Attributes:
        architecture: id of the model's architecture for this shape (``for_shape(shape).id``).
        shape: batch, latent size, context rows, and whether control residuals are present.
        dtype: of ``x``: ``fp16``, ``bf16`` or ``fp32``.
        device: of ``x``, such as ``cuda:0``.
        features: names of active features that touch the UNet and that no engine computes.
        epoch: the weights epoch: changes whenever weights may have changed.
        fingerprint: content fingerprint of the weights in this epoch, if it is known already.
        modes: which engines may serve: ``shared``, ``baked``, ``instant``.
    """

    architecture: str
    shape: Shape
    dtype: str
    device: str
    features: tuple[str, ...] = ()
    epoch: Hashable = None
    fingerprint: str | None = None
    modes: tuple[str, ...] = ("shared", "baked")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An engine that the router may choose.

    Attributes:
        stem: its name in the library.
        ready: verified on this device, and neither set aside nor still loading.
        problem: why it was set aside.
    """

    stem: str
    architecture: str
    shape: Shape
    dtype: str
    device: str
    weights: str
    fingerprint: str | None = None
    ready: bool = True
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Rows ``start:stop`` of the call through one engine.

    Attributes:
        padding: rows repeated from the last one to fill the engine's batch.
        repeats: how often the context is repeated along its rows (exact: cross-attention's
            softmax over duplicated keys equals that over single ones).
        zero_control: the engine's control inputs get zeros.
    """

    stem: str
    start: int
    stop: int
    padding: int
    repeats: int
    zero_control: bool = False


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The call is served by engines, part by part, in order."""

    parts: tuple[Part, ...]
    weights: str


@dataclass(frozen=True, kw_only=True)
class Host:
    """The host serves the call; ``text`` says why, for people."""

    reason: Reason
    text: str


def route(call: Call, candidates: Iterable[Candidate]) -> Plan | Host:
    """Return the cheapest plan for ``call``, or why there is none.

    Each rule narrows the candidates; the rule that leaves none gives the reason. A baked engine
    is taken only when its fingerprint is that of the call's weights.
    """
    if call.features:
        names = ", ".join(call.features)
        return Host(reason=Reason.FEATURE, text=f"active in the UNet: {names}")
    left = [candidate for candidate in candidates if candidate.weights in call.modes]
    for rule in _rules(call):
        kept = [candidate for candidate in left if rule.keeps(candidate)]
        if not kept:
            return Host(reason=rule.reason, text=rule.explain(left))
        left = kept
    return _cheapest(call, left)


@dataclass(frozen=True)
class _Rule:
    reason: Reason
    keeps: Any
    explain: Any


def _rules(call: Call) -> Sequence[_Rule]:
    """In order of what a user should hear first."""
    shape = call.shape
    width, height = shape.pixels
    return (
        _Rule(
            Reason.NO_ENGINE,
            lambda c: c.architecture == call.architecture,
            lambda left: "no engine for this kind of model (and this size) yet",
        ),
        _Rule(
            Reason.SIZE,
            lambda c: (c.shape.width, c.shape.height) == (shape.width, shape.height),
            lambda left: f"no engine for {width}x{height}; there are {_sizes(left)}",
        ),
        _Rule(
            Reason.PRECISION,
            lambda c: c.dtype == call.dtype,
            lambda left: f"the host computes in {call.dtype}; the engine in {_all(left, 'dtype')}",
        ),
        _Rule(
            Reason.DEVICE,
            lambda c: c.device == call.device,
            lambda left: f"the model is on {call.device}; the engine on {_all(left, 'device')}",
        ),
        _Rule(
            Reason.CONTROL,
            lambda c: c.shape.control or not shape.control,
            lambda left: "ControlNet is active; the engine has no control inputs",
        ),
        _Rule(
            Reason.TOKENS,
            lambda c: c.shape.tokens % shape.tokens == 0,
            lambda left: (
                f"the prompt needs {shape.tokens} context rows; engines take "
                f"{', '.join(str(t) for t in sorted({c.shape.tokens for c in left}))}"
            ),
        ),
        _Rule(
            Reason.WEIGHTS,
            lambda c: c.weights != "baked" or c.fingerprint == call.fingerprint is not None,
            lambda left: "the engine has the weights of another checkpoint or LoRA baked in",
        ),
        _Rule(
            Reason.NOT_READY,
            lambda c: c.ready,
            _explain_not_ready,
        ),
    )


def _explain_not_ready(candidates: Sequence[Candidate]) -> str:
    for candidate in candidates:
        if candidate.problem:
            return f"engine {candidate.stem} was set aside: {candidate.problem}"
    return "the engine is not verified on this device yet"


def _sizes(candidates: Iterable[Candidate]) -> str:
    sizes = sorted({candidate.shape.pixels for candidate in candidates})
    more = f" and {len(sizes) - 4} more" if len(sizes) > 4 else ""
    return ", ".join(f"{w}x{h}" for w, h in sizes[:4]) + more


def _all(candidates: Iterable[Candidate], attribute: str) -> str:
    return ", ".join(sorted({getattr(candidate, attribute) for candidate in candidates}))


def _cheapest(call: Call, candidates: Sequence[Candidate]) -> Plan:
    """The cheapest group of interchangeable engines, and how it covers the batch.

    Engines of one plan share tokens, control inputs and weights mode, so that a picture is not
    computed half one way and half another.
    """
    groups: dict[tuple[bool, int, str], dict[int, Candidate]] = {}
    for candidate in candidates:
        key = (candidate.shape.control, candidate.shape.tokens, candidate.weights)
        groups.setdefault(key, {}).setdefault(candidate.shape.batch, candidate)
    plans = []
    for key, by_batch in groups.items():
        cost, batches = _cover(call.shape.batch, tuple(sorted(by_batch)))
        plans.append((cost, key, [by_batch[b] for b in batches]))
    _, key, chosen = min(plans, key=lambda plan: (plan[1][0], plan[0], plan[1]))
    return Plan(parts=_parts(call, chosen), weights=key[2])


@lru_cache(maxsize=256)
def _cover(rows: int, sizes: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
    """Least cost to serve ``rows`` rows with engines of given batches; largest first."""
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for done in range(1, rows + 1):
        options = [
            (cost + batch + CALL_OVERHEAD_ROWS, (batch, *batches))
            for batch in sizes
            for cost, batches in [best[max(0, done - batch)]]
        ]
        best.append(min(options, key=lambda option: (option[0], len(option[1]))))
    cost, batches = best[rows]
    return cost, tuple(sorted(batches, reverse=True))


def _parts(call: Call, engines: Sequence[Candidate]) -> tuple[Part, ...]:
    parts, start = [], 0
    for engine in engines:
        stop = min(start + engine.shape.batch, call.shape.batch)
        parts.append(
            Part(
                stem=engine.stem,
                start=start,
                stop=stop,
                padding=engine.shape.batch - (stop - start),
                repeats=engine.shape.tokens // call.shape.tokens,
                zero_control=engine.shape.control and not call.shape.control,
            )
        )
        start = stop
    return tuple(parts)


@dataclass
class Counters:
    """How many calls engines and host served, and why the host did. Thread-safe.

    Attributes:
        parent: counts everything too, such as for all models of a process.
    """

    parent: Counters | None = None
    served: Counter[str] = field(default_factory=Counter)
    host: Counter[tuple[Reason, str]] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def count(self, answer: Plan | Host) -> None:
        """Count one call; a plan counts once for each engine that takes part."""
        if self.parent is not None:
            self.parent.count(answer)
        with self._lock:
            if isinstance(answer, Host):
                self.host[answer.reason, answer.text] += 1
                return
            self.served[""] += 1
            for stem in {part.stem for part in answer.parts}:
                self.served[stem] += 1

    def take_back(self, plan: Plan) -> None:
        """Undo ``count``: what the plan computed was thrown away."""
        if self.parent is not None:
            self.parent.take_back(plan)
        with self._lock:
            self.served.subtract(("", *{part.stem for part in plan.parts}))

    def reset(self) -> None:
        """Start again from zero."""
        with self._lock:
            self.served.clear()
            self.host.clear()

    def copy(self) -> Counters:
        """The counts as they are now."""
        with self._lock:
            return Counters(served=self.served.copy(), host=self.host.copy())

    def since(self, before: Counters) -> Counters:
        """What was counted after ``before`` was copied."""
        now = self.copy()
        return Counters(served=now.served - before.served, host=now.host - before.host)

    @property
    def totals(self) -> tuple[int, int]:
        """Calls served by engines, and calls served by the host."""
        with self._lock:
            return self.served[""], sum(self.host.values())

    def to_json(self) -> Mapping[str, Any]:
        """Totals, engines by stem, and reasons with code, text and count, most frequent first."""
        with self._lock:
            return {
                "served": self.served[""],
                "host": sum(self.host.values()),
                "engines": {stem: n for stem, n in sorted(self.served.items()) if stem and n},
                "reasons": [
                    {"code": reason.value, "text": text, "count": n}
                    for (reason, text), n in self.host.most_common()
                ],
            }

    @property
    def sentence(self) -> str:
        """For people: ``engine served 38 of 40 calls; 2 to the host: ControlNet ...``."""
        facts = self.to_json()
        total = facts["served"] + facts["host"]
        text = f"engine served {facts['served']} of {total} calls"
        if not facts["host"]:
            return text
        reasons = "; ".join(f"{r['count']} to the host: {r['text']}" for r in facts["reasons"])
        return f"{text}; {reasons}"
