from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dsrun.contract.error_file import WorkerError, read_error_file, write_error_file
from dsrun.errors import InputError, ModelError


def test_an_error_file_says_what_was_raised_and_where(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    try:
        raise ValueError("no such thing")
    except ValueError as error:
        write_error_file(path, error)
    found = read_error_file(path)
    assert found is not None
    assert found.message == "ValueError: no such thing"
    assert 'raise ValueError("no such thing")' in found.traceback
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_mistake_in_the_input_is_written_with_its_hint_and_without_a_traceback(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    write_error_file(path, ModelError("nothing to train", hint="unfreeze"))
    found = read_error_file(path)
    assert found is not None
    assert (found.message, found.traceback) == ("error: nothing to train\nhint: unfreeze", "")
    assert found.exit_code == ModelError.exit_code == 2


def test_an_error_file_says_the_code_that_the_process_would_end_with(tmp_path: Path) -> None:
    for name, error, code, expected in (
        ("1", ValueError("x"), None, 1),
        ("2", InputError("command: cannot run"), 127, 127),
    ):
        write_error_file(tmp_path / name, error, exit_code=code)
        found = read_error_file(tmp_path / name)
        assert found is not None
        assert found.exit_code == expected


def test_the_first_error_of_a_rank_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    write_error_file(path, ValueError("first"))
    write_error_file(path, ValueError("second"))
    found = read_error_file(path)
    assert found is not None
    assert found.message == "ValueError: first"


def test_the_error_file_that_torchs_record_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    extra = {"py_callstack": "Traceback ...", "timestamp": "1700000000.25"}
    path.write_text(json.dumps({"message": {"message": "RuntimeError: x", "extraInfo": extra}}))
    assert read_error_file(path) == WorkerError(
        message="RuntimeError: x", traceback="Traceback ...", time_s=1700000000.25
    )


def test_a_word_of_torchs_record_is_signed_and_otherwise_kept(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    extra = {"py_callstack": "Traceback ...", "timestamp": "1700000000"}
    path.write_text(json.dumps({"message": {"message": "RuntimeError: x", "extraInfo": extra}}))
    os.utime(path, (1700000000.5, 1700000000.5))
    write_error_file(path, RuntimeError("x"))
    assert read_error_file(path) == WorkerError(
        message="RuntimeError: x", traceback="Traceback ...", time_s=1700000000.5, pid=os.getpid()
    )


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"message": 3}', b"\xff"])
def test_what_is_no_word_is_not_signed(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "error.json"
    path.write_bytes(content)
    assert not write_error_file(path, ValueError("x"))
    assert path.read_bytes() == content


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"message": 3}', b'{"message": {}}', b"\xff"])
def test_a_damaged_error_file_is_no_error_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "error.json"
    path.write_bytes(content)
    assert read_error_file(path) is None
    assert read_error_file(tmp_path / "absent") is None
