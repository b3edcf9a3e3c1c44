from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsrun.launcher.agent.record_lines import MOST_BYTES, RecordLines


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_lines_come_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "records"
    lines = RecordLines(path)
    assert lines.read() == ""
    append(path, b"a\nb\nc")
    assert [lines.read(), lines.read()] == ["a\nb\n", ""]
    append(path, b"d\xff\n")
    assert lines.read().encode("utf-8", "surrogateescape") == b"cd\xff\n"


def test_much_comes_in_pieces_of_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "records"
    line = b"x" * 999 + b"\n"
    append(path, line * 3000)
    lines = RecordLines(path)
    pieces = list(iter(lines.read, ""))
    assert len(pieces) > 1
    assert all(piece.endswith("\n") and len(piece) <= MOST_BYTES for piece in pieces)
    assert "".join(pieces).encode() == line * 3000


def test_a_line_longer_than_a_piece_comes_in_order(tmp_path: Path) -> None:
    path = tmp_path / "records"
    data = b"x" * (2 * MOST_BYTES + 7) + b"\n"
    append(path, data)
    assert "".join(iter(RecordLines(path).read, "")).encode() == data


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    os.symlink("/etc/passwd", tmp_path / "records")
    with pytest.raises(OSError):
        RecordLines(tmp_path / "records").read()
