"""`dsrun probe`: what hardware and software there is, here or on many hosts; measured or watched if asked.

Only chooses and prints: facts come from machine and probe, figures from bench, lines from probe.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from dsrun.errors import Problem, UsageError

from ..options.hosts import ReachOptions, reach_options
from ..options.sectioned_help import SectionedCommand
from ..options.types import parse_duration, parse_path
from ..probe.view import host_view, hosts_view

if TYPE_CHECKING:
    from ..hosts.spec import HostSpec
    from ..probe.many_hosts import ManyReports
    from ..probe.watch import Load
    from ..survey.client import Survey

#: Some hosts told nothing; what the others said is shown.
HOSTS_MISSING_EXIT = 1
#: Longest silence of a host that is asked something.
_LEASE_S = 30.0
_WIDEST = 120


@click.command("probe", cls=SectionedCommand)
@reach_options
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
    hosts: ReachOptions,
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
    if watch is not None:
        others = {"--bench": bench, "--deep": deep, "--all": everything, "--path": bool(paths)}
        for word in (word for word, is_given in others.items() if is_given):
            raise UsageError(f"`--watch` and `{word}` do not go together", hint="`--watch` shows what changes alone")
        _watch(hosts, interval_s=watch, as_json=as_json)
        return 0
    folders = [os.path.abspath(path) for path in paths]
    if not hosts.are_given:
        report = _this_host(folders, deep=deep)
        if bench:
            report["measured"] = _bench_here(hosts, folders)
        if as_json:
            click.echo(json.dumps(report, indent=2))
        else:
            _print(host_view(report, width=_width(), everything=everything))
        return 0
    found = _ask_many(hosts, folders, deep=deep, bench=bench)
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=2))
    else:
        _print(hosts_view(found, width=_width(), everything=everything))
        for name, answer in found.unable.items():
            click.echo(Problem(f"host {name}: {answer.reason}", answer.hint).render(), err=True)
    return HOSTS_MISSING_EXIT if found.unable else 0


def _this_host(folders: Sequence[str], *, deep: bool) -> dict[str, Any]:
    from ..probe.answer import look

    return look(folders, deep=deep)


def _bench_here(hosts: ReachOptions, folders: Sequence[str]) -> dict[str, Any]:
    from ..bench.hosts import measure_hosts

    with _survey(hosts) as (survey, asked):
        (measured,) = _measure(survey, asked, folders, measure_hosts).values()
    return measured


def _ask_many(hosts: ReachOptions, folders: Sequence[str], *, deep: bool, bench: bool) -> ManyReports:
    from ..probe.many_hosts import ask_hosts

    with _survey(hosts) as (survey, asked):
        found = ask_hosts(survey, asked, paths=folders, deep=deep)
        if not bench:
            return found
        from ..bench.hosts import measure_hosts, measure_pairs

        there = [host for host in asked if host.name in found.reports]
        measured = _measure(survey, there, folders, measure_hosts)
        pairs = measure_pairs(survey, there, say=_say) if len(there) > 1 else []
    reports = {name: {**report, "measured": measured[name]} for name, report in found.reports.items()}
    return replace(found, reports=reports, pairs=pairs)


def _measure(survey: Survey, hosts: Sequence[HostSpec], folders: Sequence[str], measure: Any) -> dict[str, Any]:
    from ..bench.disk import CAP_BYTES

    return measure(survey, hosts, paths=folders or [os.getcwd()], cap_bytes=CAP_BYTES, say=_say)


def _say(what: str) -> None:
    click.echo(f"dsrun: measuring {what}", err=True)


@contextmanager
def _survey(hosts: ReachOptions) -> Generator[tuple[Survey, Sequence[HostSpec]]]:
    """Opens a survey to the hosts; where none are named, to this machine alone."""
    from ..hosts.spec import HostSpec
    from ..launch.host_placement import place
    from ..machine.proc_files import host_names
    from ..survey.client import Survey
    from ..transport.choice import ReachSettings, make_transport

    new_keys: deque[str] = deque()
    settings = ReachSettings(
        lease_s=_LEASE_S,
        connect_timeout_s=hosts.connect_timeout,
        start_timeout_s=hosts.start_timeout,
        ssh_config=hosts.ssh_config_path,
        announce=new_keys.append if hosts.accept_new_host_keys else None,
    )
    if hosts.are_given:
        placement = place(hosts.request(None), environ=os.environ, local_names=host_names(), device_count=lambda: 0)
        asked = placement.allocation.hosts
        way = make_transport(placement.transport, settings, local_hosts=placement.local_hosts)
    else:
        asked = (HostSpec(name=os.uname().nodename, slots=1, source="this machine"),)
        way = make_transport("local", settings)
    with closing(way), Survey(asked, way, python=sys.executable, first_word_s=settings.first_word_s) as survey:
        for line in new_keys:
            click.echo(f"dsrun: {line}", err=True)
        yield survey, asked


def _print(lines: Iterable[str]) -> None:
    # click takes colours out where there is no terminal; where they are not wanted, we do.
    colour = False if os.environ.get("NO_COLOR") else None
    for line in lines:
        click.echo(line, color=colour)


def _width() -> int:
    return min(_WIDEST, shutil.get_terminal_size((80, 24)).columns)


def _watch(hosts: ReachOptions, *, interval_s: float, as_json: bool) -> None:
    from ..probe.watch_loop import take_samples, watch
    from ..probe.watch_text import watch_lines

    with ExitStack() as stack:
        survey, _ = stack.enter_context(_survey(hosts))
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
    "Where": tuple(ReachOptions.__dataclass_fields__),
    "What": ("everything", "deep", "bench", "paths", "watch", "as_json", "help"),
}
