"""Which hosts differ in what NCCL talks over, or may not use it: RDMA ports, GID indices, locked memory. Pure.

Where ranks meet is found by trying, see rendezvous; what stands here cannot be tried before ranks run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..hosts.spec import HostSpec
from ..machine.verdict import Context
from ..machine.verdicts.limits import locked_memory_verdicts
from ..machine.verdicts.rdma import efa_verdicts
from .facts import HostFacts
from .findings import Fault, Finding, Requirements, faults, fold
from .versions import groups, in_words

_GID_INDEX = "NCCL_IB_GID_INDEX"
#: From this NCCL on each host finds its own entry of the table.
_FINDS_GID = (2, 21)


def judge_network(
    specs: Mapping[str, HostSpec], facts: Mapping[str, HostFacts], wants: Requirements, *, on_gpus: bool, count: int
) -> Iterator[Finding]:
    """Yields what is wrong, or not alike.

    Args:
        specs: hosts that answered, as the user described them, by name.
        facts: facts of the hosts that answered, by name, in rank order.
        wants: needs that the job has of its hosts.
        on_gpus: its ranks talk over NCCL, as far as anybody knows.
        count: number of all hosts of the job.
    """
    uses_rdma = on_gpus and count > 1
    yield from fold("memlock", {name: _memlock_faults(its, uses_rdma=uses_rdma) for name, its in facts.items()}, count)
    if uses_rdma:
        yield from fold("EFA", {name: _efa_faults(its) for name, its in facts.items()}, count)
        yield from _ports(facts)
        yield from _gid_indices(specs, facts, wants)


def _memlock_faults(facts: HostFacts, *, uses_rdma: bool) -> Iterator[Fault]:
    context = Context(takes_rdma=uses_rdma and facts.no_sockets is not None)
    return faults(locked_memory_verdicts(facts.limits, has_cards=bool(facts.ports), context=context))


def _efa_faults(facts: HostFacts) -> Iterator[Fault]:
    plugin, variables = facts.net_plugin, facts.net_variables
    return faults(efa_verdicts(facts.rdma, net_plugin=plugin, variables=variables, context=Context(crosses_hosts=True)))


def _ports(facts: Mapping[str, HostFacts]) -> Iterator[Finding]:
    """Tells of hosts with other working ports than most, or none."""
    parts = groups({name: _ports_in_words(its) for name, its in facts.items()})
    if len(parts) < 2:
        return
    odd = tuple(name for _, names in parts[1:] for name in names)
    ways = {its.no_sockets is None for its in facts.values()}
    worse = "; NCCL takes sockets on some and RDMA on others, which do not find each other" if len(ways) > 1 else ""
    yield Finding(
        verdict="amber",
        name="RDMA",
        text=in_words([(text, names) for text, names in parts]) + worse,
        hosts=odd,
        fix="`dsrun probe -H ...` shows ports and their state: check cables and switch, or leave the host out with "
        "`--exclude`",
    )


def _ports_in_words(facts: HostFacts) -> str:
    words = [
        f"{port.kind or 'unknown'}{'' if port.rate_gbit is None else f' {port.rate_gbit:g} Gbit/s'}"
        for port in facts.ports
    ]
    listed = ", ".join(f"{words.count(word)} x {word}" for word in sorted(set(words)))
    return f"{listed}{'' if facts.no_sockets else ' (not taken by NCCL)'}" if listed else "no port that works"


def _gid_indices(
    specs: Mapping[str, HostSpec], facts: Mapping[str, HostFacts], wants: Requirements
) -> Iterator[Finding]:
    """Tells of RoCE hosts whose entry of the table of addresses is not the one that NCCL will take."""
    indices = {
        name: found
        for name, its in facts.items()
        if (
            found := tuple(
                sorted({port.gid_index for port in its.ports if port.kind == "RoCE" and port.gid_index is not None})
            )
        )
    }
    said = {name: specs[name].env.get(_GID_INDEX, wants.nccl.get(_GID_INDEX)) for name in indices}
    wrong = {
        name: its
        for name, its in indices.items()
        if (asked := said[name]) not in (None, "-1") and its != (_number(asked),)
    }
    odd: tuple[str, ...] = tuple(wrong)
    reason = f"and {_GID_INDEX} names another" if wrong else ""
    parts = groups(indices)
    if not wrong and len(parts) > 1 and any(_is_older(facts[name].versions.nccl) for name in indices):
        odd = tuple(name for _, names in parts[1:] for name in names)
        reason = "and NCCL before 2.21 takes one for all"
    if odd:
        shown = in_words([(f"GID index {', '.join(map(str, its))}", names) for its, names in parts])
        yield Finding(
            verdict="amber",
            name="RoCE",
            text=f"RoCE v2 over IPv4 is {shown}, {reason}",
            hosts=odd,
            fix="; ".join(f"`env.{_GID_INDEX}={indices[name][0]}` for {name} in the hostfile" for name in odd[:4]),
        )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.strip().isdecimal() else None


def _is_older(nccl: str | None) -> bool:
    """Whether a version is known, and one that needs to be told the index."""
    numbers = [int(part) for part in (nccl or "").split(".")[:2] if part.isdecimal()]
    return len(numbers) == 2 and tuple(numbers) < _FINDS_GID
