"""The worker: a child process that makes graphs and builds engines, without torch or a host.

Started as a script with ``-I`` and the path of a job file. It speaks JSON lines on its standard
output; whatever native libraries print goes to standard error. It ends at once when its parent
does. Only the standard library is imported here; the core is loaded by path as ``engine_room``.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

FORMAT = 1
CORE = "engine_room"
TICK_SECONDS = 0.25
ORPHANED = 75


class Events:
    """JSON lines to the parent, from any thread."""

    def __init__(self, descriptor: int) -> None:
        self._file = os.fdopen(descriptor, "w", encoding="utf-8", buffering=1)
        self._lock = threading.Lock()

    def send(self, event: str, **fields: Any) -> None:
        """Write one event; a parent that is gone ends the worker."""
        line = json.dumps({"event": event, **fields})
        try:
            with self._lock:
                self._file.write(line + "\n")
                self._file.flush()
        except (BrokenPipeError, OSError):
            os._exit(ORPHANED)


def take_stdout() -> Events:
    """Keep the real standard output for events; later prints go to standard error."""
    events = Events(os.dup(1))
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return events


def end_with_parent() -> None:
    """Exit as soon as standard input closes, which the parent holds open."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os._exit(ORPHANED)

    threading.Thread(target=watch, daemon=True).start()


def block_torch() -> None:
    """Make every import of torch fail: the worker must not need it."""
    sys.modules["torch"] = None  # type: ignore[assignment]


def load_core() -> ModuleType:
    """Load the package this file lies in under its one name, so that its parts import."""
    root = Path(__file__).resolve().parent
    spec = importlib.util.spec_from_file_location(
        CORE, root / "__init__.py", submodule_search_locations=[str(root)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{root} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[CORE] = module
    spec.loader.exec_module(module)
    return module


def read_job(path: str) -> dict[str, Any]:
    """Parse the job file; raises ValueError on another format."""
    job = json.loads(Path(path).read_bytes())
    if not isinstance(job, dict) or job.get("format") != FORMAT:
        raise ValueError(f"the job has no format {FORMAT}")
    return job


def main() -> int:
    """Run one job; 0 only after ``done`` was sent."""
    events = take_stdout()
    end_with_parent()
    block_torch()
    try:
        job = read_job(sys.argv[1])
        sys.path[:0] = [str(folder) for folder in job.get("packages", [])]
        load_core()
        tasks = importlib.import_module(f"{CORE}.worker_tasks")
    except Exception as error:
        events.send("error", code="worker", message=f"The worker cannot start: {error}", hint="")
        return 1
    return int(tasks.run(job, events.send, TICK_SECONDS))


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # Native libraries may hang or crash while the interpreter shuts down.
    os._exit(code)
