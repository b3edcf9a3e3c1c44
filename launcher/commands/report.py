"""`dsrun report`: a page about jobs, for a browser. Finds the jobs, writes the file; what it says is web_report's."""

from __future__ import annotations

import os
import stat
import sys
from datetime import datetime
from pathlib import Path

import click

from dsrun.errors import DsrunError, UsageError
from dsrun.files.atomic import write_atomic
from dsrun.files.regular import is_replaceable
from dsrun.units import format_bytes

from ..jobs.listing import Job, find_job
from ..masking import Masker
from ..options.job_argument import job_argument

#: How pages of this verb begin, and none of anybody else's.
_MARK = b"<!-- dsrun report -->\n"


@click.command("report")
@click.option("-o", "--output", metavar="FILE", help="File to write, `-` for stdout.  [JOB.html in this folder]")
@job_argument(nargs=-1)
def command(output: str | None, jobs: tuple[str, ...]) -> int:
    """Write a page about a job, or one that compares several.

    One HTML file with plots of the loss, throughput, memory and waits by rank, failures and restarts, the config, and
    what could be faster. It needs nothing but a browser. A page of an earlier report is replaced, no other file.
    """
    # Templates and what the page is made of take a while to load, and no other verb needs them.
    from ..web_report.job_source import read_source
    from ..web_report.page import page_of

    found = _distinct(jobs)
    masker = Masker([os.environ])
    sources = [read_source(job, masker) for job in found]
    # A name may hold bytes that are no UTF-8.
    data = _MARK + page_of(sources, now=datetime.now().astimezone(), masker=masker).encode(errors="replace")
    if output == "-":
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return 0
    path = Path(output) if output is not None else Path(f"{found[0].id if len(found) == 1 else 'jobs'}.html")
    _write(path, data)
    click.echo(f"dsrun: {path} was written, {format_bytes(len(data))}", err=True)
    return 0


def _distinct(names: tuple[str, ...]) -> list[Job]:
    """Finds the jobs.

    Raises:
        UsageError: There is no such job, or two names mean the same one.
    """
    found: list[Job] = []
    for name in names:
        job = find_job(name, os.environ)
        if any(job.folder == each.folder for each in found):
            raise UsageError(f"`{name}` is job {job.id}, which was named already", hint="name each job once")
        found.append(job)
    return found


def _write(path: Path, data: bytes) -> None:
    """Writes the page, unless another kind of file would be lost.

    Raises:
        UsageError: Something else is there.
        DsrunError: It cannot be written.
    """
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            if stat.S_ISDIR(mode):
                raise UsageError(f"{path} is a folder", hint=f"`-o {path / 'report.html'}` writes a file into it")
            raise UsageError(f"{path} is no file", hint="`-o -` writes to stdout")
        if not is_replaceable(path, _MARK):
            raise UsageError(
                f"{path} is there and no report of dsrun", hint="`-o FILE` names another; remove it if it may go"
            )
    except FileNotFoundError:
        pass
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        # As any output of a user's program: the umask says who may read it.
        write_atomic(path, data, mode=0o666 & ~_umask())
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> DsrunError:
    reason = (error.strerror or str(error)).lower()
    return DsrunError(f"{path}: cannot be written: {reason}", hint="`-o FILE` names another place, `-o -` is stdout")


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
