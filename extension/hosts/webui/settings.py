"""The settings page, and what is set."""

from __future__ import annotations

from modules import shared

SECTION = ("engine_room", "Engine Room (TensorRT)")
POLICIES = ["background", "wait", "never", "off"]


def register() -> None:
    """Add the page to the host's settings."""
    import gradio

    shared.opts.add_option(
        "engine_room_policy",
        shared.OptionInfo(
            "background",
            "At a size that has no engine yet",
            gradio.Radio,
            {"choices": POLICIES},
            section=SECTION,
        ).info(
            "background: build one while the host draws; wait: build it first; never: only use "
            "what is there; off: always draw with the host"
        ),
    )


def policy() -> str:
    """What to do at a size without an engine; ``off`` where nothing is to be routed."""
    chosen = str(getattr(shared.opts, "engine_room_policy", "background"))
    return chosen if chosen in POLICIES else "background"
