"""The engines' memory as a model of ComfyUI's memory manager, which makes room for it and may
take it back."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import comfy.model_patcher
import torch
from torch import nn

from .room import KEY, room


class EngineMemory(comfy.model_patcher.ModelPatcher):  # type: ignore[misc]
    """Stands for copies of weights, scratch memory and baked engines of all models.

    They are made by the calls that need them and counted from then on: the manager makes room
    for as much as they held last, and what it takes back comes again with the next call.
    """

    def __init__(self, device: torch.device) -> None:
        self._held = 0  # the host's constructor asks for the size
        super().__init__(nn.Module(), load_device=device, offload_device=torch.device("cpu"))

    def clone(self, *args: Any, **kwargs: Any) -> EngineMemory:
        """Every MODEL shares the engines."""
        return self

    def is_clone(self, other: Any) -> bool:
        """Whether ``other`` is this very object."""
        return other is self

    def loaded_size(self) -> int:
        """Bytes held now."""
        held = room().pool.nbytes
        self._held = max(self._held, held)
        return held

    def model_size(self) -> int:
        """Bytes held now, or before they were taken back."""
        return max(self._held, self.loaded_size())

    def current_loaded_device(self) -> Any:
        """What is held lies on the device; the rest is still to be allocated."""
        return self.load_device

    def model_dtype(self) -> torch.dtype:
        """Asked for by the manager; converts nothing."""
        return torch.float32

    def partially_load(self, *args: Any, **kwargs: Any) -> int:
        """Calls allocate what they need."""
        return 0

    def partially_unload(self, device_to: Any, memory_to_free: int = 0, *args: Any) -> int:
        """Give everything back; returns how many bytes that were."""
        held = self.loaded_size()
        room().pool.release_memory()
        return held - room().pool.nbytes

    def patch_model(self, *args: Any, **kwargs: Any) -> Any:
        """There is nothing to patch."""
        return self.model

    def detach(self, unpatch_all: bool = True) -> Any:
        """The manager takes the memory; False is the exchange of clones before every run."""
        if unpatch_all:
            self.partially_unload(None)
        return self.model


@lru_cache(maxsize=4)
def engine_memory(device: torch.device) -> EngineMemory:
    """The one object for ``device``."""
    return EngineMemory(device)


def account(model: Any) -> None:
    """Let the memory manager see the engines wherever ``model`` (a ModelPatcher) is loaded."""
    if hasattr(model, "set_additional_models"):
        model.set_additional_models(KEY, [engine_memory(model.load_device)])


def forget(model: Any) -> None:
    """Undo ``account``."""
    if hasattr(model, "remove_additional_models"):
        model.remove_additional_models(KEY)
