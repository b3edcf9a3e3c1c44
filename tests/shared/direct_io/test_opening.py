"""A file without a name, past the page cache where that goes."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from dsrun.direct_io.opening import open_anonymous


@pytest.mark.parametrize(("refused", "direct"), [(0, True), (os.O_DIRECT, False), (os.O_TMPFILE, True)])
def test_what_a_file_system_refuses_is_done_without(tmp_path: Path, refused: int, direct: bool) -> None:
    def open_file(path: str, flags: int, mode: int) -> int:
        # O_DIRECT is what tmpfs of kernels before 6.6 refuses, O_TMPFILE what NFS does.
        if refused and flags & refused == refused:
            raise OSError(errno.EINVAL, "Invalid argument")
        return os.open(path, flags, mode)

    opened = open_anonymous(str(tmp_path), open_file)
    try:
        assert opened.direct is direct
        assert os.listdir(tmp_path) == []
        os.ftruncate(opened.fd, 8)
        assert os.fstat(opened.fd).st_size == 8
    finally:
        os.close(opened.fd)


def test_a_folder_that_is_not_there_is_the_systems_own_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_anonymous(str(tmp_path / "no"))
