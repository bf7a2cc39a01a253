"""The wrapper inside ComfyUI's UNet forward that serves calls from engines."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

import comfy.model_management
import comfy.utils
import torch
from comfy.patcher_extension import CallbacksMP, WrapperExecutor, WrappersMP

from ...errors import CancelledError
from ...log import logger
from ...memory import HEADROOM
from ...patcher_calls import describe
from ...progress import CancelToken, Progress
from ...room import ServedModel, attempt
from .memory import account, forget
from .messages import report, say
from .room import KEY, room


class WaitProgress:
    """The progress bar and words of a job on the node that runs, and its cancel button."""

    def __init__(self) -> None:
        self.cancel = CancelToken(comfy.model_management.processing_interrupted)
        self._bar: Any = None

    def __call__(self, progress: Progress) -> None:
        """Show a moment of the job."""
        say(words(progress))
        try:
            self._show(int(100 * progress.fraction))
        except comfy.model_management.InterruptProcessingException:
            # The host's bar noticed the interrupt and cleared it: it must outlive the job.
            comfy.model_management.interrupt_current_processing()

    def _show(self, percent: int) -> None:
        if self._bar is None:
            self._bar = comfy.utils.ProgressBar(100)
        self._bar.update_absolute(percent)


def words(progress: Progress) -> str:
    """Phase, and the seconds that are left where they are known."""
    if not progress.remaining:
        return progress.phase
    return f"{progress.phase}, about {progress.remaining:.0f} s left"


class Routing:
    """Routes the calls of one MODEL; settings are those of the node.

    It wraps the network, and the sampler around it (``sample``).

    ComfyUI copies options deeply; the wrapper must stay this very object.

    Args:
        node: id of the node that is told what happened to its calls.
    """

    def __init__(
        self, model: Any, *, policy: str, tier: str, precision: str, node: str = ""
    ) -> None:
        self.policy, self.tier, self.precision = policy, tier, precision
        self.node, self.run = node, 0
        self._base = weakref.ref(model.model)

    def __deepcopy__(self, memo: dict[int, Any]) -> Routing:
        return self

    def begin(self, patcher: Any) -> None:
        """A sampling run begins: weights may have changed in any way since the last."""
        self.run += 1

    def __call__(self, executor: Any, *args: Any, **named: Any) -> Any:
        """One call of the network: from an engine, or from the network itself.

        Wrappers of other nodes that would come after this one stay around it.
        """

        def network(*args: Any, **named: Any) -> Any:
            out = self._attempt(executor.class_obj, args, named)
            return executor.original(*args, **named) if out is None else out

        others = executor.wrappers[executor.idx + 1 :]
        inner = WrapperExecutor.new_class_executor(network, executor.class_obj, others)
        return inner.execute(*args, **named)

    def sample(self, executor: Any, *args: Any, **more: Any) -> Any:
        """A sampler's whole run: outputs are checked without a wait in each of its steps."""
        base = self._base()
        if base is None:
            return executor(*args, **more)
        served = room().model(base.diffusion_model)
        before = served.counters.copy()

        def job() -> Any:
            # A sampler may write into what it is given.
            return executor(*map(copied, args), **{k: copied(v) for k, v in more.items()})

        try:
            return served.whole_job(job, getattr(base, "device", None))
        finally:
            report(self.node, served.counters.since(before).sentence)

    def _attempt(self, unet: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The call by an engine; None where the network itself must compute it."""
        try:
            return attempt(lambda: self._serve(unet, args, named))
        except CancelledError:
            comfy.model_management.throw_exception_if_processing_interrupted()
            return None

    def _serve(self, unet: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Each kind of network takes arguments of its own; only a UNet's are looked at."""
        served = room().model(unet)
        if served.arch is None:
            served.count_refusal()
            return None
        call, extra = unet_call(*args, **named)
        if call[2] is None:
            return None
        args, features = describe(served, call, extra)
        progress = WaitProgress()
        served.policy, served.on_progress, served.cancel = self.policy, progress, progress.cancel
        served.tier, served.precision = self.tier, self.precision
        epoch = (id(self), weights_epoch(self._base(), self.run))
        return served.serve(*args, epoch=epoch, features=features)


def unet_call(
    x: Any,
    timesteps: Any,
    context: Any = None,
    y: Any = None,
    control: Any = None,
    transformer_options: Any = None,
    **extra: Any,
) -> tuple[Any, dict[str, Any]]:
    """The arguments of ComfyUI's UNetModel as a call, and those that it does not know."""
    options = {} if transformer_options is None else transformer_options
    return (x, timesteps, context, y, control, options), extra


def copied(value: Any) -> Any:
    """A tensor of its own; anything else as it is."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def weights_epoch(base: Any, run: int) -> Hashable:
    """Changes whenever the host may have changed the contents of a weight.

    In mid-run it may also move a part of the model away, to make room for another one: layers
    then go back to unpatched weights, and patch them as they are called.

    Scheduled LoRAs (hooks) write weights between calls without any sign, so every call is an
    epoch of its own while they are active.
    """
    patcher = getattr(base, "current_patcher", None)
    hooks = getattr(patcher, "current_hooks", None) or getattr(patcher, "forced_hooks", None)
    state = (
        "current_weight_patches_uuid",
        "lowvram_patch_counter",
        "model_loaded_weight_memory",
    )
    now = tuple(getattr(base, name, None) for name in state)
    return (*now, run, object() if hooks else None)


def route(
    model: Any, *, policy: str, tier: str = "auto", precision: str = "", node: str = ""
) -> Any:
    """A clone of ``model`` (a ModelPatcher) whose UNet calls go through engines.

    Patches that come before or after, in any number, keep working.

    Args:
        precision: of the engines; empty for the host's.
        node: that is told what happened to the calls.
    """
    routed = unroute(classic(model))
    routing = Routing(routed, policy=policy, tier=tier, precision=precision, node=node)
    routed.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, KEY, routing)
    routed.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, KEY, routing.sample)
    routed.add_callback_with_key(CallbacksMP.ON_PRE_RUN, KEY, routing.begin)
    routed.add_callback_with_key(CallbacksMP.ON_DETACH, KEY, unloaded)
    account(routed)
    return routed


def classic(model: Any) -> Any:
    """``model`` in the form that keeps its weights on the device, if they fit; else as it is.

    ComfyUI with dynamic VRAM loads weights piece by piece as layers need them, and no engine
    could read them; its patchers can be cloned into the older form.
    """
    if not getattr(model, "is_dynamic", lambda: False)():
        return model
    free = comfy.model_management.get_free_memory(model.load_device)
    if free < HEADROOM * model.model_size():
        logger.info("The model stays with dynamic VRAM, and with the host: too little is free.")
        return model
    try:
        return model.clone(disable_dynamic=True)
    except RuntimeError as error:
        # The host makes the older form from the file alone, which it does not always know.
        logger.info("The model stays with dynamic VRAM, and with the host: %s", error)
        return model


def routing_of(model: Any) -> Routing | None:
    """The routing of a MODEL that comes from a node TensorRT; None where it has none."""
    found = model.get_wrappers(WrappersMP.DIFFUSION_MODEL, KEY)
    return found[0] if found else None


def keep_or_route(model: Any, precision: str = "") -> Any:
    """``model`` as a node TensorRT before it routes it; where there is none, with the defaults.

    Args:
        precision: of the engines, where it was chosen.
    """
    found = routing_of(model)
    if found is None:
        return route(model, policy="background", precision=precision)
    if precision in ("", found.precision):
        return model
    return route(model, policy=found.policy, tier=found.tier, precision=precision, node=found.node)


def waiting(model: Any) -> Any:
    """A clone of ``model`` that waits for missing engines; otherwise routed as it was."""
    found = routing_of(model)
    tier, precision = (found.tier, found.precision) if found else ("auto", "")
    return route(model, policy="wait", tier=tier, precision=precision)


def unroute(model: Any) -> Any:
    """A clone of ``model`` without this routing."""
    plain = model.clone()
    for kind in (WrappersMP.DIFFUSION_MODEL, WrappersMP.SAMPLER_SAMPLE):
        plain.remove_wrappers_with_key(kind, KEY)
    for kind in (CallbacksMP.ON_PRE_RUN, CallbacksMP.ON_DETACH):
        plain.remove_callbacks_with_key(kind, KEY)
    forget(plain)
    return plain


def unloaded(patcher: Any, unpatch_all: bool = True) -> None:
    """The host takes a model out of memory: copies of its weights go too."""
    if unpatch_all:
        room().pool.release_weights()


def served_model(model: Any) -> ServedModel:
    """What Engine Room knows of a MODEL's UNet."""
    return room().model(model.model.diffusion_model)
