"""`dsrun nvme`: looks at disks that offload is to use. Only shows: nvme_sweep measures."""

from __future__ import annotations

import json

import click

from dsrun.units import format_duration

_GIB = 1 << 30


@click.group("nvme")
def command() -> None:
    """Look at disks for offload."""


@command.command("bench")
@click.option(
    "--size", default=1.0, type=click.FloatRange(min=0, min_open=True), metavar="GIB", help="Of the files [1 GiB]."
)
@click.option(
    "--seconds", default=25.0, type=click.FloatRange(min=0, min_open=True), metavar="S", help="To measure for [25]."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with every trial.")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
def bench(paths: tuple[str, ...], size: float, seconds: float, as_json: bool) -> int:
    """Find the fastest settings of the section `aio` for folders on NVMe drives, and print it.

    Writes and reads a file past the page cache, in at most a quarter of the free room; nothing stays behind. Several
    folders are striped over, as they are where `nvme_path` is a list.
    """
    from ..bench.nvme_sweep import sweep
    from ..bench.nvme_text import section, table, to_json

    click.echo(f"dsrun: measuring for about {format_duration(seconds)}", err=True)
    found = sweep(paths, size_bytes=int(size * _GIB), seconds=seconds)
    if as_json:
        click.echo(json.dumps(to_json(found), indent=2))
    else:
        click.echo(f"{table(found)}\n\n{section(found.best.settings)}")
    return 0
