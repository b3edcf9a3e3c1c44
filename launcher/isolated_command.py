"""The command line by which one process of dsrun starts another: nothing in the working folder can shadow it."""

from __future__ import annotations

import sys


def isolated_command(python: str, module: str, *arguments: str) -> list[str]:
    """Returns a command that runs `main` of a dsrun module, whatever lies in the working folder.

    `python -c` puts the working folder first on the path; it is taken off before anything is imported, so a user's
    `queue.py` or `launcher/` cannot shadow ours. `-P` does the same but exists from 3.11 on only, and is
    inherited by interpreters that the user's script starts. `-O` and `-OO` are passed on from process to process, so
    that a user's `python -O -m dsrun` means the ranks too.
    """
    optimize = ["-" + "O" * sys.flags.optimize] if sys.flags.optimize else []
    code = f"import sys; sys.path[:1] = [p for p in sys.path[:1] if p]; from {module} import main; main()"
    return [python, *optimize, "-u", "-c", code, *arguments]
