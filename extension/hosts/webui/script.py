"""The always-on script: routes each sampling run, and writes into the infotext what happened."""

from __future__ import annotations

from typing import Any

from modules import scripts

from . import forge, room


class EngineRoomScript(scripts.Script):  # type: ignore[misc]
    """Engine Room in the host's job."""

    def title(self) -> str:
        """Name in the host's lists."""
        return "Engine Room"

    def show(self, is_img2img: bool) -> Any:
        """Always on, without controls of its own."""
        return scripts.AlwaysVisible

    def process(self, p: Any, *args: Any) -> None:
        """A job begins: its settings hold, and its calls are counted from here."""
        room.configure()
        self.before = room.room().counters.to_json()

    def process_before_every_sampling(self, p: Any, *args: Any, **kwargs: Any) -> None:
        """LoRAs and sizes are known now."""
        if room.is_forge():
            forge.attach(p)
            return
        from . import a1111

        a1111.begin()

    def postprocess_batch(self, p: Any, *args: Any, **kwargs: Any) -> None:
        """Before pictures are saved: how many of their calls engines served, and which."""
        if not room.is_forge():
            from . import a1111

            a1111.settle()
        now = room.room().counters.to_json()
        before, self.before = getattr(self, "before", now), now
        served, host = (now[who] - before[who] for who in ("served", "host"))
        p.extra_generation_params.pop("Engine Room", None)
        if served:
            known = before["engines"]
            engines = [stem for stem, n in now["engines"].items() if n > known.get(stem, 0)]
            p.extra_generation_params["Engine Room"] = (
                f"{served} of {served + host} UNet calls by {' and '.join(engines)}"
            )
