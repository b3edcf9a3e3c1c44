"""Which hosts a job takes, and which slots of each: hosts, filters and counts -> `Allocation`.

Pure: what this machine is called and how many GPUs it has are arguments. Nothing is narrowed silently: a filter or
count that asks for what is not there is refused, with everything else that is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dsrun.errors import HostfileError, Problem

from ..hosts.filter import NamedSlots, read_filter
from ..hosts.spec import Allocation, HostSpec
from .environment import RESERVED

_LOOPBACK = frozenset({"localhost", "localhost.localdomain", "127.0.0.1", "::1", "[::1]"})


def select(
    hosts: Sequence[HostSpec],
    *,
    include: str | None = None,
    exclude: str | None = None,
    nodes: int | None = None,
    ranks_per_host: int | None = None,
) -> Allocation:
    """Chooses hosts and slots.

    Args:
        hosts: hosts to choose from, in rank order; not empty.
        include: filter of what to take; None takes everything.
        exclude: filter of what to leave; None leaves nothing. Not beside `include`.
        nodes: number of hosts to take, the first of them; None takes all. Not beside a filter, as in DeepSpeed.
        ranks_per_host: number of slots to take on each host, the first of them; None takes all. Not beside a filter, as
            in DeepSpeed.

    Returns:
        the hosts left, in the order of `hosts`. Where a filter chose, every host carries the ids of its slots in
        `gpus`; otherwise what it had.

    Raises:
        HostfileError: carries every problem: options that exclude one another, unknown hosts and slots, nothing left,
            more hosts or slots asked for than there are, variables that are dsrun's to set.
    """
    problems = [*_conflicts(include, exclude, nodes, ranks_per_host), *_reserved_variables(hosts)]
    named: list[dict[int, NamedSlots]] = []
    for option, text in (("--include", include), ("--exclude", exclude)):
        try:
            named.append({} if text is None else read_filter(text, hosts, option=option))
        except HostfileError as error:
            problems += error.problems
    if problems:
        raise HostfileError.of(problems)
    included, excluded = named
    if include is not None:
        chosen = _take(hosts, included)
    elif exclude is not None:
        chosen = _leave(hosts, excluded)
        if not chosen:
            raise HostfileError(f"`--exclude {exclude}` leaves no slot", hint="exclude less, or use `--include`")
    else:
        chosen = _count_off(hosts, nodes=nodes, ranks_per_host=ranks_per_host)
    return Allocation(hosts=tuple(chosen))


def _conflicts(include: str | None, exclude: str | None, nodes: int | None, ranks: int | None) -> list[Problem]:
    problems: list[Problem] = []
    if include is not None and exclude is not None:
        problems.append(Problem("`--include` and `--exclude` cannot be used together", "use one of them"))
    for count, option in ((nodes, f"--nodes {nodes}"), (ranks, f"-n {ranks}")):
        if count is not None and (include is not None or exclude is not None):
            flag = "--include" if include is not None else "--exclude"
            hint = f"`{flag}` names the hosts and slots alone: leave `{option.partition(' ')[0]}` out"
            problems.append(Problem(f"`{option}` and `{flag}` cannot be used together", hint))
        if count is not None and count < 1:
            problems.append(Problem(f"`{option}`: expected 1 or more", "leave it out to take all"))
    return problems


def _reserved_variables(hosts: Sequence[HostSpec]) -> list[Problem]:
    """Finds variables that say who a worker is, once a line."""
    wrong = {(host.source, name): None for host in hosts for name in host.env if name in RESERVED}
    return [
        Problem(f"{source}: `env.{name}` is dsrun's to set", "use a name of your own, or the option that sets it")
        for source, name in wrong
    ]


def _take(hosts: Sequence[HostSpec], named: dict[int, NamedSlots]) -> list[HostSpec]:
    return [
        _with_slots(host, [slot for slot in host.slot_ids if named[index].whole or slot in named[index].slots])
        for index, host in enumerate(hosts)
        if index in named
    ]


def _leave(hosts: Sequence[HostSpec], named: dict[int, NamedSlots]) -> list[HostSpec]:
    left: list[HostSpec] = []
    nothing = NamedSlots(whole=False, slots=frozenset())
    for index, host in enumerate(hosts):
        out = named.get(index, nothing)
        slots = [slot for slot in host.slot_ids if not out.whole and slot not in out.slots]
        if slots:
            left.append(_with_slots(host, slots))
    return left


def _with_slots(host: HostSpec, slots: Sequence[int]) -> HostSpec:
    return replace(host, slots=len(slots), gpus=tuple(slots))


def _count_off(hosts: Sequence[HostSpec], *, nodes: int | None, ranks_per_host: int | None) -> list[HostSpec]:
    problems: list[Problem] = []
    if nodes is not None and nodes > len(hosts):
        there = "host is" if len(hosts) == 1 else "hosts are"
        problems.append(Problem(f"`--nodes {nodes}`: {len(hosts)} {there} there", f"use `--nodes {len(hosts)}`"))
    taken = list(hosts[:nodes])
    if ranks_per_host is not None:
        problems += [problem for host in taken if (problem := _too_few_slots(host, ranks_per_host)) is not None]
        taken = [_with_count(host, ranks_per_host) for host in taken]
    if problems:
        raise HostfileError.of(problems)
    return taken


def _too_few_slots(host: HostSpec, ranks: int) -> Problem | None:
    if ranks <= host.slots:
        return None
    return Problem(
        f"{host.source}: {ranks} ranks are asked for, host `{host.name}` has {host.slots} slots",
        f"use `-n {host.slots}` or raise `slots`",
    )


def _with_count(host: HostSpec, slots: int) -> HostSpec:
    return replace(host, slots=slots, gpus=None if host.gpus is None else host.gpus[:slots])


def select_local(
    *,
    ranks_per_host: int | None,
    device_count: int,
    include: str | None = None,
    exclude: str | None = None,
    nodes: int | None = None,
) -> Allocation:
    """Returns this machine as the only host, where no hostfile is given.

    Args:
        ranks_per_host: ranks asked for, which may be more than there are GPUs; None means one for each GPU, or one.
        device_count: GPUs the job may use.
        include: filter, in which this machine is `localhost` and has a slot for each GPU: `localhost:0,2`.
        exclude: the same, of what to leave.
        nodes: hosts asked for.

    Raises:
        HostfileError: as `select`, or `nodes` is more than one.
    """
    filtered = include is not None or exclude is not None
    slots = max(1, device_count) if ranks_per_host is None or filtered else ranks_per_host
    if nodes is not None and nodes > 1:
        raise HostfileError(
            f"`--nodes {nodes}`: without a hostfile there is this machine alone", hint="name the hosts: `-H hosts`"
        )
    here = HostSpec(name="localhost", slots=slots, source="this machine")
    return select([here], include=include, exclude=exclude, nodes=nodes, ranks_per_host=ranks_per_host)


def is_local(name: str, *, local_names: frozenset[str]) -> bool:
    """Tells whether a host of a hostfile is this machine, by name alone (nothing is resolved)."""
    return name.lower() in _LOOPBACK or name.lower() in local_names
