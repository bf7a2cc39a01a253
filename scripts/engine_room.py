"""The A1111 family's entry point: loads the core by path under its one name, and registers.

The host executes this file under its bare name, without a package: hence no relative imports
and no logic here.
"""

import importlib
import importlib.util
import logging
import sys
from pathlib import Path

CORE = "engine_room"
ROOT = Path(__file__).resolve().parent.parent / "extension"


def load_core():
    """Return the core, loaded once; None where another copy of Engine Room got there first."""
    present = sys.modules.get(CORE)
    if present is not None:
        if Path(present.__file__).resolve().parent == ROOT:
            return present
        logging.getLogger(CORE).error(
            "Two copies of Engine Room are installed: %s is used, %s is not. Remove one.",
            Path(present.__file__).parent.parent,
            ROOT.parent,
        )
        return None
    spec = importlib.util.spec_from_file_location(
        CORE, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[CORE] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[CORE]
        raise
    return module


def in_host():
    """Whether this process is a host of the family."""
    try:
        return importlib.util.find_spec("modules.script_callbacks") is not None
    except ImportError:
        return False


core = load_core()
if core is not None and in_host():
    # The host registers every Script class that it finds in this file's namespace.
    EngineRoomScript = importlib.import_module(f"{CORE}.hosts.webui").register()
