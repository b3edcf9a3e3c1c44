"""Has hosts measure themselves, and the ways between them: who measures when. The measuring is done there (bench_*).

Hosts measure one thing after another, so that copies to a GPU do not stand in the way of a disk; all hosts do it at
once. Between hosts each pair is measured once, in rounds in which every host is in one pair at most.
"""

from __future__ import annotations

import secrets
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .bench_gpu import PATIENCE_S as GPU_PATIENCE_S
from .bench_values import Figure, figure_text, median_text
from .hosts import HostSpec
from .survey import Answer, Survey, Told
from .table_rows import Row, RowKind

#: A stuck disk is told, not waited for.
_PATIENCE_S = 60.0
_PAIR_PATIENCE_S = 30.0
_PAIR_REPETITION_S = 0.2
#: Told one by one; 64 hosts have 2,016.
_MOST_PAIRS = 10
#: Of what hosts usually reach: with less, one host holds up all others.
_SLOW = 0.7

#: A host's figures by what was measured, as `measured` of its report.
Measured = dict[str, Any]


def measure_hosts(
    survey: Survey, hosts: Sequence[HostSpec], *, paths: Sequence[str], cap_bytes: int, say: Callable[[str], None]
) -> dict[str, Measured]:
    """Has every host measure memory, disks and what torch runs on.

    Args:
        survey: open to all of them.
        hosts: who measures; those that cannot be asked any more say why.
        paths: folders whose disks are measured.
        cap_bytes: longest file that is written there.
        say: told what is measured next.

    Returns:
        by host: `memory`, `disk` and `gpu`, each a list of objects with `figures`, or with `error` and `hint`.
    """
    names = [host.name for host in hosts]
    found: dict[str, Measured] = {name: {"memory": [], "disk": [], "gpu": []} for name in names}

    def ask(group: str, question: str, arguments: Mapping[str, Any], patience_s: float) -> None:
        for name, answer in survey.ask(question, arguments, of=names, patience_s=patience_s).items():
            found[name][group].append({**arguments, **_result(answer)})

    say("memory copies")
    ask("memory", "bench_memory", {}, _PATIENCE_S)
    for path in paths:
        say(f"the disk at {path}")
        ask("disk", "bench_disk", {"path": path, "cap_bytes": cap_bytes}, _PATIENCE_S)
    say("torch: copies and matrix products")
    ask("gpu", "bench_gpu", {}, GPU_PATIENCE_S + _PATIENCE_S)
    return found


def measure_pairs(survey: Survey, hosts: Sequence[HostSpec], *, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Has every two hosts measure the way between them.

    Args:
        survey: open to all of them.
        hosts: who measures; those that cannot be asked any more are left out.
        say: told of each round.

    Returns:
        for each pair: `to`, which listened, `from`, which drove, and `address` with `figures`, or `error` with `hint`.
    """
    names = [host.name for host in hosts if host.name not in survey.unreached()]
    words = {"word": secrets.token_hex(16), "key": secrets.token_hex(16)}
    offers = survey.ask("bench_listen", words, of=names)
    results: list[dict[str, Any]] = []
    rounds = list(rounds_of(names))
    for number, pairs in enumerate(rounds, start=1):
        say(f"ways between hosts, round {number} of {len(rounds)}")
        targets = {driver: listener for listener, driver in pairs if isinstance(offers[listener], Told)}
        known = {driver: _told(offers[listener])["offers"] for driver, listener in targets.items()}
        answers = survey.ask(
            "bench_reach",
            lambda host, known=known: {**words, "offers": known[host.name], "repetition_s": _PAIR_REPETITION_S},
            of=list(targets),
            patience_s=_PAIR_PATIENCE_S,
        )
        for listener, driver in pairs:
            answer = answers[driver] if driver in answers else offers[listener]
            results.append({"to": listener, "from": driver, **_result(answer)})
    return results


def rounds_of(names: Sequence[str]) -> Iterator[list[tuple[str, str]]]:
    """Yields rounds of disjoint pairs, in which every two names meet once (the circle method)."""
    circle: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(one, other) for one, other in pairs if one is not None and other is not None]
        circle[1:] = [circle[-1], *circle[1:-1]]


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
    ways = [(pair, Figure.from_json(pair["figures"][1])) for pair in pairs if "figures" in pair]
    usual = statistics.median(rate.median for _, rate in ways) if ways else 0.0
    for pair, rate in ways:
        if len(ways) > 2 and rate.median < _SLOW * usual:
            text = f"the way between them: {median_text(rate)}, others reach {_median_of(rate, usual)}"
            yield _slow(text, [pair["from"], pair["to"]])


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


def _result(answer: Answer) -> dict[str, Any]:
    if not isinstance(answer, Told):
        return {"error": answer.reason, "hint": answer.hint}
    return answer.value if isinstance(answer.value, dict) else {"figures": answer.value}


def _told(answer: Answer) -> Any:
    assert isinstance(answer, Told), "only hosts that listen are driven at"
    return answer.value
