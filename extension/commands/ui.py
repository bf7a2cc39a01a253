"""ui: the tab as a page of its own, without a host."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from ..errors import MissingPackageError
from . import common
from .common import Report

DEFAULT_PORT = 7861


def add(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("ui", help="the tab as a page in the browser, without a host")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--loras", type=Path, default=None, metavar="DIR", help="LoRAs to offer")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT)
    parser.add_argument("--no-browser", action="store_true", help="do not open the page")
    common.add_target(parser)
    common.add_library(parser)
    parser.set_defaults(run=ui)


def ui(args: argparse.Namespace) -> Report:
    """Serve the page on this machine until interrupted."""
    if importlib.util.find_spec("gradio") is None:
        raise MissingPackageError.of("gradio", "to show the page", "python -m pip install gradio")
    from ..ui.standalone import StandaloneHost, serve

    library = common.library_of(args).folder
    host = StandaloneHost(args.checkpoint, library, common.target_of(args), loras=args.loras)
    gradio = importlib.import_module("gradio")
    page = serve(host, gradio, port=args.port, open_browser=not args.no_browser)
    sys.stderr.write(f"Engine Room is at http://127.0.0.1:{args.port} - Ctrl+C ends it.\n")
    try:
        page.block_thread()
    finally:
        host.room().close()
    return Report(data={"port": args.port})
