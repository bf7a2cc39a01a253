"""``install``: fill the private folder, and nothing else."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from .. import packages
from ..backend_choice import choose, cuda_build, surroundings
from ..engine import BACKENDS
from ..errors import SettingError
from .common import Report


def add(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "install", help="download what a host needs into the private folder, and nothing else"
    )
    parser.add_argument(
        "backend",
        choices=BACKENDS,
        nargs="?",
        help="default: tensorrt_rtx on RTX cards, tensorrt on data-centre cards",
    )
    parser.add_argument(
        "--into",
        type=Path,
        default=None,
        metavar="DIR",
        help=f"the private folder (default: ${packages.VARIABLE})",
    )
    parser.add_argument(
        "--wheels",
        type=Path,
        default=None,
        metavar="DIR",
        help="take the packages from this folder, without the network",
    )
    parser.set_defaults(run=install)


def install(args: argparse.Namespace) -> Report:
    """Download the worker's packages and one backend."""
    into = args.into or packages.root()
    if into is None:
        raise SettingError(
            "No private folder is given.",
            hint="Give --into, such as models/engine-room/packages in the host's folder.",
        )
    if args.wheels is not None and not args.wheels.is_dir():
        raise SettingError(f"'{args.wheels}' is no folder.", hint="Give one that holds wheels.")
    backend, cuda = _choice(args.backend)
    made = packages.install(backend, into, cuda=cuda, wheels=args.wheels, say=_say)
    lines = [f"{folder.name}: ready" for folder in made] or ["Everything is there already."]
    return Report(data={"into": str(into), "made": [str(folder) for folder in made]}, lines=lines)


def _choice(backend: str | None) -> tuple[str, int]:
    machine = surroundings()
    if backend is None:
        choice = choose(machine)
        return choice.backend, choice.cuda
    return backend, cuda_build(machine)


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
