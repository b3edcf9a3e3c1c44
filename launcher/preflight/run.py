"""Asks the hosts of a job what preflight judges, and where they can meet. Judges nothing itself; starts nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from dsrun.errors import PreflightError

from ..hosts.spec import HostSpec
from ..rendezvous.address import RendezvousAddress, find_meeting
from ..rendezvous.all_pairs import cut_off_hosts
from ..survey.client import HostAnswer, NoAnswer, Survey
from .facts import HostFacts
from .findings import AnsweredHost, Finding, Preflight, Requirements, named
from .rules import judge

#: A driver may take seconds to wake up, and a disk on the network to answer.
_FACTS_PATIENCE_S = 20.0


def check_hosts(survey: Survey, hosts: Sequence[HostSpec], wants: Requirements) -> Preflight:
    """Looks at all hosts of a job at once.

    Args:
        survey: open to all of them.
        hosts: hosts of the job, in rank order; not empty.
        wants: needs that the job has of its hosts.

    Returns:
        what was found, and where ranks meet: `choose_meeting` need not be called again.
    """
    began_s = time.monotonic()
    names = [host.name for host in hosts]
    asked = survey.ask("facts", lambda host: _question(host, wants), host_names=names, patience_s=_FACTS_PATIENCE_S)
    seen = {name: _seen(asked[name]) for name in names}
    meeting, not_met = _meet(survey, hosts, seen, wants)
    findings = [*not_met, *judge(hosts, seen, wants)]
    return Preflight(
        seen=seen,
        findings=tuple(sorted(findings, key=lambda finding: finding.verdict != "red")),
        meeting=meeting,
        seconds=time.monotonic() - began_s,
    )


def _question(host: HostSpec, wants: Requirements) -> dict[str, Any]:
    return {
        "folder": wants.folder,
        # The config is no file of theirs: what was checked here travels with the launch.
        "files": {} if wants.script is None else {"script": wants.script},
        "code": wants.is_python,
        "paths": list(wants.paths),
        "env": {**wants.nccl, **host.env},
    }


def _seen(answer: HostAnswer | NoAnswer) -> AnsweredHost | NoAnswer:
    """Reads an answer, and the host's clock from the four times of it, as NTP does."""
    if isinstance(answer, NoAnswer):
        return answer
    try:
        facts = HostFacts.from_json(answer.value)
    except (KeyError, TypeError, AttributeError) as error:
        # Facts are told by name, and another version of dsrun may have others.
        return NoAnswer(
            f"tells other facts of itself than this dsrun asks for ({error})", "install one dsrun on all hosts"
        )
    there_s, back_s = facts.asked_s - answer.asked_s, facts.answered_s - answer.answered_s
    under_way_s = (answer.answered_s - answer.asked_s) - (facts.answered_s - facts.asked_s)
    return AnsweredHost(facts=facts, clock_offset_s=(there_s + back_s) / 2, clock_doubt_s=max(0.0, under_way_s) / 2)


def _meet(
    survey: Survey, hosts: Sequence[HostSpec], seen: Mapping[str, AnsweredHost | NoAnswer], wants: Requirements
) -> tuple[RendezvousAddress | None, list[Finding]]:
    """Lets those hosts meet that can be asked; who does not answer is told anyway."""
    there = [host for host in hosts if isinstance(seen[host.name], AnsweredHost)]
    if not there or there[0] is not hosts[0]:
        return None, []
    try:
        found = find_meeting(survey, there, iface=wants.iface, env=wants.nccl)
    except PreflightError as error:
        return None, [
            Finding(
                verdict="red",
                name="network",
                text=problem.message,
                hosts=(there[0].name,),
                fix=problem.hint or "see the log of the host",
            )
            for problem in error.problems
        ]
    cut_off = [
        Finding(
            verdict="red",
            name="network",
            text=f"{one.host} is not reached by {named(one.by, len(there))} at {one.address} ({one.reason})"
            if one.by
            else f"{one.host}: {one.reason}",
            hosts=(one.host,),
            fix="let its firewall pass TCP from them, or put all hosts on one network and name it with `--iface`",
        )
        for one in cut_off_hosts(survey, there, found)
    ]
    return found.meeting if len(there) == len(hosts) else None, cut_off
