"""Keys, manifests and the library: states without loading, nothing believed unchecked."""

from __future__ import annotations

import hashlib
import json
import re
import time
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from extension.engine_state import Machine, State
from extension.errors import LibraryError
from extension.key import EngineKey, check_stem
from extension.library import Library
from extension.manifest import Manifest, UnknownFormatError, read_manifest
from extension.shapes import Shape

KEY = EngineKey(
    architecture="ab" * 32,
    shape=Shape(batch=2, height=64, width=64),
    io_dtype="fp16",
    weights="shared",
    backend="tensorrt_rtx",
    backend_version="1.7.1.116",
    capabilities=("8.9",),
    conv3x3_format="hwc8",
)
HERE = Machine(
    gpu="NVIDIA GeForce RTX 4090",
    capability="8.9",
    driver="13.0",
    backends={"tensorrt_rtx": "1.7.1.116"},
)
DATA = b"engine bytes"


def manifest(key=KEY, data=DATA, **fields):
    return Manifest(
        key=key,
        engine_bytes=len(data),
        engine_sha256=hashlib.sha256(data).hexdigest(),
        build_seconds=6.25,
        activation_bytes=105_000_000,
        label="SD1.5",
        **fields,
    )


def publish(library, key=KEY, data=DATA):
    library.folder.mkdir(exist_ok=True)
    temporary = library.folder / "temporary"
    temporary.write_bytes(data)
    return library.publish(temporary, manifest(key, data))


@pytest.fixture
def library(tmp_path):
    library = Library(tmp_path / "library")
    publish(library)
    return library


def passed(worst=0.004, limit=0.01, **changes):
    facts = {
        "gpu": HERE.gpu,
        "driver": HERE.driver,
        "backend_version": "1.7.1.116",
        "worst_relative_l2": worst,
        "limit": limit,
    }
    return {**facts, **changes}


def test_every_field_changes_the_stem():
    baked = {"weights": "baked", "fingerprint": "cd" * 32}
    variants = [
        {"architecture": "ac" * 32},
        {"shape": replace(KEY.shape, batch=1)},
        {"shape": replace(KEY.shape, control=True)},
        {"io_dtype": "bf16"},
        {"compute": "bf16"},
        {"conv3x3_format": "linear"},
        {"backend": "tensorrt"},
        {"backend_version": "1.7.1.117"},
        {"capabilities": ("8.9", "12.0")},
        {"platform": "win32-amd64"},
        {"emitter": KEY.emitter + 1},
        baked,
        {**baked, "fingerprint": "ce" * 32},
    ]
    stems = {KEY.stem, *(replace(KEY, **fields).stem for fields in variants)}
    assert len(stems) == len(variants) + 1
    assert replace(KEY).stem == KEY.stem


@pytest.mark.parametrize(
    "fields",
    [
        {"architecture": "short"},
        {"weights": "baked"},
        {"fingerprint": "cd" * 32},
        {"capabilities": ()},
        {"backend": "../x"},
        {"platform": "a b"},
        {"emitter": True},
        {"io_dtype": "int8"},
    ],
)
def test_contradictions_in_a_key_are_refused(fields):
    with pytest.raises(Exception, match=r"engine key|precision"):
        replace(KEY, **fields)


def test_keys_and_manifests_survive_a_round_trip(tmp_path):
    assert EngineKey.from_json(json.loads(json.dumps(KEY.to_json()))) == KEY
    path = tmp_path / "m.json"
    full = manifest(source={"checkpoint": "a.safetensors"}, model={"prediction": "v"})
    path.write_bytes(full.to_bytes())
    assert read_manifest(path) == full


@pytest.mark.parametrize("stem", ["", "../../etc/passwd", "A" * 16, "0" * 15, "0" * 17, None, 3])
def test_only_stems_name_files(stem):
    with pytest.raises(LibraryError):
        check_stem(stem)
    with pytest.raises(LibraryError):
        Library("/tmp").remove(stem)


def test_a_new_engine_is_unverified_then_ready_on_this_machine_only(library):
    stem = KEY.stem
    assert library.entry(stem, HERE).state is State.UNVERIFIED
    library.add_parity(stem, passed())
    assert library.entry(stem, HERE).state is State.READY
    assert library.entry(stem, replace(HERE, driver="13.1")).state is State.UNVERIFIED
    assert library.entry(stem, replace(HERE, gpu="other")).state is State.UNVERIFIED
    library.add_parity(stem, passed(worst=0.5))
    assert library.entry(stem, HERE).state is State.DAMAGED
    assert len(library.read_state(stem)["parity"]) == 1
    assert [entry.stem for entry in library.entries(HERE)] == [stem]
    assert library.find(KEY).stem == stem
    assert library.read_engine(stem) == DATA


@pytest.mark.parametrize(
    ("machine", "state", "words"),
    [
        (replace(HERE, capability="12.0"), State.OTHER_GPU, "8.9"),
        (replace(HERE, platform="win32-amd64"), State.OTHER_GPU, "win32-amd64"),
        (replace(HERE, backends={"tensorrt_rtx": "1.8.0.1"}), State.OTHER_VERSION, "1.8.0.1"),
        (replace(HERE, backends={}), State.OTHER_VERSION, "not installed"),
    ],
)
def test_engines_for_elsewhere(library, machine, state, words):
    entry = library.entry(KEY.stem, machine)
    assert entry.state is state
    assert words in entry.text


def test_an_engine_of_an_older_emitter_is_outdated_and_built_again(library):
    older = replace(KEY, emitter=KEY.emitter - 1)
    entry = publish(library, older)
    found = library.entry(entry.stem, HERE)
    assert found.state is State.OUTDATED
    assert "built again" in found.text
    assert library.find(replace(KEY, io_dtype="bf16")) is None
    assert library.find(older, HERE) is None


def damaged(path, data):
    path.write_bytes(data)


DAMAGE = {
    "engine missing": (lambda lib: lib.engine_path(KEY.stem).unlink(), State.INCOMPLETE),
    "engine truncated": (
        lambda lib: lib.engine_path(KEY.stem).write_bytes(DATA[:-1]),
        State.DAMAGED,
    ),
    "no manifest": (lambda lib: lib.manifest_path(KEY.stem).unlink(), State.INCOMPLETE),
    "manifest empty": (lambda lib: lib.manifest_path(KEY.stem).write_bytes(b""), State.DAMAGED),
    "manifest html": (
        lambda lib: lib.manifest_path(KEY.stem).write_bytes(b"<html>"),
        State.DAMAGED,
    ),
    "manifest deep": (
        lambda lib: lib.manifest_path(KEY.stem).write_bytes(b"[" * 100_000),
        State.DAMAGED,
    ),
    "manifest of the future": (
        lambda lib: lib.manifest_path(KEY.stem).write_bytes(b'{"format": 2}'),
        State.OUTDATED,
    ),
    "manifest of another engine": (
        lambda lib: lib.manifest_path(KEY.stem).write_bytes(
            manifest(replace(KEY, io_dtype="bf16")).to_bytes()
        ),
        State.DAMAGED,
    ),
    "manifest huge": (
        lambda lib: lib.manifest_path(KEY.stem).write_bytes(b" " * (2 << 20)),
        State.DAMAGED,
    ),
    "engine is a link out": (
        lambda lib: (
            lib.engine_path(KEY.stem).unlink(),
            lib.engine_path(KEY.stem).symlink_to("/etc/hostname"),
        ),
        State.INCOMPLETE,
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_a_state_not_an_exception(library, name):
    damage, state = DAMAGE[name]
    damage(library)
    entry = library.entry(KEY.stem, HERE)
    assert entry.state is state, entry.text
    assert entry.text
    assert library.find(KEY) is None
    assert [e.stem for e in library.entries(HERE)] == [KEY.stem]
    library.remove(KEY.stem)
    assert library.entries() == []


def test_changed_bytes_of_the_same_size_never_reach_tensorrt(library):
    library.engine_path(KEY.stem).write_bytes(DATA[::-1])
    for read in (library.read_engine, library.verify_files):
        with pytest.raises(LibraryError, match="contents"):
            read(KEY.stem)


@pytest.mark.parametrize("data", [b"", b"[]", b'{"parity": 3}', b'{"parity": [{"gpu": 1}, null]}'])
def test_a_lost_state_file_only_costs_the_verification(library, data):
    library.add_parity(KEY.stem, passed())
    library.state_path(KEY.stem).write_bytes(data)
    assert library.entry(KEY.stem, HERE).state is State.UNVERIFIED
    library.add_parity(KEY.stem, passed())
    assert library.entry(KEY.stem, HERE).state is State.READY


def test_remove_deletes_the_engines_own_files_and_nothing_else(library):
    other = publish(library, replace(KEY, io_dtype="bf16"))
    library.add_parity(KEY.stem, passed())
    bystander = library.folder / f"{KEY.stem}.txt"
    bystander.write_text("mine")
    freed = library.remove(KEY.stem)
    assert freed > len(DATA)
    names = {path.name for path in library.folder.iterdir()}
    assert bystander.name in names
    assert not {f"{KEY.stem}{s}" for s in (".engine", ".json", ".state.json")} & names
    assert library.find(other.key) is not None
    with pytest.raises(LibraryError, match="no engine"):
        library.remove(KEY.stem)


def test_removing_a_link_keeps_what_it_points_to(library, tmp_path):
    precious = tmp_path / "precious"
    precious.write_bytes(b"x")
    library.engine_path(KEY.stem).unlink()
    library.engine_path(KEY.stem).symlink_to(precious)
    library.remove(KEY.stem)
    assert precious.read_bytes() == b"x"


def test_a_folder_that_is_missing_or_a_file_has_no_engines(tmp_path):
    assert Library(tmp_path / "nowhere").entries() == []
    (tmp_path / "file").write_text("")
    assert Library(tmp_path / "file").entries() == []


def test_foreign_files_are_no_engines(library):
    for name in ("model.engine", "notes.json", f"{KEY.stem}", "0123.engine", "kernels-x.cache"):
        (library.folder / name).write_bytes(b"x")
    (library.folder / ("0" * 16)).mkdir()
    assert [entry.stem for entry in library.entries()] == [KEY.stem]


def mutate(draw, value):
    """The JSON value with one part replaced by something else."""
    junk = draw(st.sampled_from([None, -1, 2**70, 1.5, "", "x" * 50, [], {}, True, [[]], "../a"]))
    if isinstance(value, dict) and value and draw(st.booleans()):
        name = draw(st.sampled_from(sorted(value)))
        changed = dict(value)
        if draw(st.booleans()):
            del changed[name]
        else:
            changed[name] = mutate(draw, value[name])
        return changed
    return junk


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_manifest_can_make_the_library_fail(tmp_path, data):
    library = Library(tmp_path / "fuzzed")
    if not library.folder.exists():
        publish(library)
    original = json.loads(manifest().to_bytes())
    changed = mutate(data.draw, original)
    library.manifest_path(KEY.stem).write_bytes(json.dumps(changed).encode())
    entry = library.entry(KEY.stem, HERE)
    assert isinstance(entry.state, State)
    if changed == original:
        assert entry.state is State.UNVERIFIED
    try:
        read_manifest(library.manifest_path(KEY.stem))
    except (LibraryError, UnknownFormatError) as error:
        assert error.message


def test_the_disk_budget_takes_what_was_unused_for_longest(tmp_path):
    """Damaged times count as never used; engines in use stay, also where that breaks the budget."""
    library = Library(tmp_path)
    keys = [replace(KEY, shape=replace(KEY.shape, batch=n)) for n in range(1, 6)]
    later = time.time() + 1000
    times = [later + 30, "yesterday", later + 10, float("nan"), later + 20]
    for key, when in zip(keys, times, strict=True):
        publish(library, key)
        library.update_state(key.stem, last_used=when)
    stems, size = [key.stem for key in keys], len(DATA)
    assert library.trim(5 * size) == []
    never = {stems[1], stems[3]}
    assert set(library.trim(3 * size)) == never
    assert library.trim(size, keep={stems[2]}) == [stems[4], stems[0]]
    assert [entry.stem for entry in library.entries()] == [stems[2]]
    assert library.trim(0, keep=stems) == []
    assert library.trim(0) == [stems[2]]


def test_a_new_engine_is_not_the_first_to_go(tmp_path):
    """It was never used, also where another program has only just published it."""
    library = Library(tmp_path)
    old = replace(KEY, shape=replace(KEY.shape, batch=1))
    for key in (old, KEY):
        publish(library, key)
    library.update_state(old.stem, last_used=time.time() - 1000)
    path = library.manifest_path(old.stem)
    long_ago = '"created": "2020-01-01T00:00:00+00:00"'
    path.write_text(re.sub(r'"created": ?"[^"]*"', long_ago, path.read_text()))
    assert library.trim(len(DATA)) == [old.stem]


def test_an_engine_that_cannot_be_deleted_does_not_stop_the_others(library, monkeypatch):
    other = replace(KEY, shape=replace(KEY.shape, batch=1))
    publish(library, other)
    library.update_state(other.stem, last_used=1.0)
    remove = library.remove

    def busy(stem):
        if stem == KEY.stem:
            raise LibraryError("it is in use")
        return remove(stem)

    monkeypatch.setattr(library, "remove", busy)
    assert library.trim(0) == [other.stem]
    assert [entry.stem for entry in library.entries()] == [KEY.stem]
