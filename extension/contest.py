"""Who of several serves a kind of call: the one whose steps are measured to be the shortest."""

from __future__ import annotations

from collections.abc import Hashable

from .key import EngineKey
from .log import logger
from .pace import measured
from .pool import EnginePool
from .router import INSTANT, Call, Host, Plan, Reason

HOST = "host"
CLEARLY = 1.03  # less is noise
SLOWER = 1.05  # than the host: neither GPU memory that spills nor a driver's fault is so little
SUSPICIOUS = 2.5  # times its own best step
PATIENCE = 12  # calls, until the host's time is known
NOT_MEASURED = (Reason.FEATURE, Reason.INPUTS, Reason.ENGINE_FAILED, Reason.NOT_FINITE)


def kind_of(call: Call) -> Hashable:
    """Calls of one kind take the same time."""
    return call.architecture, call.shape, call.dtype, call.device


def kind_of_engine(key: EngineKey, device: str) -> Hashable:
    """The calls that an engine serves as they are."""
    return key.architecture, key.shape, key.io_dtype, device


def server_of(answer: Plan | Host) -> str:
    """Who serves, as ``Pace`` knows it; empty where it does not count as the host's usual call."""
    if isinstance(answer, Plan):
        return answer.weights
    return "" if answer.reason in NOT_MEASURED else HOST


def host_is_timed(pool: EnginePool, call: Call) -> bool:
    """Whether an engine may be made now: first the host is timed, undisturbed.

    True also where that takes too long: a sampler whose calls change in size has no steps.
    """
    kind, pace = kind_of(call), pool.pace
    if not measured(call.device) or pace.calls[kind] >= PATIENCE:
        return True
    return pace.milliseconds(kind, HOST) is not None


def choose(pool: EnginePool, call: Call, built: Plan | Host, instant: Plan | Host) -> Plan | Host:
    """A built engine or an instant one: first the one, then the other, then the faster.

    An instant engine that has lost is released.
    """
    if not isinstance(built, Plan) or not isinstance(instant, Plan):
        return instant if isinstance(instant, Plan) else built
    kind = kind_of(call)
    theirs, ours = (pool.pace.milliseconds(kind, name) for name in (INSTANT, built.weights))
    if ours is None or (theirs is None and pool.pace.is_disturbed):
        return built
    if theirs is None or theirs * CLEARLY < ours:
        return instant
    for part in instant.parts:
        pool.remove(part.stem)
    return built


def against_host(pool: EnginePool, call: Call, plan: Plan) -> Plan | Host:
    """The plan; the host's turn, where engines seem slower and its time has to be known anew.

    Engines that are slower by that time are set aside.
    """
    kind, pace = kind_of(call), pool.pace
    ours, host = pace.milliseconds(kind, plan.weights), pace.milliseconds(kind, HOST)
    if ours is None or pace.is_disturbed:
        return plan
    if kind not in pace.trials:
        best = pace.best(kind, plan.weights) or ours
        if ours <= SUSPICIOUS * best and (host is None or ours <= SLOWER * host):
            return plan
        pace.forget(kind, HOST)
        pace.trials.add(kind)
        host = None
    if host is None:
        return Host(reason=Reason.SLOWER, text="the engine seems slow; the host is timed")
    pace.trials.discard(kind)
    if ours <= SLOWER * host:
        pace.forget(kind, plan.weights)
        return plan
    text = f"slower than the host ({ours:.0f} ms a step instead of {host:.0f})"
    return set_aside(pool, plan, Reason.SLOWER, text)


def set_aside(pool: EnginePool, plan: Plan, reason: Reason, text: str) -> Host:
    """Keep the engines of a plan out of service, which is logged once; the host serves."""
    names = ", ".join(sorted({part.stem for part in plan.parts}))
    fallen = [part for part in plan.parts if pool.set_aside(part.stem, text)]
    if reason is Reason.MEMORY:
        pool.lacking.update(part.stem for part in plan.parts)
    if fallen:
        logger.warning("Engine %s is set aside: %s. The host serves.", names, text)
    return Host(reason=reason, text=f"engine {names}: {text}")
