"""A UNet whose calls go through engines where they can, and to the host where they cannot."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from .architecture import Architecture
from .binding import BindingReport
from .contest import against_host, choose, kind_of, server_of, set_aside
from .dispatch import engine_inputs, serve
from .engine.interface import Engine
from .errors import EngineRoomError, MemoryShortError
from .memory import shortfall
from .pool import EnginePool, LoadedEngine
from .router import INSTANT, Call, Candidate, Counters, Host, Plan, Reason, route
from .shapes import Shape
from .unet import Control
from .watch import NotFiniteError, OutputWatch, is_finite, repeatable

DTYPE_NAMES = {torch.float16: "fp16", torch.float32: "fp32", torch.bfloat16: "bf16"}
MISSING = (
    Reason.NO_ENGINE,
    Reason.SIZE,
    Reason.PRECISION,
    Reason.TOKENS,
    Reason.CONTROL,
    Reason.WEIGHTS,
    Reason.NOT_READY,
)
UNetCall = Callable[..., Tensor]
Result = TypeVar("Result")
NOT_FINITE = "its output is not finite"


class RoutedUNet:
    """Serves UNet calls for one model.

    Args:
        arch: the model's architecture.
        weights: LDM name to tensor: what shared engines are bound to.
        host: the host's own UNet with the same arguments: serves every call no engine can.
        epoch: token of the weights as given; see ``set_weights``.
        pool: engines in memory; one of its own by default.
        counters: of all models of the process, counted too.
        on_miss: called with a call that no engine serves yet and why; may load one, and returns
            whether routing should be tried again.
        explain: why there is no engine yet for a call that misses one, or empty.
        on_served: called with every call that an engine has served.
    """

    def __init__(
        self,
        arch: Architecture,
        weights: Mapping[str, Tensor],
        host: UNetCall,
        *,
        epoch: Hashable = 0,
        fingerprint: str | None = None,
        pool: EnginePool | None = None,
        counters: Counters | None = None,
        on_miss: Callable[[Call, Host], bool] = lambda call, answer: False,
        explain: Callable[[Call], str] = lambda call: "",
        on_served: Callable[[Call], None] = lambda call: None,
    ) -> None:
        self.arch = arch
        self.host = host
        self.counters = Counters(parent=counters)
        self.last_binding: BindingReport | None = None
        self.pool = pool or EnginePool()
        self._on_miss, self._explain, self._on_served = on_miss, explain, on_served
        self.modes: tuple[str, ...] = ("shared", "baked")
        self.precision = ""
        self._identity = object()
        self._watch: OutputWatch | None = None
        self.set_weights(weights, epoch=epoch, fingerprint=fingerprint)

    def set_weights(
        self, weights: Mapping[str, Tensor], *, epoch: Hashable, fingerprint: str | None = None
    ) -> None:
        """Serve ``weights`` from the next call on: no build, no refit.

        Args:
            epoch: must differ from the last one whenever contents may have changed.
            fingerprint: of the contents, where known; baked engines need it.
        """
        self.weights, self.epoch, self.fingerprint = weights, epoch, fingerprint

    def add_engine(self, candidate: Candidate, engine: Engine) -> None:
        """Offer a loaded engine to the router."""
        self.pool.add(candidate, engine)

    def describe(
        self, x: Tensor, context: Tensor, control: bool, features: Sequence[str] = ()
    ) -> Call:
        """The call as the router sees it."""
        shape = Shape(
            batch=x.shape[0],
            height=x.shape[2],
            width=x.shape[3],
            tokens=context.shape[1],
            control=control,
        )
        return Call(
            architecture=self.arch.for_shape(shape).id,
            shape=shape,
            dtype=self.precision or DTYPE_NAMES.get(x.dtype, str(x.dtype)),
            device=str(x.device),
            features=tuple(features),
            epoch=self.epoch,
            fingerprint=self.fingerprint,
            modes=self.modes,
        )

    def __call__(
        self,
        x: Tensor,
        timesteps: Tensor,
        context: Tensor,
        y: Tensor | None = None,
        control: Control[Tensor] | None = None,
        *,
        features: Sequence[str] = (),
    ) -> Tensor:
        """One UNet call; the result has ``x``'s dtype."""
        out = self.serve(x, timesteps, context, y, control, features=features)
        return self.host(x, timesteps, context, y, control) if out is None else out

    @torch.no_grad()
    def serve(
        self,
        x: Tensor,
        timesteps: Tensor,
        context: Tensor,
        y: Tensor | None = None,
        control: Control[Tensor] | None = None,
        *,
        features: Sequence[str] = (),
    ) -> Tensor | None:
        """The call through engines, in ``x``'s dtype; None where the host must serve.

        Either way it is counted. Inputs are never changed. An engine that fails is set aside.
        """
        call = self.describe(x, context, control is not None, features)
        answer = self._route(call)
        self._note_step(call, answer, x.device)
        if isinstance(answer, Plan):
            with self.pool.lock:
                inputs = engine_inputs(x, timesteps, context, y, control)
                answer, out = self._try(answer, inputs)
                if out is None:
                    self.pool.pace.rest()
                if out is not None:
                    # The engine's own buffer is overwritten by its next call.
                    out = out.to(x.dtype) if out.dtype != x.dtype else out.clone()
        else:
            out = None
        self.counters.count(answer)
        if out is not None:
            self._on_served(call)
        return out

    def whole_job(self, job: Callable[[], Result], device: torch.device | None = None) -> Result:
        """Run ``job``, all calls of a sampling run, without waiting for the GPU in each of them.

        Where an output was not finite, ``job`` is run again from the same random state, and
        the engines that took part stay out of it. It must not change what it is given.

        Args:
            device: whose random state belongs to it.
        """
        job = repeatable(job, device)
        outer, watch = self._watch, OutputWatch()
        self._watch = watch
        try:
            result = job()
            watch.settle()
            return result
        except NotFiniteError:
            for plan in watch.plans:
                self.counters.take_back(plan)
                set_aside(self.pool, plan, Reason.NOT_FINITE, NOT_FINITE)
        finally:
            self._watch = outer
        return job()

    def count_host(self, reason: Reason, text: str) -> None:
        """Count a call that the host serves for a reason the router cannot know."""
        self.counters.count(Host(reason=reason, text=text))

    def _route(self, call: Call) -> Plan | Host:
        """An engine that was built or an instant one, or the host."""
        built = replace(call, modes=tuple(mode for mode in call.modes if mode != INSTANT))
        candidates = self.pool.candidates()
        answer = route(built, candidates)
        missing = isinstance(answer, Host) and answer.reason in MISSING
        if isinstance(answer, Host) and missing and self._on_miss(call, answer):
            answer = route(built, self.pool.candidates())
        elif isinstance(answer, Host) and missing:
            why = self._explain(call)
            answer = replace(answer, text=f"{answer.text} ({why.rstrip('.')})") if why else answer
        if INSTANT in call.modes:
            # One that the miss has made meanwhile serves from the next call on.
            instant = route(replace(call, modes=(INSTANT,)), candidates)
            answer = choose(self.pool, call, answer, instant)
        return against_host(self.pool, call, answer) if isinstance(answer, Plan) else answer

    def _note_step(self, call: Call, answer: Plan | Host, device: torch.device) -> None:
        server = server_of(answer)
        if server:
            self.pool.pace.step(kind_of(call), server, device)
        else:
            self.pool.pace.rest()

    def _try(self, plan: Plan, inputs: Mapping[str, Tensor]) -> tuple[Plan | Host, Tensor | None]:
        try:
            loaded = {part.stem: self.pool.use(part.stem) for part in plan.parts}
        except KeyError:
            return Host(reason=Reason.NOT_READY, text="the engine was just unloaded"), None
        host = self._bind(plan, loaded.values())
        if host is not None:
            return host, None
        try:
            out = serve(plan, {stem: entry.engine for stem, entry in loaded.items()}, inputs)
            if self._watch is not None:
                self._watch.note(plan, out)
            elif not is_finite(out):
                return set_aside(self.pool, plan, Reason.NOT_FINITE, NOT_FINITE), None
        except EngineRoomError as error:
            return set_aside(self.pool, plan, Reason.ENGINE_FAILED, error.message), None
        except torch.cuda.OutOfMemoryError as error:
            return set_aside(self.pool, plan, Reason.MEMORY, shortfall(error)), None
        except RuntimeError as error:
            # Of CUDA or cuBLAS, by way of torch.
            text = str(error).partition("\n")[0]
            return set_aside(self.pool, plan, Reason.ENGINE_FAILED, text), None
        return plan, out

    def _bind(self, plan: Plan, loaded: Iterable[LoadedEngine]) -> Host | None:
        """Have engines read the weights as they are now; the host where that cannot be."""
        epoch = (self._identity, self.epoch)
        try:
            for entry in loaded:
                self.last_binding = entry.binding.refresh(self.weights, epoch)
        except MemoryShortError as error:
            return set_aside(self.pool, plan, Reason.MEMORY, error.message)
        except EngineRoomError as error:
            # The model's fault, not the engine's: others may go on with it.
            return Host(reason=Reason.WEIGHTS, text=error.message)
        return None

    def close(self) -> None:
        """Release every engine of the pool."""
        self.pool.close()
