"""`dsrun metrics`: figures of jobs for Prometheus, over HTTP or in a file. Changes nothing of the jobs."""

from __future__ import annotations

import ipaddress
import os
import signal
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import click

from dsrun.errors import UsageError
from dsrun.files.atomic import write_atomic
from dsrun.files.regular import is_replaceable

from ..dashboard.followed_jobs import FollowedJobs
from ..dashboard.job_metrics import Metric, metrics_of
from ..jobs.listing import find_job
from ..options.job_argument import job_argument
from ..options.types import parse_path, parse_port_or_any
from ._follow_log import hosts_by_rank

#: Between two looks at the jobs, and least time between two states of the file.
_LOOK_S, _FILE_S = 1.0, 5.0
#: How files of metrics begin, by the first metric that there always is.
_MARK = b"# HELP dsrun_"


@click.command("metrics")
@click.option("--port", type=parse_port_or_any, default="9400", metavar="PORT", help="0: any.  [default: 9400]")
@click.option("--host", default="127.0.0.1", metavar="ADDR", help="Listen there.  [default: 127.0.0.1]")
@click.option("--textfile", type=parse_path, metavar="FILE", help="Write FILE, for node_exporter, and serve nothing.")
@job_argument(nargs=-1, required=False)
def command(port: int, host: str, textfile: str | None, jobs: tuple[str, ...]) -> int:
    """Serve figures of jobs to Prometheus until Ctrl-C: of those that run, or of JOB...

    The address is printed on stdout. Only this machine can ask, unless `--host` names another address. A job that has
    ended is told of for five minutes, with `dsrun_job_running` 0.
    """
    from ..dashboard.open_metrics import require_client, serving

    require_client()
    followed = FollowedJobs([find_job(name, os.environ) for name in dict.fromkeys(jobs)], os.environ, hosts_by_rank)
    with _until_signal() as is_over:
        told = _Told(followed, is_over)
        if textfile is not None:
            _keep_file(Path(textfile), told, is_over)
            return 0
        with serving(host, port, lambda: told.metrics) as (address, bound):
            # What a long file holds is told once it is read, and questions are answered meanwhile.
            told.look()
            url = f"http://{f'[{address}]' if ':' in address else address}:{bound}/metrics"
            click.echo(url)
            if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
                click.echo(f"dsrun: {url} is open to all who reach this machine; it asks for no password", err=True)
            told.take()
            while not is_over.wait(_LOOK_S):
                told.take()
    return 0


class _Told:
    """The metrics of the moment, made by one thread and served by others.

    They are replaced whole, so an answer needs no lock and does not wait for files.
    """

    def __init__(self, followed: FollowedJobs, is_over: threading.Event) -> None:
        self.metrics: Sequence[Metric] = ()
        self._followed = followed
        self._is_over = is_over
        self._problems: dict[str, str] = {}

    def take(self) -> None:
        """Looks at the jobs until their records are read to their end."""
        while not self.look() and not self._is_over.is_set():
            pass

    def look(self) -> bool:
        """Looks at the jobs once; returns whether their records are read. Says once what is wrong with one."""
        is_complete = self._followed.look()
        self.metrics = metrics_of(self._followed.views())
        for job_id, problem in self._followed.problems.items():
            if self._problems.get(job_id) != problem:
                click.echo(f"dsrun: job {job_id}: {problem}", err=True)
        self._problems = dict(self._followed.problems)
        return is_complete


def _keep_file(path: Path, told: _Told, is_over: threading.Event) -> None:
    """Writes the metrics into a file again and again; removes it at the end.

    Raises:
        UsageError: Something else is there, or it cannot be written.
    """
    from ..dashboard.open_metrics import metrics_text

    is_ours = False
    try:
        is_ours = is_replaceable(path, _MARK)
    except OSError as error:
        raise _unwritable(path, error) from error
    if not is_ours:
        raise UsageError(
            f"`--textfile {path}`: it is there and no file of dsrun's metrics",
            hint="name another; it is replaced again and again, and removed at the end",
        )
    try:
        while True:
            told.take()
            try:
                write_atomic(path, metrics_text(told.metrics)[0])
                is_ours = True
            except OSError as error:
                raise _unwritable(path, error) from error
            if is_over.wait(_FILE_S):
                return
    finally:
        # node_exporter would go on telling of jobs that nobody looks at.
        with suppress(OSError):
            if is_ours:
                path.unlink(missing_ok=True)


def _unwritable(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"`--textfile {path}`: cannot be written: {(error.strerror or str(error)).lower()}",
        hint="a file in the folder that node_exporter's `--collector.textfile.directory` names",
    )


@contextmanager
def _until_signal() -> Generator[threading.Event, None, None]:
    """Gives an event that Ctrl-C and SIGTERM set."""
    is_over = threading.Event()

    def end(_signum: int, _frame: object) -> None:
        is_over.set()

    before = {signum: signal.signal(signum, end) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield is_over
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
