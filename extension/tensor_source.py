"""Files of tensors by name: safetensors memory-mapped, pickles only without code."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from .errors import BadFileError
from .safetensors_file import Header, TensorInfo, read_header

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
PICKLE_SUFFIXES = (".ckpt", ".pt", ".pth", ".bin")


class TensorSource(Protocol):
    """Raw tensors of a file by their full names."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name to shape."""

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Name to dtype as stored."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """What the file says about itself."""

    def read(self, name: str) -> Tensor:
        """The tensor as stored, on the CPU."""

    def close(self) -> None:
        """Release the file."""


class SafetensorsSource:
    """A memory-mapped safetensors file."""

    def __init__(self, path: Path) -> None:
        self.header: Header = read_header(path)
        floats = {n: i for n, i in self.header.tensors.items() if i.dtype in DTYPES}
        self.shapes = {name: info.shape for name, info in floats.items()}
        self.dtypes = {name: DTYPES[info.dtype] for name, info in floats.items()}
        self.metadata = self.header.metadata
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def read(self, name: str) -> Tensor:
        """The tensor over the file's pages: copy on write, and no memory until it is used."""
        info: TensorInfo = self.header.tensors[name]
        if not info.nbytes:
            return torch.empty(info.shape, dtype=DTYPES[info.dtype])
        flat = torch.frombuffer(self._map, dtype=torch.uint8, count=info.nbytes, offset=info.offset)
        if info.offset % DTYPES[info.dtype].itemsize:
            flat = flat.clone()
        return flat.view(DTYPES[info.dtype]).reshape(info.shape)

    def close(self) -> None:
        """Unmap the file once no tensor of it is alive."""
        try:
            self._map.close()
        except BufferError:  # tensors still point into it; they keep the map alive
            return


class PickleSource:
    """A ``.ckpt`` or ``.pt`` file, read with ``weights_only=True`` and nothing else."""

    def __init__(self, path: Path) -> None:
        tensors = load_pickle(path)
        self._tensors = {n: t for n, t in tensors.items() if t.dtype in NAMES}
        self.shapes = {name: tuple(t.shape) for name, t in self._tensors.items()}
        self.dtypes = {name: t.dtype for name, t in self._tensors.items()}
        self.metadata: Mapping[str, str] = {}

    def read(self, name: str) -> Tensor:
        """The tensor."""
        return self._tensors[name]

    def close(self) -> None:
        """Drop the tensors."""
        self._tensors = {}


def load_pickle(path: Path) -> dict[str, Tensor]:
    """Tensors of a pickled state dict, nested ``state_dict`` included; code is never run.

    Raises:
        BadFileError: missing, damaged, or holding anything but tensors and plain values.
    """
    if not path.is_file():
        raise BadFileError(f"'{path}' does not exist or is no file.")
    if path.stat().st_size == 0:
        raise BadFileError(f"'{path.name}' is empty (0 bytes).", hint="Download it again.")
    with path.open("rb") as file:
        start = file.read(512).lstrip().lower()
    if start.startswith((b"<!doctype", b"<html")):
        raise BadFileError(
            f"'{path.name}' is an HTML page.", hint="The download failed; download it again."
        )
    try:
        # torch 2.1 maps files by name only
        obj = torch.load(str(path), map_location="cpu", weights_only=True, mmap=_is_zip(path))
    except Exception as error:
        raise _pickle_error(path, error) from error
    for key in ("state_dict", "module", "model"):
        if isinstance(obj, dict) and isinstance(obj.get(key), dict):
            obj = obj[key]
    if not isinstance(obj, dict):
        raise BadFileError(f"'{path.name}' holds no state dict but {type(obj).__name__}.")
    return {str(k): v.detach() for k, v in obj.items() if isinstance(v, Tensor)}


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _pickle_error(path: Path, error: Exception) -> BadFileError:
    if "weights_only" in str(error) or "Unsupported" in str(error) or "GLOBAL" in str(error):
        return BadFileError(
            f"'{path.name}' holds Python code beside weights, which is never run.",
            hint="Convert it to .safetensors with a tool that you trust.",
        )
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return BadFileError(
        f"'{path.name}' is damaged or no checkpoint: {reason[:120]}",
        hint="Download or copy the file again.",
    )


def open_source(path: Path) -> TensorSource:
    """Open a file by what it is: safetensors, or a pickle by its suffix."""
    if path.suffix.lower() in PICKLE_SUFFIXES:
        return PickleSource(path)
    return SafetensorsSource(path)
