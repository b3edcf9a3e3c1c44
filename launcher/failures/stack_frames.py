"""One level of a Python stack, whoever wrote it down: whose code it is, and what one calls its place."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import dsrun

_NOT_USERS = re.compile(r"/(site|dist)-packages/|/lib/python3[^/]*/|^<|^\?\?")
_LIBRARY_FOLDER = re.compile(r"^.*/(?:site-packages|dist-packages|lib/python3[^/]*)/")
_PACKAGE = Path(dsrun.__file__).absolute().parent
#: Where dsrun's own code lies here, and what that is called; in a checkout its two halves are links.
_OWN_FOLDERS = {f"{_PACKAGE}/": "dsrun/"} | {
    f"{(_PACKAGE / half).resolve()}/": f"dsrun/{half}/" for half in ("launcher", "runtime")
}


@dataclass(frozen=True, slots=True)
class Frame:
    """One level of a Python stack."""

    file: str
    line: int
    function: str

    @property
    def is_users(self) -> bool:
        """Whether it is neither a library's, nor Python's, nor dsrun's."""
        return _name_in_library(self.file) is None

    @property
    def place(self) -> str:
        """The file as one speaks of it, and the line."""
        return f"{_name_in_library(self.file) or self.file.rpartition('/')[2]}:{self.line}"


def _name_in_library(file: str) -> str | None:
    """Returns what a file of a library is called from its folder on; None for a file of the user's.

    Of dsrun's own files the folder decides, for a user's may be called `dsrun` too: a clone is. Other hosts may have
    dsrun elsewhere; a file below a folder of it that is there by the same name is taken for the same.
    """
    if _NOT_USERS.search(file) is not None:
        return _LIBRARY_FOLDER.sub("", file)
    for folder, name in _OWN_FOLDERS.items():
        if file.startswith(folder):
            return name + file.removeprefix(folder)
    _, found, rest = file.rpartition("/dsrun/")
    return f"dsrun/{rest}" if found and "/" in rest and ".." not in rest and os.path.isfile(_PACKAGE / rest) else None
