"""Which folders lie in the host's memory, and on no drive: by the kernel's table of mounts."""

from __future__ import annotations

import os
import re
from pathlib import Path

#: File systems whose files are memory.
_IN_MEMORY = frozenset({"tmpfs", "ramfs", "hugetlbfs", "devtmpfs"})
#: What the table writes for characters that would divide its fields (proc_pid_mountinfo(5)).
_ESCAPED = re.compile(r"\\([0-7]{3})")


def memory_file_system(folder: str, *, table: Path = Path("/proc/self/mountinfo")) -> str | None:
    """Returns the name of the file system where a folder's files are memory; None where they lie elsewhere.

    Args:
        folder: path of the folder; it need not exist yet.
        table: path of the kernel's table of mounts; where it cannot be read, the result is None.
    """
    try:
        lines = table.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    real = os.path.realpath(folder)
    found: tuple[str, str] | None = None
    for line in lines:
        mount, _, rest = line.partition(" - ")
        point = _ESCAPED.sub(lambda code: chr(int(code[1], 8)), mount.split(" ")[4])
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        # Of two mounts at one point the later one is seen.
        if inside and (found is None or len(point) >= len(found[0])):
            found = (point, rest.split(" ")[0])
    return found[1] if found is not None and found[1] in _IN_MEMORY else None
