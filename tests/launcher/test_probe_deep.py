from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from dsrun.launcher.probe_deep import Loaded, NotLoaded, read_loaded
from support.cli import clean_environment


def program(folder: Path, text: str) -> str:
    """A made-up interpreter."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_torch_that_is_imported_elsewhere_says_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A file of the working folder must not stand in for torch.
    (tmp_path / "torch.py").write_text("raise AssertionError('imported from the working folder')\n")
    monkeypatch.chdir(tmp_path)
    loaded = read_loaded(sys.executable, clean_environment())
    assert isinstance(loaded, Loaded)
    assert loaded.torch == version("torch")
    assert (loaded.gloo, loaded.devices) == (True, 0) or loaded.cuda_available
    assert loaded.threads >= 1
    assert "torch" not in sys.modules or sys.modules["torch"].__file__ != str(tmp_path / "torch.py")


def test_an_import_that_fails_is_told_in_its_last_words(tmp_path: Path) -> None:
    python = program(tmp_path, "echo Traceback >&2; echo \"ModuleNotFoundError: No module named 'torch'\" >&2; exit 1")
    assert read_loaded(python, {}) == NotLoaded(reason="ModuleNotFoundError: No module named 'torch'")


def test_an_import_that_hangs_is_given_up(tmp_path: Path) -> None:
    found = read_loaded(program(tmp_path, "exec sleep 60"), {"PATH": "/usr/bin:/bin"}, patience_s=0.2)
    assert isinstance(found, NotLoaded)
    assert found.reason.startswith("importing torch took longer than")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("exit 3", "exit status 3"),
        ("true", "exit status 0"),
        ("echo nonsense", "answered 'nonsense'"),
        ("echo '{\"torch\": 1}'", "answered '{\"torch\": 1}'"),
        ("echo '[1]'", "answered '[1]'"),
    ],
)
def test_an_answer_that_is_none_is_a_reason_and_not_a_crash(tmp_path: Path, text: str, reason: str) -> None:
    found = read_loaded(program(tmp_path, text), {})
    assert isinstance(found, NotLoaded)
    assert found.reason.endswith(reason)


def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere")
    assert read_loaded(missing, {}) == NotLoaded(reason=f"{missing}: no such file or directory")
