"""Whether what a plan names is on this host: its working folder and its script. Looks, and reads neither.

The front end has looked on its own host, and preflight on all; this is the last look, before the first rank of a host
is started, so that not every rank says the same.
"""

from __future__ import annotations

import os

from dsrun.errors import Problem

from ..plan.launch_plan import LaunchPlan

_WAY_OUT = "every host needs it at the same path; `--sync` copies the working folder there"


def missing_here(plan: LaunchPlan) -> Problem | None:
    """Returns what is missing and the way out; None if nothing is."""
    problems: list[str] = []
    if not os.path.isdir(plan.cwd):
        problems.append(f"working folder {plan.cwd!r}: {_what_is(plan.cwd)}")
    if plan.program.kind == "script" and (os.path.isabs(plan.program.target) or not problems):
        # A folder or an archive with a `__main__.py` is a script as well.
        path = os.path.join(plan.cwd, plan.program.target)
        if not os.path.exists(path):
            problems.append(f"script {path!r}: no such file there")
    return Problem("; ".join(problems), _WAY_OUT) if problems else None


def _what_is(path: str) -> str:
    return "is no folder there" if os.path.exists(path) else "no such folder there"
