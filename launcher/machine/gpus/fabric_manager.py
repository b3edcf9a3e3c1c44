"""The fabric manager of machines with NVSwitches, without which CUDA starts nothing: does it run, of which version?

Read from /proc and the package database; nothing is run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ..proc_files import read_text

#: As the kernel shows it: names of processes end after 15 letters.
_PROCESS = "nv-fabricmanager"[:15]
#: A kernel thread that the first PID namespace alone shows, and a /proc that hides the processes of others does not.
_KERNEL_PROCESS = ("proc/2/comm", "kthreadd")
_PACKAGE = re.compile(
    r"^Package: nvidia-fabricmanager(?:-[0-9]+)?$.*?^Status: install ok installed$.*?^Version: (?:[0-9]+:)?([0-9.]+)",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricManager:
    """The fabric manager of this machine.

    Attributes:
        running: None where processes of the machine cannot be seen (containers, hidepid).
        version: version of the installed Debian package of the fabric manager; None where there is no such package.
    """

    running: bool | None
    version: str | None


def read_fabric_manager(root: Path) -> FabricManager:
    """Looks for the process and the package.

    Args:
        root: `/`, or a made-up tree with proc and var/lib/dpkg.
    """
    kernel_path, kernel_name = _KERNEL_PROCESS
    running = None
    if (read_text(root / kernel_path) or "").strip() == kernel_name:
        running = any((read_text(comm) or "").strip() == _PROCESS for comm in (root / "proc").glob("[0-9]*/comm"))
    return FabricManager(running=running, version=_version(read_text(root / "var/lib/dpkg/status") or ""))


def _version(status: str) -> str | None:
    """Finds the version in dpkg's list of packages."""
    for block in status.split("\n\n"):
        found = _PACKAGE.search(block) if block.startswith("Package: nvidia-fabricmanager") else None
        if found:
            return found.group(1)
    return None
