"""JOB on a command line: the argument, and what a shell completes it to."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from dsrun.errors import DsrunError

from ..jobs.listing import LAST, all_jobs
from ..jobs.text import command_text

_F = TypeVar("_F", bound=Callable[..., Any])


def job_argument(*, nargs: int = 1, required: bool = True) -> Callable[[_F], _F]:
    """Returns a decorator for a verb that takes JOB, or JOB... as `jobs`.

    Args:
        nargs: 1, or -1 for any number.
        required: whether at least one JOB must be given.
    """
    name, metavar = (
        ("job", "JOB" if required else "[JOB]") if nargs == 1 else ("jobs", "JOB..." if required else "[JOB]...")
    )
    return click.argument(name, nargs=nargs, required=required, metavar=metavar, shell_complete=complete_job)


def complete_job(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Returns the jobs whose ids begin so, the newest first, with what they run."""
    try:
        jobs = all_jobs(os.environ)
    except DsrunError:
        # A shell that completes has nowhere to show an error; the verb itself will.
        return []
    given: Any = ctx.params.get(param.name or "") or ()
    items = [
        CompletionItem(job.id, help=f"{job.state.value}: {command_text(job)}")
        for job in jobs
        if job.id.startswith(incomplete) and job.id not in given
    ]
    return [*items, *([CompletionItem(LAST, help="the newest job")] if jobs and LAST.startswith(incomplete) else [])]
