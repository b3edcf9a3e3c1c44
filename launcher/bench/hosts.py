"""Has hosts measure themselves, and the ways between them: who measures when. The measuring is done there (bench_*).

Hosts measure one thing after another, so that copies to a GPU do not stand in the way of a disk; all hosts do it at
once. Between hosts each pair is measured once, in rounds in which every host is in one pair at most.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..hosts.spec import HostSpec
from ..survey.client import Answer, HostAnswer, Survey
from .gpu import PATIENCE_S as GPU_PATIENCE_S

#: A stuck disk is told, not waited for.
_PATIENCE_S = 60.0
_PAIR_PATIENCE_S = 30.0
_PAIR_REPETITION_S = 0.2

#: A host's figures by what was measured, as `measured` of its report.
Measured = dict[str, Any]


def measure_hosts(
    survey: Survey, hosts: Sequence[HostSpec], *, paths: Sequence[str], cap_bytes: int, say: Callable[[str], None]
) -> dict[str, Measured]:
    """Has every host measure memory, disks and what torch runs on.

    Args:
        survey: open to all of them.
        hosts: hosts that measure; one that cannot be asked any more gets an `error` in the result.
        paths: folders whose disks are measured.
        cap_bytes: longest file that is written there.
        say: callback that gets a line about what is measured next.

    Returns:
        by host: `memory`, `disk` and `gpu`, each a list of objects with `figures`, or with `error` and `hint`.
    """
    names = [host.name for host in hosts]
    found: dict[str, Measured] = {name: {"memory": [], "disk": [], "gpu": []} for name in names}

    def ask(group: str, question: str, arguments: Mapping[str, Any], patience_s: float) -> None:
        for name, answer in survey.ask(question, arguments, host_names=names, patience_s=patience_s).items():
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
        hosts: hosts that measure; those that cannot be asked any more are left out.
        say: callback that gets a line at the start of each round.

    Returns:
        for each pair: `to`, which listened, `from`, which drove, and `address` with `figures`, or `error` with `hint`.
    """
    names = [host.name for host in hosts if host.name not in survey.unreached()]
    words = {"word": secrets.token_hex(16), "key": secrets.token_hex(16)}
    offers = survey.ask("bench_listen", words, host_names=names)
    results: list[dict[str, Any]] = []
    rounds = list(rounds_of(names))
    for number, pairs in enumerate(rounds, start=1):
        say(f"ways between hosts, round {number} of {len(rounds)}")
        targets = {driver: listener for listener, driver in pairs if isinstance(offers[listener], HostAnswer)}
        known = {driver: _told(offers[listener])["offers"] for driver, listener in targets.items()}
        answers = survey.ask(
            "bench_reach",
            lambda host, known=known: {**words, "offers": known[host.name], "repetition_s": _PAIR_REPETITION_S},
            host_names=list(targets),
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


def _result(answer: Answer) -> dict[str, Any]:
    if not isinstance(answer, HostAnswer):
        return {"error": answer.reason, "hint": answer.hint}
    return answer.value if isinstance(answer.value, dict) else {"figures": answer.value}


def _told(answer: Answer) -> Any:
    assert isinstance(answer, HostAnswer), "only hosts that listen are driven at"
    return answer.value
