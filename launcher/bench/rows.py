"""Measured figures -> rows of a table, and which host or way between two is much slower than the others. Pure."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..table_rows import Row, RowKind
from .figure import Figure, figure_text, median_text

#: Told one by one; 64 hosts have 2,016.
_MOST_PAIRS = 10
#: Of what hosts usually reach: with less, one host holds up all others.
_SLOW = 0.7
#: `host to GPU 3`, and not `host to GPU, all 8 at once`.
_OF_ONE_GPU = re.compile(r"(.*GPU.*) ([0-9]+)")

Measured = Mapping[str, Sequence[Mapping[str, Any]]]


def measured_rows(measured: Measured) -> Iterator[Row]:
    """Yields a host's figures as rows of its table; why there are none where something could not be measured."""
    for group, results in measured.items():
        for result in results:
            if "path" in result:
                cached = "" if result.get("direct", True) else ", through the page cache: it refuses O_DIRECT"
                yield Row("measured", "disk at", result["path"] + cached)
            if "error" in result:
                yield Row("measured", group, f"none: {result['error']}")
            for one in map(Figure.from_json, result.get("figures", ())):
                yield Row("measured", one.name, figure_text(one), RowKind.NOW, median_text(one), one.median)


def pair_rows(pairs: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """Yields a row for each pair of hosts; of many pairs, the range of each figure, and those that failed."""
    many = len(pairs) > _MOST_PAIRS
    known: dict[str, list[tuple[Figure, str]]] = {}
    for pair in pairs:
        label = f"{pair['from']} - {pair['to']}"
        if "error" in pair:
            yield Row("between", label, pair["error"])
            continue
        figures = [Figure.from_json(value) for value in pair["figures"]]
        if not many:
            yield Row("between", label, ", ".join(map(median_text, figures)) + f" over {pair['address']}")
        for one in figures:
            known.setdefault(one.name, []).append((one, label))
    for name, found in known.items() if many else ():
        found.sort(key=lambda entry: entry[0].median)
        (low, lowest), (high, highest) = found[0], found[-1]
        middle = median_text(found[len(found) // 2][0])
        spread = f"{median_text(low)} ({lowest}) to {median_text(high)} ({highest})"
        yield Row("between", name, f"{middle}, from {spread}, {len(found)} pairs")


def slow_verdicts(measured: Mapping[str, Measured], pairs: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields a verdict for each host that is much slower than hosts usually are, and each way between two."""
    figures: dict[str, dict[str, Figure]] = {}
    for host, its in measured.items():
        for name, one in _figures(its):
            figures.setdefault(name, {})[host] = one
    for name, found in figures.items():
        usual = statistics.median(one.median for one in found.values())
        for host, one in found.items():
            if len(found) > 2 and one.median < _SLOW * usual:
                yield _slow(f"{name}: {median_text(one)}, hosts usually reach {_median_of(one, usual)}", [host])
    ways = [
        (pair, Figure.from_json(value)) for pair in pairs for value in pair.get("figures", ()) if value["unit"] == "B/s"
    ]
    usual = statistics.median(rate.median for _, rate in ways) if ways else 0.0
    for pair, rate in ways:
        if len(ways) > 2 and rate.median < _SLOW * usual:
            text = f"the way between them: {median_text(rate)}, others reach {_median_of(rate, usual)}"
            yield _slow(text, [pair["from"], pair["to"]])


def slow_gpus(measured: Measured) -> Iterator[dict[str, Any]]:
    """Yields a verdict for each GPU of one host that is much slower than the others there."""
    figures: dict[str, dict[str, Figure]] = {}
    for _, one in _figures(measured):
        match = _OF_ONE_GPU.fullmatch(one.name)
        if match is not None:
            figures.setdefault(match.group(1), {})[match.group(2)] = one
    for what, found in figures.items():
        usual = statistics.median(one.median for one in found.values())
        for number, one in found.items():
            if len(found) > 2 and one.median < _SLOW * usual:
                text = f"{what} {number}: {median_text(one)}, its neighbours usually reach {_median_of(one, usual)}"
                fix = "does something else run there? then look at its link, heat and power: `dsrun probe --all`"
                yield {"level": "amber", "text": text, "fix": fix}


def _slow(text: str, hosts: list[str]) -> dict[str, Any]:
    fix = "is something else running there? measure again; then compare hardware and settings: `dsrun probe --all`"
    return {"level": "amber", "text": text, "fix": fix, "hosts": hosts}


def _median_of(like: Figure, value: float) -> str:
    return median_text(replace(like, median=value))


def _figures(measured: Measured) -> Iterator[tuple[str, Figure]]:
    for results in measured.values():
        for result in results:
            place = f"{result['path']}: " if "path" in result else ""
            for value in result.get("figures", ()):
                one = Figure.from_json(value)
                yield place + one.name, one
