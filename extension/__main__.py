"""``python -m extension``."""

import sys

from .cli import main

sys.exit(main())
