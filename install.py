"""Run by the host after installing and at each start. There is nothing to do.

Engine Room adds nothing to the host's environment: TensorRT goes into a private folder when the
user asks for it (in the tab, in ComfyUI's sidebar, or by ``python -m extension install``).
Standard library only; never an exception into the host.
"""

import sys


def main() -> int:
    """Say so where it is asked for; exit code 0 in any case."""
    if "--dry-run" in sys.argv:
        print("Engine Room: nothing is installed into this environment, now or later.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
