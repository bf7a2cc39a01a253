"""``install``: fill the private folder, and nothing else."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from .. import packages
from ..engine import BACKENDS
from ..errors import SettingError
from .common import Report


def add(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "install", help="download what a host needs into the private folder, and nothing else"
    )
    parser.add_argument("backend", choices=BACKENDS, nargs="?", default="tensorrt_rtx")
    parser.add_argument(
        "--into",
        type=Path,
        default=None,
        metavar="DIR",
        help=f"the private folder (default: ${packages.VARIABLE})",
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
    made = packages.install(args.backend, into, cuda=_cuda(), say=_say)
    lines = [f"{folder.name}: ready" for folder in made] or ["Everything is there already."]
    return Report(data={"into": str(into), "made": [str(folder) for folder in made]}, lines=lines)


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


def _cuda() -> str | None:
    try:
        import torch
    except ImportError:
        return None
    return torch.version.cuda
