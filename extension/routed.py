"""A UNet whose calls go through engines where they can, and to the host where they cannot."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .architecture import Architecture
from .binding import Binding, BindingReport
from .dispatch import engine_inputs, serve
from .engine.interface import Engine
from .errors import EngineRoomError
from .log import logger
from .router import Call, Candidate, Counters, Host, Plan, Reason, route
from .shapes import Shape
from .unet import Control

DTYPE_NAMES = {torch.float16: "fp16", torch.float32: "fp32", torch.bfloat16: "bf16"}
UNetCall = Callable[..., Tensor]


@dataclass
class LoadedEngine:
    """An engine in memory, what the router knows of it, and its weights."""

    candidate: Candidate
    engine: Engine
    binding: Binding


class RoutedUNet:
    """Serves UNet calls for one model.

    Args:
        arch: the model's architecture.
        weights: LDM name to tensor: what shared engines are bound to.
        host: the host's own UNet with the same arguments: serves every call no engine can.
        epoch: token of the weights as given; see ``set_weights``.
    """

    def __init__(
        self,
        arch: Architecture,
        weights: Mapping[str, Tensor],
        host: UNetCall,
        *,
        epoch: Hashable = 0,
        fingerprint: str | None = None,
    ) -> None:
        self.arch = arch
        self.host = host
        self.counters = Counters()
        self.last_binding: BindingReport | None = None
        self._engines: dict[str, LoadedEngine] = {}
        self._lock = threading.Lock()
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
        binding = Binding(engine, torch.device(candidate.device))
        with self._lock:
            self._engines[candidate.stem] = LoadedEngine(candidate, engine, binding)

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
            dtype=DTYPE_NAMES.get(x.dtype, str(x.dtype)),
            device=str(x.device),
            features=tuple(features),
            epoch=self.epoch,
            fingerprint=self.fingerprint,
        )

    @torch.no_grad()
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
        """One UNet call; the result has ``x``'s dtype. An engine that fails is set aside."""
        with self._lock:
            call = self.describe(x, context, control is not None, features)
            answer = route(call, [e.candidate for e in self._engines.values()])
            if isinstance(answer, Plan):
                inputs = engine_inputs(x, timesteps, context, y, control)
                answer, out = self._try(answer, inputs)
                if out is not None:
                    self.counters.count(answer)
                    return out.to(x.dtype)
            self.counters.count(answer)
        return self.host(x, timesteps, context, y, control)

    def _try(self, plan: Plan, inputs: Mapping[str, Tensor]) -> tuple[Plan | Host, Tensor | None]:
        loaded = {part.stem: self._engines[part.stem] for part in plan.parts}
        try:
            for entry in loaded.values():
                self.last_binding = entry.binding.refresh(self.weights, self.epoch)
            out = serve(plan, {stem: entry.engine for stem, entry in loaded.items()}, inputs)
            if not bool(torch.isfinite(out).all()):
                return self._set_aside(plan, Reason.NOT_FINITE, "its output is not finite"), None
        except EngineRoomError as error:
            return self._set_aside(plan, Reason.ENGINE_FAILED, error.message), None
        except torch.cuda.OutOfMemoryError as error:
            return self._set_aside(plan, Reason.MEMORY, str(error).split(".")[0]), None
        return plan, out

    def _set_aside(self, plan: Plan, reason: Reason, text: str) -> Host:
        names = ", ".join(sorted({part.stem for part in plan.parts}))
        logger.warning("Engine %s is set aside: %s. The host serves.", names, text)
        for part in plan.parts:
            entry = self._engines[part.stem]
            entry.candidate = replace(entry.candidate, ready=False)
        return Host(reason=reason, text=f"engine {names}: {text}")

    def close(self) -> None:
        """Release every engine."""
        with self._lock:
            for entry in self._engines.values():
                entry.binding.release()
                entry.engine.close()
            self._engines.clear()
