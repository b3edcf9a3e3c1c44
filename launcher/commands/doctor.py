"""`dsrun doctor`: is this machine, or each of many, fit for jobs? Shows what preflight found."""

from __future__ import annotations

import json
import os
import sys
from collections import deque

import click

from dsrun.errors import PreflightError

from ..console.printer import wants_colour
from ..options.hosts import ReachOptions, reach_options
from ..options.types import parse_path
from ..preflight.doctor import Finding, examine, is_well, to_json
from ..preflight.findings import Requirements

_COLOURS = {"green": "32", "amber": "33", "red": "31"}


@click.command("doctor")
@reach_options
@click.option("--iface", metavar="NAME", help="Hosts must meet on this network.")
@click.option("--workdir", type=parse_path, metavar="DIR", help="Look for this working folder on every host too.")
@click.option(
    "--path",
    "paths",
    type=parse_path,
    multiple=True,
    metavar="DIR",
    help="Look for room there on every host. Repeatable.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of lines.")
def command(hosts: ReachOptions, iface: str | None, workdir: str | None, paths: tuple[str, ...], as_json: bool) -> int:
    """Check this machine: torch, a trial job of two ranks, shared memory, limits, state folder.

    Takes a few seconds. The exit code is 1 if something is red, that is, if jobs would fail.

    With -H, compare hosts as before a job: what is wrong, what is not alike, and whether they can meet. The exit code
    is 75 if a job would be refused.
    """
    colour = not as_json and wants_colour(os.environ, is_terminal=sys.stdout.isatty())
    wants = Requirements(
        folder=None if workdir is None else os.path.abspath(workdir),
        iface=iface,
        paths=tuple(map(os.path.abspath, paths)),
    )
    if hosts.are_given or wants != Requirements():
        return _check_hosts(hosts, wants, as_json=as_json, colour=colour)
    findings = examine(os.environ)
    if as_json:
        click.echo(to_json(findings))
    else:
        width = max(len(found.name) for found in findings)
        for found in findings:
            for line in _lines(found, width, colour=colour):
                click.echo(line, color=True)
    return 0 if is_well(findings) else 1


def _check_hosts(hosts: ReachOptions, wants: Requirements, *, as_json: bool, colour: bool) -> int:
    from ..preflight.named_hosts import examine_hosts
    from ..preflight.text import describe, preflight_json

    new_keys: deque[str] = deque()
    preflight = examine_hosts(
        hosts.request(None),
        wants,
        environ=os.environ,
        ssh_config=hosts.ssh_config_path,
        connect_timeout_s=hosts.connect_timeout,
        start_timeout_s=hosts.start_timeout,
        announce=new_keys.append if hosts.accept_new_host_keys else None,
    )
    for line in new_keys:
        click.echo(f"dsrun: {line}", err=True)
    if as_json:
        click.echo(json.dumps(preflight_json(preflight), indent=2))
    else:
        for line in describe(preflight, colour=colour):
            click.echo(line, color=True)
    return PreflightError.exit_code if preflight.is_red else 0


def _lines(found: Finding, width: int, *, colour: bool) -> list[str]:
    word = f"{found.verdict:<5}"
    shown = f"\x1b[{_COLOURS[found.verdict]}m{word}\x1b[0m" if colour else word
    lines = [f"{shown}  {found.name:<{width}}  {found.text}"]
    return lines if found.fix is None else [*lines, f"{'':5}  {'':{width}}  fix: {found.fix}"]
