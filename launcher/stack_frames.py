"""One level of a Python stack, whoever wrote it down: whose code it is, and what one calls its place. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NOT_USERS = re.compile(r"/(site|dist)-packages/|/lib/python3[^/]*/|/dsrun/|^<|^\?\?")
_LIBRARY_FOLDER = re.compile(r"^.*/(?:site-packages|dist-packages|lib/python3[^/]*)/|^.*/(?=dsrun/)")


@dataclass(frozen=True, slots=True)
class Frame:
    """One level of a Python stack."""

    file: str
    line: int
    function: str

    @property
    def is_users(self) -> bool:
        """Whether it is neither a library's, nor Python's, nor dsrun's."""
        return _NOT_USERS.search(self.file) is None

    @property
    def place(self) -> str:
        """The file as one speaks of it, and the line."""
        short = self.file.rpartition("/")[2] if self.is_users else _LIBRARY_FOLDER.sub("", self.file)
        return f"{short}:{self.line}"
