"""What is no regular file is refused by what it is, and nobody waits for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsrun.files.regular import NotRegularError, open_regular, read_regular
from support.odd_files import KINDS, put_in_place


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR | os.O_NOFOLLOW])
def test_what_is_no_file_is_refused_by_what_it_is(tmp_path: Path, kind: str, flags: int) -> None:
    path = tmp_path / "index.json"
    put_in_place(path, kind)
    path = path.resolve() if kind == "device" else path
    with pytest.raises(NotRegularError, match=f"^it is a .*{kind}.*; expected a regular file$") as caught:
        open_regular(path, flags)
    assert (caught.value.filename, caught.value.strerror) == (str(path), str(caught.value))


def test_a_file_is_read_by_way_of_links_to_a_bound_and_waits_like_any_other(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    (tmp_path / "b").symlink_to("a")
    assert read_regular(tmp_path / "b") == b"0123456789"
    assert read_regular(tmp_path / "b", 4) == b"0123"
    descriptor = open_regular(tmp_path / "a")
    assert os.get_blocking(descriptor)
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)
    with pytest.raises(OSError, match="symbolic link"):
        open_regular(tmp_path / "b", os.O_RDONLY | os.O_NOFOLLOW)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "c")


def test_a_pipe_that_comes_between_the_look_and_the_opening_is_refused_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "latest"
    path.write_text("t")
    before = os.stat(path)
    path.unlink()
    os.mkfifo(path)

    def look(path: Path, *, follow_symlinks: bool) -> os.stat_result:
        return before

    monkeypatch.setattr(os, "stat", look)
    with pytest.raises(NotRegularError, match="a FIFO"):
        open_regular(path)
