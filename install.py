"""Run by the host after installing and at each start: reports what is missing, changes nothing.

Standard library only; never an exception into the host.
"""

import importlib.util
import sys

WORKER_PACKAGES = {"onnx": "onnx", "tensorrt_rtx": "tensorrt-rtx"}


def missing() -> list:
    """Names of packages that building engines needs and that cannot be found."""
    found = []
    for module, package in WORKER_PACKAGES.items():
        try:
            present = importlib.util.find_spec(module) is not None
        except (ImportError, ValueError):
            present = False
        if not present:
            found.append(package)
    return found


def main() -> int:
    """Print one line; exit code 0 whatever is found."""
    names = missing()
    if names:
        print(
            "Engine Room: building engines needs "
            + " and ".join(names)
            + ". Nothing was installed; the host's own packages are never changed. "
            "'python -m extension doctor' in this folder says what to do."
        )
    elif "--dry-run" in sys.argv:
        print("Engine Room: nothing to do.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
