"""The A1111 family: AUTOMATIC1111 through ``sd_unet``, the Forge family through its patcher."""

from __future__ import annotations

from typing import Any


def register() -> type[Any]:
    """Register the callbacks and return the Script class that the host looks for.

    Called each time the host executes the script file: at its start, and on "Reload UI".
    """
    from modules import script_callbacks

    from . import api, room, settings, tab
    from .script import EngineRoomScript

    script_callbacks.on_ui_settings(settings.register)
    script_callbacks.on_ui_tabs(tab.tabs)
    script_callbacks.on_app_started(api.add_routes)
    script_callbacks.on_script_unloaded(room.unloaded)
    if room.is_forge():
        from . import forge

        script_callbacks.on_cfg_denoiser(forge.keep)
    else:
        from . import a1111

        script_callbacks.on_cfg_denoiser(a1111.notice)
        script_callbacks.on_list_unets(a1111.list_options)
        script_callbacks.on_model_loaded(a1111.loaded)
    return EngineRoomScript
