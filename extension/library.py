"""The folder of engines: one manifest each, states told without loading anything."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from .engine_state import Machine, State, judge, parity_results, same_place
from .errors import LibraryError, OutputError
from .failure_record import FailureRecord
from .files import (
    atomic_write,
    ensure_folder,
    lock,
    replace_file,
    sha256_file,
    write_failure,
)
from .key import STEM, EngineKey, check_stem
from .log import logger
from .manifest import Manifest, UnknownFormatError, read_json, read_manifest

SUFFIXES = (".json", ".state.json", ".cal.safetensors", ".lock", ".engine")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An engine of the library: its state in code and words, and its manifest if readable."""

    stem: str
    state: State
    text: str
    manifest: Manifest | None
    bytes_on_disk: int
    changing: Mapping[str, Any]

    @property
    def key(self) -> EngineKey:
        """The engine's key; raises LibraryError where the manifest cannot be read."""
        if self.manifest is None:
            raise LibraryError(f"The engine {self.stem} cannot be used: {self.text}.")
        return self.manifest.key

    @property
    def last_used(self) -> float:
        """When it was last loaded, in seconds since the epoch; 0 if never, or not known."""
        when = self.changing.get("last_used")
        return float(when) if isinstance(when, int | float) and math.isfinite(when) else 0.0


class Library:
    """Engines in one folder, which several hosts may share.

    Attributes:
        built: stems that this process built into it.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.built: set[str] = set()

    def engine_path(self, stem: str) -> Path:
        """Where the engine's bytes lie."""
        return self.folder / f"{check_stem(stem)}.engine"

    def manifest_path(self, stem: str) -> Path:
        """Where its manifest lies."""
        return self.folder / f"{check_stem(stem)}.json"

    def state_path(self, stem: str) -> Path:
        """Where its changing facts lie."""
        return self.folder / f"{check_stem(stem)}.state.json"

    def calibration_path(self, stem: str) -> Path:
        """Where the references of a baked engine lie."""
        return self.folder / f"{check_stem(stem)}.cal.safetensors"

    @contextlib.contextmanager
    def lock(
        self, stem: str, *, wait: float = math.inf, pause: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Hold the engine's lock against every other process and thread; see ``files.lock``."""
        ensure_folder(self.folder)
        with lock(self.folder / f"{check_stem(stem)}.lock", wait=wait, pause=pause):
            yield

    def publish(self, temporary: Path, manifest: Manifest) -> Entry:
        """Move a built engine into place; it exists once its manifest does.

        Args:
            temporary: a complete engine file in this folder.

        Raises:
            OutputError: the folder cannot be written.
        """
        stem = manifest.key.stem
        try:
            self.manifest_path(stem).unlink(missing_ok=True)
            self.state_path(stem).unlink(missing_ok=True)
        except OSError as error:
            raise write_failure(self.manifest_path(stem), error) from error
        replace_file(temporary, self.engine_path(stem))
        atomic_write(self.manifest_path(stem), manifest.to_bytes())
        self.built.add(stem)
        return self.entry(stem, None)

    def entry(self, stem: str, machine: Machine | None) -> Entry:
        """One engine; never raises for what its files hold."""
        changing = self.read_state(stem)
        size = _size(self.engine_path(stem))
        manifest: Manifest | None = None
        try:
            manifest = read_manifest(self.manifest_path(stem))
            state, text = judge(stem, manifest, size, machine, changing)
        except UnknownFormatError as error:
            state, text = State.OUTDATED, f"made by another version of Engine Room: {error.message}"
        except LibraryError as error:
            missing = not self.manifest_path(stem).exists()
            state = State.INCOMPLETE if missing else State.DAMAGED
            text = "it has no manifest: a build did not finish" if missing else error.message
        return Entry(
            stem=stem,
            state=state,
            text=text,
            manifest=manifest,
            bytes_on_disk=size or 0,
            changing=changing,
        )

    def entries(self, machine: Machine | None = None) -> list[Entry]:
        """Every engine, newest first; a folder that is missing or unreadable has none."""
        try:
            names = [path.name for path in self.folder.iterdir()]
        except OSError:
            return []
        stems = {
            name.split(".")[0]
            for name in names
            if STEM.fullmatch(name.split(".")[0]) and name.endswith((".engine", ".json"))
        }
        found = [self.entry(stem, machine) for stem in stems]
        return sorted(
            found,
            key=lambda e: (e.manifest.created if e.manifest else "", e.stem),
            reverse=True,
        )

    def find(self, key: EngineKey, machine: Machine | None = None) -> Entry | None:
        """The engine of exactly this key, unless it is incomplete or damaged."""
        entry = self.entry(key.stem, machine)
        unusable = (State.INCOMPLETE, State.DAMAGED, State.OUTDATED)
        return None if entry.state in unusable or entry.manifest is None else entry

    def read_engine(self, stem: str) -> bytes:
        """The engine's bytes, after size and SHA-256 of these very bytes match the manifest.

        Raises:
            LibraryError: they do not, or the engine or its manifest cannot be read.
        """
        manifest = read_manifest(self.manifest_path(stem))
        path = self.engine_path(stem)
        try:
            if path.stat().st_size != manifest.engine_bytes:
                raise _damaged(stem, "its size is not that of the manifest")
            data = path.read_bytes()
        except OSError as error:
            reason = error.strerror or error
            raise LibraryError(f"The engine {stem} cannot be read: {reason}.") from error
        if hashlib.sha256(data).hexdigest() != manifest.engine_sha256:
            raise _damaged(stem, "its contents are not those that were built")
        return data

    def verify_files(self, stem: str) -> None:
        """Check size and SHA-256; raises LibraryError as ``read_engine`` does."""
        manifest = read_manifest(self.manifest_path(stem))
        path = self.engine_path(stem)
        if _size(path) != manifest.engine_bytes:
            raise _damaged(stem, "its size is not that of the manifest")
        if sha256_file(path) != manifest.engine_sha256:
            raise _damaged(stem, "its contents are not those that were built")

    def read_state(self, stem: str) -> dict[str, Any]:
        """What changes about an engine; empty where it is lost or damaged."""
        try:
            state = read_json(self.state_path(stem))
        except LibraryError:
            return {}
        return state if isinstance(state, dict) else {}

    def update_state(self, stem: str, **changes: Any) -> None:
        """Change facts in the state file; a loss of it does no harm, so failure is logged."""
        state = {**self.read_state(stem), **changes}
        try:
            atomic_write(self.state_path(stem), json.dumps(state, indent=1).encode())
        except OutputError as error:
            logger.warning("The state of engine %s was not saved: %s", stem, error)

    def add_parity(self, stem: str, result: Mapping[str, Any]) -> None:
        """Record a parity result; an older one for the same GPU, driver and version goes."""
        kept = [
            item for item in parity_results(self.read_state(stem)) if not same_place(item, result)
        ]
        self.update_state(stem, parity=[*kept, dict(result)])

    def remove(self, stem: str) -> int:
        """Delete the engine and its side files, and nothing else; returns the bytes freed.

        If it had failed, that is forgotten: it may be built again.

        Raises:
            LibraryError: there is no such engine, or a file of it cannot be deleted.
        """
        check_stem(stem)
        paths = [self.folder / f"{stem}{suffix}" for suffix in SUFFIXES]
        present = [path for path in paths if os.path.lexists(path)]
        if not present:
            raise LibraryError(f"There is no engine {stem}.", hint="List the engines first.")
        freed = sum(_delete(path) for path in present)
        FailureRecord(self.folder).forget(stem)
        return freed

    def trim(self, budget: int, keep: Collection[str] = ()) -> list[str]:
        """Delete the engines unused for longest until all take at most ``budget`` bytes.

        One that another program holds open stays, and so does everything in ``keep``.

        Args:
            budget: bytes on disk.
            keep: stems in use.

        Returns:
            The stems that were deleted.
        """
        entries = sorted(self.entries(), key=_latest)
        total, removed = sum(entry.bytes_on_disk for entry in entries), []
        for entry in entries:
            if total <= budget:
                break
            if entry.stem in keep:
                continue
            try:
                self.remove(entry.stem)
            except LibraryError as error:
                logger.warning("Engine %s stays beyond the disk budget: %s", entry.stem, error)
                continue
            total -= entry.bytes_on_disk
            removed.append(entry.stem)
        return removed


def _delete(path: Path) -> int:
    try:
        size = path.lstat().st_size
        path.unlink()
    except OSError as error:
        reason = error.strerror or error
        raise LibraryError(f"'{path.name}' cannot be deleted: {reason}.") from error
    return size


def _damaged(stem: str, what: str) -> LibraryError:
    return LibraryError(
        f"The engine {stem} is damaged: {what}.", hint="Remove it and build it again."
    )


def _size(path: Path) -> int | None:
    """Size of a regular file; links out of the folder do not count."""
    try:
        return path.stat().st_size if path.is_file() and not path.is_symlink() else None
    except OSError:
        return None


def _latest(entry: Entry) -> float:
    """When an engine was used last or, if later, made: a new one has not been used yet."""
    made = entry.manifest.created if entry.manifest else ""
    try:
        return max(entry.last_used, datetime.fromisoformat(made).timestamp())
    except ValueError:
        return entry.last_used
