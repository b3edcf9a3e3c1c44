from __future__ import annotations

import pytest

from dsrun.errors import HostfileError
from dsrun.launcher.hosts import HostSpec
from dsrun.launcher.selection import is_local, select_hosts, select_local

NAMES = frozenset({"box", "box.lab"})


def host(name: str, slots: int = 2, line: int = 1) -> HostSpec:
    return HostSpec(name=name, slots=slots, source=f"hosts:{line}")


@pytest.mark.parametrize(("asked", "gpus", "slots"), [(None, 0, 1), (None, 4, 4), (2, 4, 2), (3, 0, 3)])
def test_this_machine_takes_a_rank_for_each_gpu_unless_asked_otherwise(
    asked: int | None, gpus: int, slots: int
) -> None:
    allocation = select_local(ranks_per_host=asked, device_count=gpus)
    assert allocation.hosts == (HostSpec(name="localhost", slots=slots, source="this machine"),)


@pytest.mark.parametrize("name", ["localhost", "LOCALHOST", "127.0.0.1", "::1", "[::1]", "box", "Box.Lab"])
def test_this_machine_goes_by_many_names(name: str) -> None:
    assert is_local(name, local_names=NAMES)


@pytest.mark.parametrize(("asked", "slots"), [(None, 4), (1, 1), (4, 4)])
def test_takes_all_slots_or_as_many_as_asked(asked: int | None, slots: int) -> None:
    allocation = select_hosts([host("box", 4)], ranks_per_host=asked, local_names=NAMES)
    assert [(taken.name, taken.slots) for taken in allocation.hosts] == [("box", slots)]


def test_refuses_other_hosts_more_ranks_than_slots_and_this_machine_twice_all_at_once() -> None:
    hosts = [host("box", 2, 1), host("worker-1", 2, 2), host("localhost", 2, 3)]
    with pytest.raises(HostfileError) as caught:
        select_hosts(hosts, ranks_per_host=3, local_names=NAMES)
    assert caught.value.render() == (
        "error: hosts:1: 3 ranks are asked for, host `box` has 2 slots\n"
        "hint: use `-n 2` or raise `slots`\n"
        "error: hosts:2: host `worker-1` is not this machine; this version starts ranks here only\n"
        "hint: remote hosts come in a later version; until then name `localhost`\n"
        "error: hosts:3: `localhost` is this machine, as is `box` (hosts:1)\n"
        "hint: give each host one line and add up the slots"
    )
