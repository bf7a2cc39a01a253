"""The command line: arguments in, lines or JSON out, errors as one sentence."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence

from . import __version__
from .errors import CancelledError, EngineRoomError
from .log import logger

PROGRAM = "python -m extension"


def build_parser() -> argparse.ArgumentParser:
    """Every command with its arguments."""
    from .commands import bench, demo, doctor, engines, install, models, pictures, ui

    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="TensorRT engines for the Stable Diffusion UNet."
    )
    parser.add_argument("--version", action="version", version=f"Engine Room {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (doctor, install, models, engines, pictures, bench, ui, demo):
        module.add(commands)
    for command in _leaves(parser):
        command.add_argument("--json", action="store_true", help="print one JSON object")
        command.add_argument("-v", "--verbose", action="store_true", help="show the log")
    return parser


def _leaves(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """The parsers that have no commands of their own."""
    found = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                found.extend(_leaves(child))
    return found or [parser]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (each kind of error has its own)."""
    args = build_parser().parse_args(argv)
    level = logging.DEBUG if args.verbose else logging.WARNING
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        report = args.run(args)
    except EngineRoomError as error:
        return _fail(error, as_json=args.json)
    except KeyboardInterrupt:
        return _fail(CancelledError("Cancelled; nothing was left behind."), as_json=args.json)
    finally:
        logger.removeHandler(handler)
    try:
        print(json.dumps(report.data, default=str) if args.json else "\n".join(report.lines))
    except BrokenPipeError:
        sys.stderr.close()
    return int(report.exit_code)


def _fail(error: EngineRoomError, *, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"error": error.to_json()}, default=str))
    else:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
    return error.exit_code
