"""Which commit of the script's repository a run is of, for those who ask a checkpoint later. Asks git, once."""

from __future__ import annotations

import subprocess
from functools import lru_cache

#: On a huge repository git may look for long, and the answer is not worth waiting for.
_TIMEOUT_S = 5.0


@lru_cache(maxsize=1)
def git_state() -> dict[str, str | bool] | None:
    """Returns the commit of the working folder's repository, and whether files that git tracks were changed.

    None where there is no repository, no git, or no answer in time.
    """
    command = ["git", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
    if done.returncode != 0:
        return None
    lines = done.stdout.splitlines()
    commits = [line.removeprefix("# branch.oid ") for line in lines if line.startswith("# branch.oid ")]
    changed = any(not line.startswith("#") for line in lines)
    return {"commit": commits[0], "changed": changed} if commits else None
