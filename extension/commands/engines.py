"""build, engines list|show|remove|verify."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..baking import bake_model
from ..engine_state import State
from ..errors import LibraryError, SettingError
from ..library import Entry, Library
from ..model import Model
from ..serving import build_shared, facts, load_engine, verify
from . import common
from .common import ProgressLine, Report


def add(commands: Any) -> None:
    """Register the commands."""
    parser = commands.add_parser("build", help="build the engine for a checkpoint and a size")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--weights", choices=("shared", "baked"), default="shared")
    common.add_loras(parser)
    common.add_shape(parser)
    common.add_target(parser)
    common.add_library(parser)
    parser.set_defaults(run=build)
    parser = commands.add_parser("engines", help="list, show, verify or remove engines")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    action = actions.add_parser("list", help="every engine with its state")
    common.add_library(action)
    action.set_defaults(run=list_engines)
    for name, text, run in (
        ("show", "everything known about one engine", show),
        ("remove", "delete an engine and its side files", remove),
        ("verify", "check files, and results against torch", verify_engine),
    ):
        action = actions.add_parser(name, help=text)
        action.add_argument("id", help="id of the engine, or its first digits")
        common.add_library(action)
        action.set_defaults(run=run)
    action.add_argument("--checkpoint", type=Path, help="weights to verify a shared engine with")
    common.add_loras(action)
    common.add_target(action)


def build(args: argparse.Namespace) -> Report:
    """Build an engine unless the library has it."""
    library, target, shape = common.library_of(args), common.target_of(args), common.shape_of(args)
    loras, progress = common.loras_of(args), ProgressLine("build")
    with Model(args.checkpoint) as model:
        reports = model.reports(loras)
        if args.weights == "baked":
            entry = bake_model(library, model, loras, shape, target, on_progress=progress)
        else:
            entry = build_shared(library, model.architecture, shape, target, on_progress=progress)
    lines = [report.sentence for report in reports]
    if args.weights == "shared" and loras:
        lines.append("A shared engine serves every LoRA; none is frozen into it.")
    seconds = entry.manifest.build_seconds if entry.manifest else 0.0
    size = common.megabytes(entry.bytes_on_disk)
    lines.append(f"{entry.stem}: {facts(entry)['label']}, {size}, built in {seconds:.1f} s")
    return Report(data=facts(entry), lines=lines)


def _entries(library: Library, args: argparse.Namespace) -> list[Entry]:
    from ..machine import default_device, machine_of

    return library.entries(machine_of(getattr(args, "device", None) or default_device()))


def list_engines(args: argparse.Namespace) -> Report:
    """List the library."""
    library = common.library_of(args)
    entries = _entries(library, args)
    rows = [["id", "size", "state", "engine"]]
    for entry in entries:
        label = entry.manifest.label if entry.manifest else "?"
        rows.append([entry.stem, common.megabytes(entry.bytes_on_disk), entry.text, label])
    lines = common.table(rows) if entries else [f"No engines in {library.folder} yet."]
    data = {"folder": str(library.folder), "engines": [facts(entry) for entry in entries]}
    return Report(data=data, lines=lines)


def find(library: Library, args: argparse.Namespace) -> Entry:
    """The engine whose id starts with what was given; raises LibraryError unless it is one."""
    prefix = str(args.id).lower()
    found = [entry for entry in _entries(library, args) if entry.stem.startswith(prefix)]
    if len(found) != 1:
        count = "no engine" if not found else f"{len(found)} engines"
        raise LibraryError(
            f"'{args.id}' is the start of {count} in {library.folder}.",
            hint="List them with 'engines list'.",
        )
    return found[0]


def show(args: argparse.Namespace) -> Report:
    """Everything about one engine."""
    entry = find(common.library_of(args), args)
    data = facts(entry)
    lines = [f"{name}: {value}" for name, value in data.items() if value not in (None, {}, [])]
    return Report(data=data, lines=lines)


def remove(args: argparse.Namespace) -> Report:
    """Delete an engine."""
    library = common.library_of(args)
    stem = find(library, args).stem
    with library.lock(stem, wait=1.0):
        freed = library.remove(stem)
    line = f"{stem} removed, {common.megabytes(freed)} freed"
    return Report(data={"id": stem, "freed": freed}, lines=[line])


def verify_engine(args: argparse.Namespace) -> Report:
    """Check an engine's files and, with a checkpoint, its results."""
    library = common.library_of(args)
    entry = find(library, args)
    library.verify_files(entry.stem)
    if args.checkpoint is None:
        line = f"{entry.stem}: its files are whole. {entry.text}."
        return Report(data=facts(entry), lines=[line, "Give --checkpoint to compare its results."])
    return _verify_results(library, entry, args)


def _verify_results(library: Library, entry: Entry, args: argparse.Namespace) -> Report:
    target = common.target_of(args)
    state = library.entry(entry.stem, target.machine)
    if state.state in (State.OTHER_GPU, State.OTHER_VERSION):
        raise LibraryError(f"The engine {entry.stem} cannot run here: {state.text}.")
    with Model(args.checkpoint) as model:
        arch = model.architecture.for_shape(entry.key.shape)
        if arch.id != entry.key.architecture:
            raise SettingError(
                f"'{args.checkpoint.name}' is {arch.label}; the engine is for another model."
            )
        weights = model.weights(common.loras_of(args), target.torch_dtype, target.device)
        engine = load_engine(library, entry, target)
        try:
            result = verify(library, entry, engine, arch, weights, target)
        finally:
            engine.close()
    result.require(entry.stem)
    data = {**facts(library.entry(entry.stem, target.machine)), "worst": result.worst}
    line = f"{entry.stem}: right; worst error {result.worst:.2g}, allowed {result.limit:.2g}"
    return Report(data=data, lines=[line])
