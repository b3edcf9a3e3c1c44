"""What a process of the runtime says is wrong is this one's error, and all else that it says is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsrun.errors import CheckpointError, InputError
from dsrun.launcher.commands._checkpoint_child import run_child

MODULE = "said_by_child"


def child(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> str:
    (folder / f"{MODULE}.py").write_text(f"import sys\n{body}\n")
    monkeypatch.chdir(folder)
    # Another body of the same length within a second would find this one's byte code.
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    return run_child(MODULE, ["a word", "--", "-x"])


def test_words_arrive_output_comes_back_and_talk_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    body = "print(sys.argv[1:]); print('dsrun: a note\\na warning', file=sys.stderr)"
    assert child(tmp_path, monkeypatch, body) == "['a word', '--', '-x']\n"
    assert capsys.readouterr().err == "dsrun: a note\na warning\n"


def test_all_problems_are_raised_with_their_hints_and_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "error: one\\nhint: way out\\nerror: two"
    for code, kind in ((2, InputError), (1, CheckpointError)):
        with pytest.raises(kind) as caught:
            child(tmp_path, monkeypatch, f"print('{text}', file=sys.stderr); sys.exit({code})")
        assert caught.value.render() == "error: one\nhint: way out\nerror: two"
        assert caught.value.exit_code == code


def test_a_crash_is_told_and_its_traceback_shown_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CheckpointError, match="said_by_child` ended with exit code 1; what it said stands above"):
        child(tmp_path, monkeypatch, "def deep():\n    raise ZeroDivisionError('so')\ndeep()")
    said = capsys.readouterr().err
    assert said.startswith("Traceback")
    assert said.endswith("ZeroDivisionError: so\n")
