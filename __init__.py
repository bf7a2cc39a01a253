"""ComfyUI's entry point; inert everywhere else.

ComfyUI imports this file under the folder's path, so every import here is relative. The frontend's
scripts are named in pyproject.toml: under WEB_DIRECTORY, a space in the folder's name hides them.
"""

import importlib.util
import logging

NODE_CLASS_MAPPINGS: dict = {}
NODE_DISPLAY_NAME_MAPPINGS: dict = {}

if __package__ and importlib.util.find_spec("comfy") is not None:
    try:
        from .extension.hosts.comfy import routes
        from .nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

        routes.register()
    except Exception:
        logging.getLogger("engine_room").exception("Engine Room's nodes could not be loaded.")

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
