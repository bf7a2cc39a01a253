"""safetensors: every kind of damage is named, whole files are read by others."""

from __future__ import annotations

import json
import os
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from extension.errors import BadFileError, OutputError
from extension.safetensors_file import ALIGNMENT, Entry, read_header, write_safetensors


def raw(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


BAD = {
    "empty": (b"", "empty"),
    "a few bytes": (b"abc", "3 bytes"),
    "HTML": (b"<!DOCTYPE html><html><body>404</body></html>", "HTML page"),
    "JSON text": (b'{"error": "Repository not found"}', "text file"),
    "ZIP": (b"PK\x03\x04" + bytes(100), "ZIP archive"),
    "pickle": (b"\x80\x02}q\x00(X\x05\x00\x00\x00epochq\x01" + bytes(100), "pickle"),
    "LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00", "LFS pointer"),
    "zeros": (bytes(64), "does not start with a header"),
    "huge header": (struct.pack("<Q", 2**60) + b"{}" + bytes(64), "does not start"),
    "cut header": (raw({"a": tensor()})[:20], "of its header are missing"),
    "no JSON": (raw(b"{nonsense}"), "header cannot be read"),
    "a list": (raw(b"{}")[:8] + b"[]", "does not start"),
    "deep JSON": (raw(b'{"a":' * 100_000), "header cannot be read"),
    "a name twice": (raw(b'{"a":{},"a":{}}'), "occurs twice"),
    "no offsets": (raw({"a": {"dtype": "F32", "shape": [2]}}), "incomplete"),
    "unknown dtype": (raw({"a": tensor("F4")}, bytes(8)), "unknown dtype"),
    "negative shape": (raw({"a": tensor(shape=(-2,))}, bytes(8)), "impossible shape"),
    "huge shape": (raw({"a": tensor(shape=(2**60,))}, bytes(8)), "impossible shape"),
    "fractional shape": (raw({"a": tensor(shape=(2.0,))}, bytes(8)), "impossible shape"),
    "backward offsets": (raw({"a": tensor(offsets=(8, 0))}, bytes(8)), "impossible offsets"),
    "wrong size": (raw({"a": tensor(offsets=(0, 4))}, bytes(8)), "do not fit its shape"),
    "overlap": (raw({"a": tensor(), "b": tensor(offsets=(4, 12))}, bytes(16)), "overlaps"),
    "cut data": (raw({"a": tensor()}, bytes(5)), "3 of"),
    "metadata list": (raw({"__metadata__": [1], "a": tensor()}, bytes(8)), "metadata"),
}


@pytest.mark.parametrize("kind", BAD)
def test_damage_is_named(tmp_path, kind):
    data, words = BAD[kind]
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(BadFileError, match=words) as caught:
        read_header(path)
    assert "model.safetensors" in caught.value.message
    assert caught.value.hint


def test_missing_and_folder(tmp_path):
    with pytest.raises(BadFileError, match="does not exist"):
        read_header(tmp_path / "no.safetensors")
    with pytest.raises(BadFileError, match="folder"):
        read_header(tmp_path)


@pytest.mark.parametrize("length", [0x7B, 0x0280, 0x4B50])
def test_a_header_length_that_looks_like_another_format(tmp_path, length):
    """0x7B is '{', 0x0280 starts like a pickle, 0x4B50 is 'PK': lengths like any other."""
    header = json.dumps({"a": tensor()}).encode().ljust(length)
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw(header, bytes(8)))
    assert read_header(path).tensors["a"].shape == (2,)


def test_trailing_bytes_are_tolerated(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(3)}, path)
    path.write_bytes(path.read_bytes() + b"more")
    assert read_header(path).tensors["a"].nbytes == 12


def test_a_6_gb_file_opens_without_reading_it(tmp_path):
    path = tmp_path / "model.safetensors"
    size = 6 * 2**30
    path.write_bytes(raw({"a": tensor("U8", (size,), (0, size))}))
    os.truncate(path, path.stat().st_size + size)
    header = read_header(path)
    assert header.tensors["a"].nbytes == size


def test_written_files_are_read_by_safetensors(tmp_path):
    tensors = {"b": torch.randn(3, 5), "a": torch.zeros(0, 4), "c": torch.tensor(7.0)}
    entries = [Entry(n, "F32", tuple(t.shape)) for n, t in tensors.items()]
    path = tmp_path / "model.safetensors"
    data = (t.numpy().tobytes() for t in tensors.values())
    header = write_safetensors(path, entries, data, {"who": "us"})
    assert header.data_start % ALIGNMENT == 0
    assert read_header(path) == header
    loaded = load_file(path)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    assert header.metadata == {"who": "us"}


def test_a_failed_write_leaves_what_was_there(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"before")
    entries = [Entry("a", "F32", (2,)), Entry("b", "F32", (2,))]
    with pytest.raises(ValueError, match="'b' has 4 bytes"):
        write_safetensors(path, entries, [bytes(8), bytes(4)])
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_no_space_is_said_before_writing(tmp_path):
    entries = [Entry("a", "U8", (2**40,))]
    with pytest.raises(OutputError, match=r"1099.51 GB are needed"):
        write_safetensors(tmp_path / "x.safetensors", entries, [b""])
    assert not list(tmp_path.iterdir())


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_mutated_files_are_read_or_refused_but_never_crash(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("fuzz", numbered=True)
    path = folder / "model.safetensors"
    good = bytearray(raw({"a": tensor(), "b": tensor(offsets=(8, 16))}, bytes(16)))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(good) - 1))
        good[position] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(good[: data.draw(st.integers(0, len(good)))]))
    try:
        header = read_header(path)
    except BadFileError:
        return
    size = path.stat().st_size
    assert all(i.offset + i.nbytes <= size for i in header.tensors.values())
