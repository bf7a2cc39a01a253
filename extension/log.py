"""The one logger of the project; the host or the command line decides where it goes."""

from __future__ import annotations

import logging

logger = logging.getLogger("engine_room")
logger.addHandler(logging.NullHandler())
