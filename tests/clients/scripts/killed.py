"""Runs a script as it is, and kills this process by SIGKILL where a checkpoint's files change for the Nth time.

    python killed.py RANK N SCRIPT [WORDS]

Counted is what python does by name in a folder `checkpoint-*`: files opened, renamed and removed, folders made and
removed. With a rank that there is not, or more changes than there are, nothing is killed; their number is printed.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys

CHANGES = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate"}


def main() -> None:
    rank, number, script, *words = sys.argv[1:]
    mine = os.environ["RANK"] == rank
    count = 0

    def note(event: str, args: tuple[object, ...]) -> None:
        nonlocal count
        if event not in CHANGES or not isinstance(args[0], str) or f"{os.sep}checkpoint-" not in args[0]:
            return
        count += 1
        if mine and count == int(number):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(note)
    sys.argv = [script, *words]
    runpy.run_path(script, run_name="__main__")
    print(f"rank {os.environ['RANK']}: {count} changes")


if __name__ == "__main__":
    main()
