"""What may stand where a regular file is expected: a reader that opens it would wait, or read without end."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

#: Each is a word of the message that refuses it; a device is reached by a link, for making one takes rights.
KINDS = ("FIFO", "socket", "folder", "device")


def put_in_place(path: Path, kind: str) -> None:
    """Puts something of a kind where a file may be."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    match kind:
        case "FIFO":
            os.mkfifo(path)
        case "socket":
            # The name of a socket has 107 bytes at most: bound beside, by a short one.
            here = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
            with socket.socket(socket.AF_UNIX) as end:
                end.bind(f"/proc/self/fd/{here}/{path.name}")
            os.close(here)
        case "folder":
            path.mkdir()
        case "device":
            path.symlink_to("/dev/zero")
        case _:
            raise AssertionError(kind)
