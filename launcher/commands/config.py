"""`dsrun config`: says what is wrong with a training config, starting nothing. The rules stand in dsrun.config."""

from __future__ import annotations

from pathlib import Path

import click

from dsrun.errors import ConfigError, Problem


@click.group("config")
def command() -> None:
    """Look at training configs without starting anything."""


@command.command("check")
@click.option(
    "-w", "--world-size", type=click.IntRange(min=1), metavar="N", help="Also solve the batch sizes for N ranks."
)
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
def check(files: tuple[str, ...], world_size: int | None) -> int:
    """Check training configs; exit code 2 if any is refused.

    Errors go to stderr, all of them; so do warnings (a key without effect) and notes (a default that differs from
    DeepSpeed's). stdout gets one line for each config that is fine.
    """
    problems: list[Problem] = []
    for file in files:
        problems += _check_one(Path(file), world_size=world_size)
    if problems:
        raise ConfigError.of(problems)
    return 0


def _check_one(path: Path, *, world_size: int | None) -> tuple[Problem, ...]:
    from dsrun.config.findings import Severity, errors_of
    from dsrun.config.load import inspect

    try:
        findings = inspect(path, world_size=world_size).findings
    except ConfigError as error:
        return error.problems
    for finding in findings:
        if finding.severity is not Severity.ERROR:
            click.echo(finding.render(), err=True)
    errors = errors_of(findings)
    if errors is not None:
        return errors.problems
    click.echo(f"{path}: ok")
    return ()
