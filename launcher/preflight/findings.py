"""What is wrong, or not alike, with the hosts of a job: facts of all of them -> findings. Values only; asks nobody.

The rules stand in `rules.py`, how findings are shown in `text.py`, and who asks the hosts in `run.py`.
All hosts are judged, and all problems told at once: a cluster that is repaired one error at a time is repaired all day.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dsrun.errors import DsrunError, PreflightError, Problem

from ..machine.verdict import ProbeVerdict
from ..rendezvous.address import RendezvousAddress
from ..survey.client import NoAnswer
from .facts import HostFacts

#: `red`: the job would fail, or do something else than was asked; `amber`: it may run, but worse or otherwise.
Verdict = Literal["amber", "red"]

#: A verdict, what is wrong on one host, and the way out.
Fault = tuple[Verdict, str, str]

#: Of more hosts than that the number is told; the JSON form has all names.
_MOST_NAMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """What a job needs of its hosts.

    Attributes:
        folder: its working folder, on every host; None leaves folders unlooked at.
        script: the file to run, absolute or from `folder`; None for a module or a program.
        is_python: the ranks run Python, so that torch must be there.
        on_gpus: each slot needs a GPU of its own; None if nobody knows: what is wrong with GPUs that are there is told
            then, and refuses nothing.
        paths: folders it writes to on every host (checkpoints, NVMe), absolute or from `folder`.
        iface: interfaces of the first host to meet at, `ib0` or `ib0,eth0`, the best first; None takes the fastest. See
            `choose_meeting`.
        nccl: variables for NCCL that all ranks get.
    """

    folder: str | None = None
    script: str | None = None
    is_python: bool = True
    on_gpus: bool | None = None
    paths: tuple[str, ...] = ()
    iface: str | None = None
    nccl: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredHost:
    """A host that answered.

    Attributes:
        facts: its answer.
        clock_offset_s: seconds that the host's clock is ahead of this one; negative where it is behind.
        clock_doubt_s: seconds by which `clock_offset_s` may be wrong: half of the time the answer was under way.
    """

    facts: HostFacts
    clock_offset_s: float
    clock_doubt_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong or not alike.

    Attributes:
        verdict: severity of the finding, `red` or `amber`.
        name: name of what was looked at, `disk` for example.
        text: sentence about what was found, with the hosts it was found on.
        hosts: names of the hosts concerned; for a difference, those in the minority.
        fix: the way out.
    """

    verdict: Verdict
    name: str
    text: str
    hosts: tuple[str, ...]
    fix: str


def faults(verdicts: Iterable[ProbeVerdict]) -> Iterator[Fault]:
    """Yields what a job is to be told of a host.

    Args:
        verdicts: verdicts of the rules of machine/verdicts on the host; notes are left out.
    """
    for verdict in verdicts:
        if verdict.level != "note":
            yield verdict.level, verdict.text, verdict.fix


def fold(name: str, faults: Mapping[str, Iterable[Fault]], count: int) -> Iterator[Finding]:
    """Yields each fault once, with all hosts that have it.

    Args:
        name: name of what was looked at, `disk` for example.
        faults: faults of each host, by its name, in rank order.
        count: number of all hosts of the job.
    """
    hosts_of: dict[Fault, list[str]] = {}
    for host, its in faults.items():
        for fault in its:
            hosts_of.setdefault(fault, []).append(host)
    for (verdict, text, fix), hosts in hosts_of.items():
        yield Finding(verdict=verdict, name=name, text=f"{named(hosts, count)}: {text}", hosts=tuple(hosts), fix=fix)


def text_of_hosts(finding: Finding, count: int) -> str | None:
    """Returns what `fold` was given of each host that a finding names; None of a difference between hosts.

    Args:
        finding: finding of a preflight.
        count: number of all hosts of the job.
    """
    names = f"{named(finding.hosts, count)}: " if finding.hosts else ""
    return finding.text.removeprefix(names) if names and finding.text.startswith(names) else None


def named(hosts: Sequence[str], count: int) -> str:
    """Names hosts, or counts them where they are many.

    Args:
        hosts: names of the hosts to name, in rank order.
        count: number of all hosts of the job.
    """
    if len(hosts) == count > 1:
        return "both hosts" if count == 2 else f"all {count} hosts"
    if len(hosts) > _MOST_NAMED:
        return f"{len(hosts)} hosts"
    *most, last = hosts
    return f"{', '.join(most)} and {last}" if most else last


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """What was found out about the hosts of a job before it started.

    Attributes:
        seen: every host in rank order: what it said, or why it said nothing.
        findings: red ones first.
        meeting: address where the job's ranks meet, and each host's way to it; None where that could not be found out.
        seconds: seconds that the preflight took.
    """

    seen: Mapping[str, AnsweredHost | NoAnswer]
    findings: tuple[Finding, ...]
    meeting: RendezvousAddress | None
    seconds: float

    @property
    def is_red(self) -> bool:
        """Whether the job cannot be started."""
        return bool(self._of("red"))

    def warnings(self) -> list[str]:
        """Returns what is to be said once before a job that starts all the same."""
        return [f"{finding.name}: {finding.text}; {finding.fix}" for finding in self._of("amber")]

    def error(self) -> DsrunError:
        """Returns the refusal, a `PreflightError` with every red finding as a problem of it; there must be one."""
        problems = [Problem(f"{finding.name}: {finding.text}", finding.fix) for finding in self._of("red")]
        return PreflightError.of(problems)

    def _of(self, verdict: Verdict) -> Sequence[Finding]:
        return [finding for finding in self.findings if finding.verdict == verdict]
