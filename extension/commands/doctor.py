"""doctor: what this machine has, whether engines can be built and run, and what to do."""

from __future__ import annotations

import argparse
from typing import Any

from ..doctor import diagnose
from ..machine import default_device
from . import common
from .common import Report


def add(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("doctor", help="check this machine and say what to do")
    parser.add_argument("--no-selftest", action="store_true", help="do not build a test engine")
    common.add_library(parser)
    parser.set_defaults(run=doctor)


def doctor(args: argparse.Namespace) -> Report:
    """Examine everything; the exit code is 1 where something must be done."""
    found = diagnose(common.library_of(args), default_device(), selftest=not args.no_selftest)
    return Report(
        data={**found.facts, "todo": found.todo}, lines=found.lines, exit_code=bool(found.todo)
    )
