"""`dsrun doctor`: is this machine fit for jobs? Only shows: what is looked at stands in ../doctor_checks.py."""

from __future__ import annotations

import os
import sys

import click

from ..doctor_checks import Finding, examine, is_well, to_json
from ..output import wants_colour

_COLOURS = {"green": "32", "amber": "33", "red": "31"}


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of lines.")
def command(as_json: bool) -> int:
    """Check this machine: torch, a trial job of two ranks, shared memory, limits, state folder.

    Takes a few seconds. The exit code is 1 if something is red, that is, if jobs would fail.
    """
    findings = examine(os.environ)
    if as_json:
        click.echo(to_json(findings))
    else:
        colour = wants_colour(os.environ, is_terminal=sys.stdout.isatty())
        width = max(len(found.name) for found in findings)
        for found in findings:
            for line in _lines(found, width, colour=colour):
                click.echo(line, color=True)
    return 0 if is_well(findings) else 1


def _lines(found: Finding, width: int, *, colour: bool) -> list[str]:
    word = f"{found.verdict:<5}"
    shown = f"\x1b[{_COLOURS[found.verdict]}m{word}\x1b[0m" if colour else word
    lines = [f"{shown}  {found.name:<{width}}  {found.text}"]
    return lines if found.fix is None else [*lines, f"{'':5}  {'':{width}}  fix: {found.fix}"]
