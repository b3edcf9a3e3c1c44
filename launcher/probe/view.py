"""Everything `dsrun probe` shows of one host, or of many: tables, the matrix of GPUs, what is wrong. Prints nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..bench.rows import measured_rows, pair_rows, slow_gpus, slow_verdicts
from ..machine.topology import Topology, TopologyNode
from ..table_rows import Row, RowKind
from .rows import rows_of
from .table import fold_verdicts, host_lines, many_lines, verdict_lines
from .topology_text import legend_lines, topology_lines

if TYPE_CHECKING:
    from .many_hosts import ManyReports


def host_view(report: Mapping[str, Any], *, width: int, everything: bool) -> Iterator[str]:
    """Yields the lines about one host.

    Args:
        report: its JSON form.
        width: columns of the terminal; the matrix alone may be wider.
        everything: whether lines that are not needed every day are there too.
    """
    rows = [*rows_of(report, everything=everything), *measured_rows(report["measured"])]
    yield from host_lines(rows, width=width)
    if len(report["gpus"]) > 1:
        yield from _paragraph(_matrix(report["topology"], everything=everything))
    yield from _paragraph(verdict_lines(_verdicts(report), width=width, notes=everything))


def hosts_view(found: ManyReports, *, width: int, everything: bool) -> Iterator[str]:
    """Yields the lines about many hosts, those that did not answer left out.

    Args:
        found: reports of the hosts, and the differences between them.
        width: columns of the terminal.
        everything: whether rows that are not needed every day, and rows that differ by nature, are there too.
    """
    rows = {name: list(_rows(found, name, everything=everything)) for name in found.reports}
    if rows:
        yield from many_lines(rows, width=width, own=everything)
    yield from _paragraph(host_lines(list(pair_rows(found.pairs)), width=width))
    measured = {name: report["measured"] for name, report in found.reports.items() if report["measured"]}
    verdicts = [
        *({"level": one.verdict, "text": f"{one.name}: {one.text}", "fix": one.fix} for one in found.findings),
        *slow_verdicts(measured, found.pairs),
        *fold_verdicts(
            {
                name: [one for one in _verdicts(report) if not found.is_found(name, one["text"])]
                for name, report in found.reports.items()
            }
        ),
    ]
    yield from _paragraph(verdict_lines(verdicts, width=width, notes=everything))


def _verdicts(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*slow_gpus(report["measured"]), *report["verdicts"]]


def _rows(found: ManyReports, name: str, *, everything: bool) -> Iterator[Row]:
    first, *rest = rows_of(found.reports[name], everything=everything)
    yield first
    if name in found.clocks:
        offset_s, doubt_s = found.clocks[name]
        text = f"{offset_s * 1000:+.1f} ms ± {doubt_s * 1000:.1f}"
        yield Row("host", "clock", text, RowKind.NOW, order=offset_s)
    yield from rest
    yield from measured_rows(found.reports[name]["measured"])


def _matrix(topology: Mapping[str, Any], *, everything: bool) -> list[str]:
    """Draws who reaches whom: GPUs, and with `everything` network cards too, which makes it wider than a terminal."""
    nodes = tuple(TopologyNode(**node) for node in topology["nodes"])
    kept = [index for index, node in enumerate(nodes) if everything or node.label.startswith("GPU")]
    paths = tuple(tuple(topology["paths"][row][column] for column in kept) for row in kept)
    parts: dict[str, Any] = {"nodes": tuple(nodes[index] for index in kept), "paths": paths}
    value = Topology(**{**topology, **parts})
    return [*topology_lines(value), "", *legend_lines(value)]


def _paragraph(lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield ""
        yield from lines
