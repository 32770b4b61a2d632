"""Fetching packages: what is checked, what is kept, what is said when it fails."""

import hashlib
import sys

import pytest

from hf_ext.data import packages

CONTENT = b"weights"
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture(autouse=True)
def registry(monkeypatch, tmp_path):
    """A package manager that writes a file and counts its calls."""
    calls = tmp_path / "calls"
    code = f"open('{{name}}-{{version}}.bin', 'wb').write({CONTENT!r}); open({str(calls)!r}, 'a').write('x')"
    failing = "import sys; sys.exit('no such version')"
    commands = {"wheel": [sys.executable, "-c", code], "sdist": [sys.executable, "-c", failing], "npm": ["no-npm-here"]}
    monkeypatch.setattr(packages, "_COMMANDS", commands)
    monkeypatch.setattr(packages, "HF_HOME", str(tmp_path / "home"))
    return calls


def test_fetches_once(registry):
    first = packages.fetch_package("some", "1.0", SHA256)
    assert first.name == "some-1.0.bin" and first.read_bytes() == CONTENT
    assert packages.fetch_package("some", "1.0", SHA256) == first
    assert registry.read_text() == "x"
    assert [p.name for p in first.parents[1].iterdir()] == [first.parent.name], "something was left behind"


def test_another_file_is_refused_and_not_kept(registry):
    for _ in range(2):
        with pytest.raises(ValueError, match=f"some-1.0.bin has sha256 {SHA256}, expected 00"):
            packages.fetch_package("some", "1.0", "00" * 32)
    assert registry.read_text() == "xx"


def test_says_what_failed():
    with pytest.raises(RuntimeError, match="other 2 could not be fetched with .*: no such version"):
        packages.fetch_package("other", "2", SHA256, kind="sdist")
    with pytest.raises(RuntimeError, match="no-npm-here is not installed; it is needed to fetch other"):
        packages.fetch_package("other", "2", SHA256, kind="npm")
