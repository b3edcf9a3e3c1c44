"""Whether every two hosts of a job reach each other, where all reach the first: Gloo connects each rank with each.

A firewall between two racks, or one host that lets nothing in, shows here in seconds and not as a time-out of the
rendezvous half an hour later. Asks; what follows is the caller's.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..hosts.spec import HostSpec
from ..survey.client import HostAnswer, NoAnswer, Survey
from .address import HostLinks
from .reachability import ANSWER_PATIENCE_S, following

#: For all of them: a busy host may take a while to say its word, and is not to be refused for it.
_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CutOff:
    """A host that others do not reach.

    Attributes:
        host: its name.
        address: address at which the others tried to reach the host.
        by: names of the hosts that did not reach it, in rank order; empty where the host itself did not answer.
        reason: reason why the host was not reached, in words.
    """

    host: str
    address: str
    by: tuple[str, ...]
    reason: str


def cut_off_hosts(survey: Survey, hosts: Sequence[HostSpec], found: HostLinks) -> list[CutOff]:
    """Lets every host try all others at the addresses by which they reached the first one.

    Args:
        survey: open to all of them.
        hosts: hosts of the job, in rank order.
        found: address where the hosts meet, and the address that each other host has on the way there.

    Returns:
        who is not reached by whom, by host and reason; empty if every two hosts reach each other.
    """
    names = [host.name for host in hosts]
    if len(names) < 3:  # both ways of two hosts go through one connection
        return []
    words = {name: secrets.token_hex(8) for name in found.ends}
    heard = survey.ask(
        "listen_at",
        lambda host: {"word": words[host.name], "address": found.ends[host.name]},
        host_names=list(found.ends),
    )
    targets = {
        name: {"address": found.ends[name], "port": answer.value, "word": words[name]}
        for name, answer in heard.items()
        if isinstance(answer, HostAnswer)
    }
    tried = {name: [other for other in following(names, name) if other in targets] for name in names}
    answers = survey.ask(
        "reach",
        lambda host: {"targets": [targets[other] for other in tried[host.name]], "patience_s": _PATIENCE_S},
        host_names=names,
        patience_s=_PATIENCE_S + ANSWER_PATIENCE_S,
    )
    said = [(name, answer) for told in (heard, answers) for name, answer in told.items()]
    missed: dict[tuple[str, str], list[str]] = {
        (name, answer.reason): [] for name, answer in said if isinstance(answer, NoAnswer)
    }
    for name, answer in answers.items():
        ways: Sequence[Mapping[str, Any]] = answer.value if isinstance(answer, HostAnswer) else ()
        for other, way in zip(tried[name], ways, strict=False):
            if "fault" in way:
                missed.setdefault((other, str(way["fault"])), []).append(name)
    return [
        CutOff(host=name, address=found.ends.get(name, found.meeting.address), by=tuple(by), reason=reason)
        for (name, reason), by in missed.items()
    ]
