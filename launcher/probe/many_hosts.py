"""Asks many hosts for their reports and compares them, once. Compares by preflight's rules; draws nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..hosts.spec import HostSpec
from ..machine.report import SCHEMA_VERSION
from ..preflight.findings import AnsweredHost, Finding, Preflight, Requirements, text_of_hosts
from ..preflight.run import check_hosts
from ..survey.client import HostAnswer, NoAnswer, Survey

#: For a report: a driver may take seconds to wake up.
_PATIENCE_S = 30.0
#: Torch is imported from a disk on the network, and CUDA started on eight GPUs.
_DEEP_PATIENCE_S = 90.0
#: What preflight says of one host alone is in the host's own verdicts.
_OF_ONE_HOST = frozenset({"host", "disk", "/dev/shm", "memlock", "nofile", "GPU driver", "GPU use"})
#: The same, where it is no difference between hosts.
_ALSO_OF_ONE_HOST = frozenset({"torch", "CUDA"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ManyReports:
    """What hosts said.

    Attributes:
        hosts: all of them, in rank order.
        reports: reports of the hosts that answered, by host name.
        unable: reason why there is no answer, by host name, for each host that did not answer.
        findings: differences between the hosts, the worst first.
        clocks: seconds by which each host's clock is ahead of this one, and the possible error in seconds, by host
            name.
        pairs: figures of the ways between hosts, where they were measured.
    """

    hosts: tuple[str, ...]
    reports: Mapping[str, dict[str, Any]]
    unable: Mapping[str, NoAnswer]
    findings: tuple[Finding, ...]
    clocks: Mapping[str, tuple[float, float]]
    pairs: Sequence[Mapping[str, Any]] = field(default_factory=tuple)

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON values: a host's report stands as it would be told there, or `error` and `hint`."""
        return {
            "schema_version": SCHEMA_VERSION,
            "hosts": {name: self._host(name) for name in self.hosts},
            "clocks": {
                name: {"offset_s": round(offset_s, 6), "doubt_s": round(doubt_s, 6)}
                for name, (offset_s, doubt_s) in self.clocks.items()
            },
            "verdicts": [
                {"level": one.verdict, "name": one.name, "text": one.text, "fix": one.fix, "hosts": list(one.hosts)}
                for one in self.findings
            ],
            "pairs": list(self.pairs),
        }

    def is_found(self, name: str, text: str) -> bool:
        """Whether a finding says of a host, and maybe of others too, what the host says of itself.

        Args:
            name: name of the host.
            text: sentence of one of the host's own verdicts.
        """
        count = len(self.hosts)
        return any(name in one.hosts and text_of_hosts(one, count) == text for one in self.findings)

    def _host(self, name: str) -> dict[str, Any]:
        if name in self.reports:
            return self.reports[name]
        return {"error": self.unable[name].reason, "hint": self.unable[name].hint}


def ask_hosts(survey: Survey, hosts: Sequence[HostSpec], *, paths: Sequence[str], deep: bool) -> ManyReports:
    """Asks all hosts at once.

    Args:
        survey: open to all of them.
        hosts: hosts to ask; not empty.
        paths: folders a job uses beside its working folder.
        deep: load torch there, and say what was loaded.
    """
    patience_s = _DEEP_PATIENCE_S if deep else _PATIENCE_S
    answers = survey.ask("probe", {"paths": list(paths), "deep": deep}, patience_s=patience_s)
    checked = check_hosts(survey, hosts, Requirements())
    return ManyReports(
        hosts=tuple(host.name for host in hosts),
        reports={name: answer.value for name, answer in answers.items() if isinstance(answer, HostAnswer)},
        unable={name: answer for name, answer in answers.items() if isinstance(answer, NoAnswer)},
        findings=compared(checked),
        clocks={
            name: (its.clock_offset_s, its.clock_doubt_s)
            for name, its in checked.seen.items()
            if isinstance(its, AnsweredHost)
        },
    )


def compared(checked: Preflight) -> tuple[Finding, ...]:
    """Returns those of preflight's findings that are about several hosts."""
    count = len(checked.seen)
    return tuple(
        finding
        for finding in checked.findings
        if finding.name not in _OF_ONE_HOST
        and not (finding.name in _ALSO_OF_ONE_HOST and text_of_hosts(finding, count) is not None)
    )
