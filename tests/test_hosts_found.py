"""Where the host suites look: no checkout and half an installation are reasons to skip."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.support_hosts import HOSTS, find_host, missing_packages


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A host that asks for two packages, with an empty environment."""
    root = tmp_path / "host"
    root.mkdir()
    monkeypatch.setenv("FORGE_ROOT", str(root))
    (root / "requirements_versions.txt").write_text(
        "one-part==1.0  # pinned\n# a comment\nhttps://example.com/x.whl\n\ntwo>=2\ntorchaudio\n"
    )
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root / "venv"], check=True)
    return root


def install(root, name):
    site = next((root / "venv").glob("lib/python*/site-packages"), root / "venv/Lib/site-packages")
    (site / f"{name}.dist-info").mkdir()
    (site / f"{name}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: 2\n")
    (site / f"{name}.dist-info" / "RECORD").write_text(f"{name}.py,,\n{name}.pyc,,\n")
    (site / f"{name}.py").touch()
    return site / f"{name}.py"


def found():
    missing_packages.cache_clear()
    return find_host("forge")


def test_a_whole_installation_is_found(checkout):
    install(checkout, "one_part")
    install(checkout, "two")
    place, reason = found()
    assert (place.root, reason) == (checkout, "")


def test_half_an_installation_is_a_reason_to_skip(checkout):
    assert found()[1].endswith("its environment lacks one-part two")
    install(checkout, "one_part")
    module = install(checkout, "two")
    module.unlink()
    assert found() == (
        None,
        f"{checkout} is not wholly installed: its environment lacks two",
    )


def test_no_checkout_no_environment_no_python(checkout, monkeypatch):
    python = checkout / "venv/bin/python"
    python.unlink()
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    assert "lacks a Python that runs" in found()[1]
    shutil.rmtree(checkout / "venv")
    assert "has no environment" in found()[1]
    monkeypatch.setenv("FORGE_ROOT", str(checkout / "gone"))
    assert "set FORGE_ROOT" in found()[1]
    assert set(HOSTS) == {"comfyui", "a1111", "forge", "reforge", "classic"}
