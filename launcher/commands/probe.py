"""`dsrun probe`: what hardware and software there is, here or on many hosts; measured or watched if asked.

Only chooses and prints: facts come from probe.py and probe_hosts, figures from bench_hosts, lines from probe_view.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dsrun.errors import Problem, UsageError

from ..option_words import parse_duration, parse_path
from ..probe_view import host_view, hosts_view
from ..sectioned_help import SectionedCommand

if TYPE_CHECKING:
    from ..hosts import HostSpec
    from ..probe_hosts import ManyReports
    from ..probe_watch import Load
    from ..survey import Survey
    from ..transport.choice import TransportName

#: Some hosts told nothing; what the others said is shown.
HOSTS_MISSING_EXIT = 1
#: Longest silence of a host that is asked something.
_LEASE_S = 30.0
_WIDEST = 120
_TRANSPORTS = ("ssh", "openssh", "srun", "local")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Where:
    """Which hosts, and the way there; without a hostfile this machine."""

    hostfile: str | None
    include: str | None
    exclude: str | None
    transport: TransportName | None
    ssh_config: str | None
    accept_new_host_keys: bool
    connect_timeout: float | None

    def refuse_without_hosts(self) -> None:
        """Refuses options that mean something with hosts only."""
        given = {
            "--include": self.include is not None,
            "--exclude": self.exclude is not None,
            "--transport": self.transport is not None,
            "--ssh-config": self.ssh_config is not None,
            "--accept-new-host-keys": self.accept_new_host_keys,
            "--connect-timeout": self.connect_timeout is not None,
        }
        words = [word for word, is_given in given.items() if is_given]
        if self.hostfile is None and words:
            raise UsageError(f"`{words[0]}` means nothing without hosts", hint="name them: `-H hosts`")


@click.command("probe", cls=SectionedCommand)
@click.option("-H", "--hostfile", type=parse_path, metavar="FILE", help="Ask these hosts; - is stdin.")
@click.option("-i", "--include", metavar="FILTER", help="Ask only these: `w0@w1`, `w[0-3]`.")
@click.option("-e", "--exclude", metavar="FILTER", help="Ask all but these.")
@click.option("--transport", type=click.Choice(_TRANSPORTS), metavar="HOW", help="Way to them, as for `dsrun run`.")
@click.option("--ssh-config", type=parse_path, metavar="FILE", help="Read it in place of ~/.ssh/config.")
@click.option("--accept-new-host-keys", is_flag=True, help="Trust hosts that known_hosts has not, and note them.")
@click.option("--connect-timeout", type=parse_duration, metavar="TIME", help="For a host to answer.  [default: 10s]")
@click.option("-a", "--all", "everything", is_flag=True, help="Show also what is not looked at every day.")
@click.option("--deep", is_flag=True, help="Import torch, and say what was loaded.")
@click.option("--bench", is_flag=True, help="Measure memory, disk, GPUs and the network; about 10 s.")
@click.option(
    "--path", "paths", multiple=True, type=parse_path, metavar="DIR", help="A folder jobs use.  [default: this one]"
)
@click.option(
    "--watch",
    is_flag=False,
    flag_value="2",
    type=parse_duration,
    metavar="[TIME]",
    help="Show what changes, every 2 seconds or TIME, until Ctrl-C.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object; with --watch one a line.")
def command(
    hostfile: str | None,
    include: str | None,
    exclude: str | None,
    transport: TransportName | None,
    ssh_config: str | None,
    accept_new_host_keys: bool,
    connect_timeout: float | None,
    everything: bool,
    deep: bool,
    bench: bool,
    paths: tuple[str, ...],
    watch: float | None,
    as_json: bool,
) -> int:
    """Show host, processor, memory, GPUs and versions, and what is not as it should be.

    Cores and memory are what this process may use (affinity, cgroups), not only what there is. Of many hosts, what all
    have in common is shown once and what differs below, the odd one out marked with `!`; the exit code is 1 if a host
    does not answer. Nothing is measured without --bench, and torch is imported with --deep and --bench only.

    --bench writes a file of at most 1 GiB without a name to each DIR, which is gone whatever happens.
    """
    where = _Where(
        hostfile=hostfile,
        include=include,
        exclude=exclude,
        transport=transport,
        ssh_config=ssh_config,
        accept_new_host_keys=accept_new_host_keys,
        connect_timeout=connect_timeout,
    )
    where.refuse_without_hosts()
    if watch is not None:
        if bench or deep:
            raise UsageError("`--watch` shows what changes; it goes with neither `--bench` nor `--deep`")
        _watch(where, interval_s=watch, as_json=as_json)
        return 0
    folders = [os.path.abspath(path) for path in paths]
    if hostfile is None:
        report = _this_host(folders, deep=deep)
        if bench:
            report["measured"] = _bench_here(where, folders)
        if as_json:
            click.echo(json.dumps(report, indent=2))
        else:
            _print(host_view(report, width=_width(), everything=everything))
        return 0
    found = _ask_many(where, folders, deep=deep, bench=bench)
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=2))
    else:
        _print(hosts_view(found, width=_width(), everything=everything))
        for name, why in found.unable.items():
            click.echo(Problem(f"host {name}: {why.reason}", why.hint).render(), err=True)
    return HOSTS_MISSING_EXIT if found.unable else 0


def _this_host(folders: Sequence[str], *, deep: bool) -> dict[str, Any]:
    from ..probe_question import look

    return look(folders, deep=deep)


def _bench_here(where: _Where, folders: Sequence[str]) -> dict[str, Any]:
    from ..bench_hosts import measure_hosts

    with _survey(where) as (survey, hosts):
        (measured,) = _measure(survey, hosts, folders, measure_hosts).values()
    return measured


def _ask_many(where: _Where, folders: Sequence[str], *, deep: bool, bench: bool) -> ManyReports:
    from ..probe_hosts import ask_hosts

    with _survey(where) as (survey, hosts):
        found = ask_hosts(survey, hosts, paths=folders, deep=deep)
        if not bench:
            return found
        from ..bench_hosts import measure_hosts, measure_pairs

        there = [host for host in hosts if host.name in found.reports]
        measured = _measure(survey, there, folders, measure_hosts)
        pairs = measure_pairs(survey, there, say=_say) if len(there) > 1 else []
    reports = {name: {**report, "measured": measured[name]} for name, report in found.reports.items()}
    return replace(found, reports=reports, pairs=pairs)


def _measure(survey: Survey, hosts: Sequence[HostSpec], folders: Sequence[str], measure: Any) -> dict[str, Any]:
    from ..bench_disk import CAP_BYTES

    return measure(survey, hosts, paths=folders or [os.getcwd()], cap_bytes=CAP_BYTES, say=_say)


def _say(what: str) -> None:
    click.echo(f"dsrun: measuring {what}", err=True)


@contextmanager
def _survey(where: _Where) -> Generator[tuple[Survey, Sequence[HostSpec]]]:
    """Opens a survey to the hosts; without a hostfile, to this machine alone."""
    from ..hosts import HostSpec
    from ..survey import Survey
    from ..transport.choice import ReachSettings, make_transport

    new_keys: deque[str] = deque()
    settings = ReachSettings(
        lease_s=_LEASE_S,
        connect_timeout_s=where.connect_timeout,
        ssh_config=None if where.ssh_config is None else Path(where.ssh_config),
        announce=new_keys.append if where.accept_new_host_keys else None,
    )
    if where.hostfile is None:
        hosts = (HostSpec(name=os.uname().nodename, slots=1, source="this machine"),)
        way = make_transport("local", settings)
    else:
        from ..placement import HostRequest, place
        from ..probe import host_names

        request = HostRequest(
            hostfile=where.hostfile, include=where.include, exclude=where.exclude, transport=where.transport
        )
        placement = place(request, environ=os.environ, local_names=host_names(), device_count=lambda: 0)
        hosts = placement.allocation.hosts
        way = make_transport(placement.transport, settings, local_hosts=placement.local_hosts)
    with Survey(hosts, way, python=sys.executable) as survey:
        for line in new_keys:
            click.echo(f"dsrun: {line}", err=True)
        yield survey, hosts


def _print(lines: Iterable[str]) -> None:
    # click takes colours out where there is no terminal; where they are not wanted, we do.
    colour = False if os.environ.get("NO_COLOR") else None
    for line in lines:
        click.echo(line, color=colour)


def _width() -> int:
    return min(_WIDEST, shutil.get_terminal_size((80, 24)).columns)


def _watch(where: _Where, *, interval_s: float, as_json: bool) -> None:
    from ..watch_loop import take_samples, watch
    from ..watch_text import watch_lines

    with ExitStack() as stack:
        survey, _ = stack.enter_context(_survey(where))
        survey.ask("watch_hold", {})
        live = stack.enter_context(_live()) if sys.stdout.isatty() and not as_json else None

        def show(loads: Mapping[str, Load | str]) -> None:
            if as_json:
                hosts = {name: {"error": its} if isinstance(its, str) else its.to_json() for name, its in loads.items()}
                click.echo(json.dumps({"schema_version": 1, "time_s": round(time.time(), 3), "hosts": hosts}))
            elif live is not None:
                live("\n".join(watch_lines(loads)))
            else:
                click.echo("\n".join([*watch_lines(loads), ""]))
            sys.stdout.flush()

        watch(lambda: take_samples(survey), show, interval_s=interval_s, wait=time.sleep)


@contextmanager
def _live() -> Generator[Callable[[str], None]]:
    """Yields what draws a text over the one before."""
    from rich.live import Live
    from rich.text import Text

    with Live(Text("..."), auto_refresh=False, screen=False) as live:

        def draw(text: str) -> None:
            live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)

        yield draw


assert isinstance(command, SectionedCommand), "as its decorator says"
command.sections = {
    "Where": (
        *("hostfile", "include", "exclude", "transport", "ssh_config", "accept_new_host_keys", "connect_timeout"),
    ),
    "What": ("everything", "deep", "bench", "paths", "watch", "as_json", "help"),
}
