"""`dsrun logs`: what the ranks of a job wrote, in order of arrival. Only shows."""

from __future__ import annotations

import os
import re
from datetime import datetime

import click

from ..jobs.front_end_process import front_end_of
from ..jobs.listing import find_job
from ..options.job_argument import job_argument
from ._follow_log import LogView, parse_since, until_its_end


def parse_pattern(text: str) -> re.Pattern[str]:
    """Reads a regular expression."""
    try:
        return re.compile(text)
    except re.error as error:
        raise click.BadParameter(f"`{text}` is no regular expression: {error}") from error


@click.command("logs")
@click.option("-f", "--follow", is_flag=True, help="Go on with what comes, until the job ends.")
@click.option("--ranks", metavar="RANKS", help="Lines of these ranks only, like `0,8-11`.")
@click.option("--since", metavar="TIME", help="Only what came in the last `5m`, or since `14:30`.")
@click.option("--grep", type=parse_pattern, metavar="RE", help="Only lines in which this is found.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object a line: time, rank, stream, text.")
@job_argument()
def command(
    follow: bool, ranks: str | None, since: str | None, grep: re.Pattern[str] | None, as_json: bool, job: str
) -> int:
    """Print the log of a job that runs or has ended, all on stdout.

    Lines are tagged as when the job runs in the foreground; dsrun's own notes stand between them.
    """
    found = find_job(job, os.environ)
    view = LogView(found, ranks=ranks, as_json=as_json)
    since_s = None if since is None else parse_since(since, datetime.now().astimezone())
    if not (follow and found.state.is_live):
        view.show(since_s=since_s, grep=grep)
    elif found.record.host != os.uname().nodename:
        view.show(since_s=since_s, grep=grep, follow=until_its_end(found, None))
    else:
        with front_end_of(found.record) as front_end:
            view.show(since_s=since_s, grep=grep, follow=until_its_end(found, front_end))
    return 0
