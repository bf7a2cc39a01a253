"""``python -m extension`` in the repository, or ``python <repository>/extension`` anywhere."""

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    __package__ = "extension"

from .cli import main

sys.exit(main())
