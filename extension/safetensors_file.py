"""safetensors files, header first: checked before any data is read, written tensor by tensor."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from .errors import BadFileError
from .files import atomic_file, check_free_space

ITEM_SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
MAX_HEADER = 100_000_000
MAX_SIDE = 2**40
ALIGNMENT = 4096
METADATA = "__metadata__"
Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a file: dtype (``F16``), shape, absolute offset and length in bytes."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """What a file says it holds; offsets are absolute and lie within the file."""

    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    data_start: int


def read_header(path: Path) -> Header:
    """Read and check the header of ``path``; no data is read.

    Raises:
        BadFileError: missing, truncated, of another format, or contradicting itself.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            return _parse(path, _header_bytes(path, file, size), size)
    except FileNotFoundError as error:
        raise BadFileError(f"'{path}' does not exist.") from error
    except IsADirectoryError as error:
        raise BadFileError(f"'{path}' is a folder, not a file.") from error
    except OSError as error:
        raise BadFileError(f"'{path}' cannot be read: {error.strerror or error}.") from error


def _bad(path: Path, what: str, hint: str = "") -> BadFileError:
    hint = hint or "Download or copy the file again."
    return BadFileError(f"'{path.name}' is no valid safetensors file: {what}.", hint=hint)


def _header_bytes(path: Path, file: BinaryIO, size: int) -> bytes:
    start = file.read(8)
    if not start:
        raise _bad(path, "it is empty (0 bytes)")
    if len(start) < 8:
        raise _bad(path, f"it has only {size} bytes")
    length = struct.unpack("<Q", start)[0]
    more = file.read(256)
    # A length can look like any text, so other formats are told only where no header follows.
    if length > MAX_HEADER or not more.startswith(b"{"):
        disguise = _disguise(start + more)
        if disguise:
            raise _bad(path, f"it is {disguise[0]}", disguise[1])
        raise _bad(path, "it does not start with a header")
    if 8 + length > size:
        raise _bad(path, f"it is truncated: {8 + length - size} bytes of its header are missing")
    file.seek(8)
    return file.read(length)


def _disguise(start: bytes) -> tuple[str, str] | None:
    """What a file is instead, and what to do, told by its first bytes."""
    text = start.lstrip().lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return "an HTML page", "The download failed; download the file again."
    if start.startswith(b"PK\x03\x04"):
        return "a ZIP archive, as .ckpt and .pt files are", "Rename it to .ckpt."
    if start.startswith(b"\x80") and start[1:2] in b"\x02\x03\x04\x05":
        return "a pickle, as old .ckpt and .pt files are", "Rename it to .ckpt."
    if start.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer", "Fetch the real file with 'git lfs pull'."
    if text.startswith((b"{", b"[")) or b"error" in text[:64]:
        return "a text file", "The download failed; download the file again."
    return None


def _parse(path: Path, raw: bytes, size: int) -> Header:
    try:
        header = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"its header cannot be read ({str(error)[:80]})") from error
    if not isinstance(header, dict):
        raise _bad(path, "its header is no JSON object")
    metadata = header.pop(METADATA, None) or {}
    if not isinstance(metadata, dict):
        raise _bad(path, "its metadata is no JSON object")
    start = 8 + len(raw)
    tensors = {name: _tensor(path, name, entry, start) for name, entry in header.items()}
    _check_layout(path, tensors, start, size)
    return Header(tensors, {k: str(v) for k, v in metadata.items()}, start)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _tensor(path: Path, name: str, entry: Any, start: int) -> TensorInfo:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(entry):
        raise _bad(path, f"the entry of '{name:.80}' is incomplete")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
        raise _bad(path, f"'{name:.80}' has the unknown dtype {dtype!r:.40}")
    if not (_whole_numbers(shape) and len(shape) <= 16):
        raise _bad(path, f"'{name:.80}' has an impossible shape")
    if not (_whole_numbers(offsets) and len(offsets) == 2 and offsets[0] <= offsets[1]):
        raise _bad(path, f"'{name:.80}' has impossible offsets")
    nbytes = offsets[1] - offsets[0]
    if math.prod(shape) * ITEM_SIZES[dtype] != nbytes:
        raise _bad(path, f"'{name:.80}' has {nbytes} bytes, which do not fit its shape")
    return TensorInfo(dtype, tuple(shape), start + offsets[0], nbytes)


def _whole_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v <= MAX_SIDE for v in values)


def _check_layout(path: Path, tensors: Mapping[str, TensorInfo], start: int, size: int) -> None:
    """Tensors must not overlap and must lie in the file; bytes after the last are tolerated."""
    end = start
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if info.offset < end:
            raise _bad(path, f"'{name:.80}' overlaps another tensor")
        end = info.offset + info.nbytes
    if end > size:
        raise _bad(path, f"it is truncated: {end - size} of {end} bytes are missing")


@dataclass(frozen=True)
class Entry:
    """A tensor to write: its name, dtype (``F16``) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Length of its data."""
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


def write_safetensors(
    path: Path,
    entries: Sequence[Entry],
    data: Iterable[Buffer],
    metadata: Mapping[str, str] | None = None,
) -> Header:
    """Write a file tensor by tensor: one tensor is in memory at a time.

    Args:
        entries: what the header declares, in the order of ``data``.
        data: one buffer for each entry, of exactly its length.
        metadata: stored in the header.

    Returns:
        The header as written; data starts at a multiple of 4096.

    Raises:
        OutputError: no space, or the folder cannot be written; nothing is left behind.
        ValueError: a buffer has another length than its entry declares.
    """
    raw, header = plan(entries, metadata or {})
    check_free_space(path.parent, header.data_start + sum(entry.nbytes for entry in entries))
    with atomic_file(path) as file:
        file.write(raw)
        for entry, buffer in _matched(entries, data):
            view = memoryview(buffer).cast("B") if entry.nbytes else memoryview(b"")
            if view.nbytes != entry.nbytes:
                raise ValueError(f"'{entry.name}' has {view.nbytes} bytes, not {entry.nbytes}")
            file.write(view)
    return header


def _matched(entries: Sequence[Entry], data: Iterable[Buffer]) -> Iterator[tuple[Entry, Buffer]]:
    yield from zip(entries, data, strict=True)


def plan(entries: Sequence[Entry], metadata: Mapping[str, str]) -> tuple[bytes, Header]:
    """The first bytes of a file that holds ``entries``, and its header."""
    table: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    offset = 0
    for entry in entries:
        table[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.nbytes],
        }
        offset += entry.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    start = -(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT
    text = text.ljust(start - 8)
    tensors, position = {}, start
    for entry in entries:
        tensors[entry.name] = TensorInfo(entry.dtype, entry.shape, position, entry.nbytes)
        position += entry.nbytes
    return struct.pack("<Q", len(text)) + text, Header(tensors, dict(metadata), start)
