"""Files that are whole or absent: atomic writes, free space, folders, locks, checksums."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from .errors import LibraryError, MissingPackageError, OutputError, SettingError

CHUNK = 1 << 20
TEMPORARY_SUFFIX = ".engine-room.tmp"
WINDOWS = sys.platform == "win32"
LONGEST_FOLDER = 200  # of Windows' 260 characters; the longest of our files takes 50
LONGEST_NAME = 100
RESERVED = {"CON", "PRN", "AUX", "NUL", *(f"{n}{i}" for n in ("COM", "LPT") for i in range(1, 10))}
FORBIDDEN = {*'<>:"|?*', *map(chr, range(32))}
STALE_SECONDS = 86400.0
BUSY_SECONDS, BUSY_POLL = 5.0, 0.05
LOCK_POLL = 0.2
FULL_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def atomic_write(path: Path, data: bytes | memoryview) -> None:
    """Write ``data`` to a temporary name in the same folder, flush it, and rename it.

    Raises:
        OutputError: the folder cannot be written or the disk is full; nothing is left behind.
    """
    with atomic_file(path) as file:
        file.write(data)


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file that appears under ``path`` when the block ends, or not at all."""
    try:
        handle, name = tempfile.mkstemp(
            prefix=f".{path.name[:40]}.", suffix=TEMPORARY_SUFFIX, dir=path.parent
        )
    except OSError as error:
        raise write_failure(path, error) from error
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        replace_file(temporary, path)
    except OSError as error:
        raise write_failure(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def replace_file(source: Path, target: Path) -> None:
    """Rename ``source``, a file or folder, over ``target``.

    On Windows another program (a virus scanner, a second host) may hold the target open for a
    moment; it is asked again for some seconds.

    Raises:
        OutputError: it stays in use, or the folder cannot be written.
    """
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            source.replace(target)
            return
        except PermissionError as error:
            if not WINDOWS:
                raise write_failure(target, error) from error
            if time.monotonic() > deadline:
                raise OutputError(
                    f"'{target.name}' is in use by another program.",
                    hint="Close what reads it, and try again.",
                ) from error
        except OSError as error:
            raise write_failure(target, error) from error
        time.sleep(BUSY_POLL)


def temporary_folder(parent: Path, prefix: str) -> Path:
    """A new folder in ``parent``; raises OutputError where none can be made."""
    try:
        return Path(tempfile.mkdtemp(dir=parent, prefix=prefix))
    except OSError as error:
        raise write_failure(parent / prefix, error) from error


def sweep(folder: Path, *patterns: str) -> None:
    """Remove what killed programs left in ``folder`` a day ago or earlier."""
    now = time.time()
    for pattern in patterns:
        for path in folder.glob(pattern):
            with contextlib.suppress(OSError):
                if now - path.lstat().st_mtime < STALE_SECONDS:
                    continue
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink()


def write_failure(path: Path, error: OSError) -> OutputError:
    """The error for a failed write, in words."""
    if error.errno in FULL_DISK:
        hint = "Free some space, or choose another folder."
        return OutputError(f"The disk is full: '{path.name}' could not be written.", hint=hint)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        hint = "Choose a folder that this program may write to."
        return OutputError(f"'{path.parent}' cannot be written: it is read-only.", hint=hint)
    return OutputError(f"'{path}' cannot be written: {error.strerror or error}.")


def ensure_folder(folder: Path) -> Path:
    """Make ``folder`` if needed.

    Raises:
        OutputError: it is a file, its path is too long, or it cannot be made.
    """
    if WINDOWS and len(str(folder.absolute())) > LONGEST_FOLDER:
        raise OutputError(
            f"The path of '{folder.name}' is too long for Windows: "
            f"{len(str(folder.absolute()))} characters, at most {LONGEST_FOLDER}.",
            hint="Choose a folder nearer to the root of the drive.",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise OutputError(f"'{folder}' is a file; a folder is needed.") from error
    except OSError as error:
        raise write_failure(folder / "x", error) from error
    return folder


def child_folder(root: Path, name: str) -> Path:
    """The folder ``name`` inside ``root``.

    Raises:
        SettingError: it would lie elsewhere, or is a name that Windows does not take (folders
            travel between systems).
    """
    root = root.resolve()
    for part in name.replace("\\", "/").split("/"):
        if part.split(".")[0].strip().upper() in RESERVED or FORBIDDEN & set(part):
            raise SettingError(f"'{part}' cannot name a folder.", hint="Write a plain name.")
        if len(part) > LONGEST_NAME or (part != part.rstrip(" .") and part not in (".", "..")):
            raise SettingError(
                f"'{part[:40]}' cannot name a folder: it is too long, or ends with a dot or space.",
                hint="Write a plain name.",
            )
    folder = (root / name).resolve()
    if not name.strip() or root not in folder.parents:
        raise SettingError(
            f"'{name}' is no folder inside the {root.name} folder.", hint="Write a plain name."
        )
    return folder


def free_disk(folder: Path) -> int | None:
    """Bytes free where ``folder`` is or will be; None where the system does not tell."""
    there = next((path for path in (folder, *folder.parents) if path.is_dir()), folder)
    try:
        return shutil.disk_usage(there).free
    except OSError:
        return None


def check_free_space(folder: Path, needed: int) -> None:
    """Raise OutputError, which names both numbers, unless ``needed`` bytes are free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OutputError(
            f"'{folder}' has {free / 1e9:.2f} GB free; {needed / 1e9:.2f} GB are needed.",
            hint="Free some space, or choose another folder.",
            details={"needed": needed, "free": free},
        )


def sha256_file(path: Path, tick: Callable[[], None] = lambda: None) -> str:
    """SHA-256 (hex) of a file; ``tick`` is called for each megabyte."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            tick()
    return digest.hexdigest()


@contextlib.contextmanager
def lock(
    path: Path, *, wait: float = math.inf, pause: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Hold the operating system's lock on ``path``; it ends with the process, whatever happens.

    Args:
        wait: seconds to wait.
        pause: called now and then while waiting; may raise to stop.

    Raises:
        LibraryError: another process still holds it.
    """
    try:
        from filelock import FileLock, Timeout
    except ImportError as error:
        raise MissingPackageError.of("filelock", "to share a folder") from error
    found, deadline = FileLock(str(path)), time.monotonic() + wait
    try:
        while not found.is_locked:
            try:
                found.acquire(timeout=max(0.0, min(LOCK_POLL, deadline - time.monotonic())))
            except Timeout:
                if time.monotonic() >= deadline:
                    raise
                pause()
    except Timeout as error:
        raise LibraryError(
            f"'{path.stem}' is in use by another program.", hint="Wait until it has finished."
        ) from error
    except OSError as error:
        raise write_failure(path, error) from error
    try:
        yield
    finally:
        found.release()
