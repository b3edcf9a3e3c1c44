"""`dsrun config`: looks at training configs, starting nothing. Only shows: the rules stand in dsrun.config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dsrun.errors import ConfigError, UsageError

from ..masking import Masker

if TYPE_CHECKING:
    from dsrun.config.findings import Finding

_WORLD_SIZE = click.option(
    "-w", "--world-size", type=click.IntRange(min=1), metavar="N", help="Also solve the batch sizes for N ranks."
)


@click.group("config")
def command() -> None:
    """Look at training configs without starting anything."""


@command.command("check")
@_WORLD_SIZE
@click.option("-H", "--hostfile", type=click.Path(), metavar="FILE", help="Take the number of ranks from a hostfile.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON, for CI and editors.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
def check(files: tuple[str, ...], world_size: int | None, hostfile: str | None, as_json: bool) -> int:
    """Check training configs; exit code 2 if any is refused.

    Errors go to stderr, all of them; so do warnings (a key without effect) and notes (a default that differs from
    DeepSpeed's). stdout gets one line for each config that is fine.
    """
    from dsrun.config.findings import Severity, errors_of, to_json

    ranks = _world_size(world_size, hostfile)
    findings = {file: _findings(file, world_size=ranks) for file in files}
    refused = {file for file, found in findings.items() if errors_of(found) is not None}
    if as_json:
        report = [
            {"file": file, "ok": file not in refused, "findings": [to_json(finding) for finding in found]}
            for file, found in findings.items()
        ]
        click.echo(json.dumps(report, indent=2))
        return ConfigError.exit_code if refused else 0
    for file, found in findings.items():
        for finding in found:
            if finding.severity is not Severity.ERROR:
                click.echo(finding.render(), err=True)
        if file not in refused:
            click.echo(f"{file}: ok")
    error = errors_of([finding for found in findings.values() for finding in found])
    if error is not None:
        raise error
    return 0


@command.command("show")
@_WORLD_SIZE
@click.option("--diff-defaults", is_flag=True, help="Leave out values that equal the default.")
@click.option("--json", "as_json", is_flag=True, help="Print a config with these values, ready to be loaded.")
@click.argument("file", metavar="FILE")
def show(file: str, world_size: int | None, diff_defaults: bool, as_json: bool) -> int:
    """Show what a config comes to: every value that matters, and where it comes from."""
    from dsrun.config.load import load
    from dsrun.config.show.migrate import dump
    from dsrun.config.show.resolved import document, rows
    from dsrun.config.text.tree import show as shown

    config = load(file, world_size=world_size)
    if as_json:
        click.echo(dump(document(config, diff_defaults=diff_defaults)), nl=False)
        return 0
    table = [
        (
            row.path,
            shown(Masker().value({row.path: row.value})[row.path]),
            str(row.source) + (f"; DeepSpeed: {row.differs}" if row.differs else ""),
        )
        for row in rows(config, diff_defaults=diff_defaults)
    ]
    for line in _columns(table):
        click.echo(line)
    return 0


@command.command("explain")
@click.argument("key", required=False, metavar="[KEY]")
def explain(key: str | None) -> int:
    """Say what a key means; without KEY, list the top-level ones.

    KEY is a dotted path, or the end of one: `stage` finds `zero_optimization.stage`.
    """
    from dsrun.config.show.explain import explain as explanation
    from dsrun.config.show.explain import find, overview

    if key is None:
        click.echo(overview())
        return 0
    click.echo("\n\n".join(explanation(found) for found in find(key)))
    return 0


@command.command("schema")
def schema() -> int:
    """Print the JSON Schema of a config, for editors."""
    from dsrun.config.show.json_schema import json_schema

    click.echo(json.dumps(json_schema(), indent=1))
    return 0


@command.command("migrate")
@click.argument("file", metavar="FILE")
def migrate(file: str) -> int:
    """Rewrite an old config with today's names and values.

    The new config goes to stdout, with the changes as a comment inside; what only you can mend goes to stderr, with
    exit code 2.
    """
    from dsrun.config.findings import errors_of
    from dsrun.config.show.migrate import migrate as migrated

    result = migrated(file)
    click.echo(result.text, nl=False)
    error = errors_of(result.left)
    if error is not None:
        raise error
    return 0


def _findings(file: str, *, world_size: int | None) -> tuple[Finding, ...]:
    from dsrun.config.findings import unreadable
    from dsrun.config.load import inspect

    try:
        return inspect(file, world_size=world_size).findings
    except ConfigError as error:
        return unreadable(error, file)


def _world_size(world_size: int | None, hostfile: str | None) -> int | None:
    if hostfile is None:
        return world_size
    if world_size is not None:
        raise UsageError("`--world-size` and `--hostfile` both say how many ranks there are; expected one")
    from ..hosts.hostfile import read_hostfile

    return sum(host.slots for host in read_hostfile(Path(hostfile)))


def _columns(table: list[tuple[Any, ...]]) -> list[str]:
    """Aligns all columns but the last."""
    widths = [max((len(str(cell)) for cell in column), default=0) for column in zip(*table, strict=True)]
    padded = [[str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)] for row in table]
    return ["  ".join(row).rstrip() for row in padded]
