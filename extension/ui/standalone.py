"""The tab without a host: a checkpoint file, drawn with Engine Room's own sampler."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ..comparing import draw
from ..doctor import HostFacts
from ..errors import SettingError
from ..model import LoraChoice, Model
from ..picture import tile, to_image
from ..room import Room
from ..routed import RoutedUNet
from ..router import Call, Host
from ..sampler import SampleSettings
from ..serving import Target, host_unet
from ..shapes import Shape
from ..wanted import Job
from .drawing import LORA_TAG, DrawJob, Drawn, lora_tags
from .facts import LiveModel
from .tab import Tab

EVENTS = 8  # at once
LORA_SUFFIXES = (".safetensors", ".pt", ".ckpt")


class StandaloneHost:
    """One checkpoint on one device.

    Args:
        loras: a folder of LoRA files; None without.
    """

    has_control = True

    def __init__(
        self, checkpoint: Path, library: Path, target: Target, *, loras: Path | None = None
    ) -> None:
        self._model = Model(checkpoint)
        self._target = target
        self._room = Room(library)
        self._files = _lora_files(loras)
        self._choices: list[LoraChoice] = []
        self._weights: Mapping[str, Tensor] | None = None
        self._epoch = 0

    def room(self) -> Room:
        """The room over the library."""
        return self._room

    def device(self) -> str:
        """Where it draws."""
        return self._target.device

    def checkpoint(self) -> str:
        """The file's name."""
        return self._model.checkpoint.path.name

    def facts(self) -> HostFacts:
        """It has no host."""
        return HostFacts(name="stand-alone page")

    def job(self, shape: Shape) -> Job:
        """The engine job for the checkpoint."""
        return Job(arch=self._model.architecture, shape=shape, target=self._target)

    @contextlib.contextmanager
    def merged(self, loras: Sequence[str], strength: float) -> Iterator[LiveModel]:
        """The checkpoint with these LoRAs."""
        choices = self._chosen(lora_tags(loras, strength))
        yield LiveModel(
            arch=self._model.architecture,
            weights=self._merged(choices),
            folder=self._room.library.folder / "onnx",
            source=self._model.origin(choices),
            model={"prediction": self._model.checkpoint.prediction_type() or "eps"},
        )

    def loras(self) -> list[str]:
        """Names of the files in the folder of LoRAs."""
        return sorted(self._files)

    def draw(self, job: DrawJob, *, engines: bool) -> Drawn:
        """One picture; a missing engine is built first.

        Raises:
            SettingError: the prompt names a LoRA that is not there, or the model needs a picture.
        """
        arch = self._model.architecture
        if arch.in_channels != arch.out_channels:
            raise SettingError(f"{arch.label} needs a picture to work on.")
        weights = self._merged(self._chosen(job.prompt))
        settings = SampleSettings(
            width=job.width,
            height=job.height,
            steps=job.steps,
            cfg=job.cfg,
            seed=job.seed,
            prediction=self._model.checkpoint.prediction_type() or "eps",
        )
        texts = (LORA_TAG.sub("", job.prompt), job.negative)
        conditioning = self._model.conditioning(*texts, settings)
        unet = RoutedUNet(
            arch,
            weights,
            host_unet(arch, weights, self._target),
            epoch=self._epoch,
            pool=self._room.pool,
            counters=self._room.counters,
            on_miss=self._build if engines else lambda call, answer: False,
        )
        unet.modes = ("shared", "baked") if engines else ()
        started = time.perf_counter()
        latents = draw(self._model, unet, conditioning, settings, self._target)
        image = to_image(tile(self._model.decode(latents)))
        counts = unet.counters.to_json()
        return Drawn(
            image=image,
            seconds=time.perf_counter() - started,
            served=counts["served"],
            host=counts["host"],
            engines=counts["engines"],
        )

    def _build(self, call: Call, answer: Host) -> bool:
        return self._room.tiers.miss(self._model.architecture, call, policy="wait")

    def _chosen(self, prompt: str) -> list[LoraChoice]:
        found = []
        for name, strength in LORA_TAG.findall(prompt):
            if name not in self._files:
                raise SettingError(f"There is no LoRA '{name}' in the folder of LoRAs.")
            found.append(LoraChoice.parse(f"{self._files[name]}:{strength}"))
        return found

    def _merged(self, choices: list[LoraChoice]) -> Mapping[str, Tensor]:
        """Merged weights on the device; kept until other LoRAs are chosen."""
        if self._weights is None or choices != self._choices:
            self._choices = choices
            self._weights = self._model.weights(
                choices, self._target.torch_dtype, self._target.device
            )
            self._epoch += 1
        return self._weights


def _lora_files(folder: Path | None) -> dict[str, Path]:
    if folder is None:
        return {}
    if not folder.is_dir():
        raise SettingError(f"'{folder}' is no folder.", hint="Give the folder of LoRA files.")
    return {p.stem: p for p in folder.iterdir() if p.suffix.lower() in LORA_SUFFIXES}


def serve(host: StandaloneHost, gradio: Any, *, port: int, open_browser: bool) -> Any:
    """Start the page on this machine only; returns gradio's application, which runs.

    Args:
        gradio: the module.
    """
    page = Tab(host, gradio).build()
    # Gradio 3 would answer one event at a time: another page could not even show a build.
    known = inspect.signature(page.queue).parameters
    page.queue(**({} if "default_concurrency_limit" in known else {"concurrency_count": EVENTS}))
    page.launch(
        server_name="127.0.0.1",
        server_port=port,
        inbrowser=open_browser,
        prevent_thread_lock=True,
        show_error=True,
    )
    return page
