"""What NCCL talks over is compared before a job: memory for RDMA, ports that work, entries of RoCE's table."""

from __future__ import annotations

from typing import Any

import pytest

from dsrun.launcher.preflight.findings import Requirements
from support.host_facts import CPU, GPU, gpus, judged, only, rdma

LITTLE: dict[str, Any] = {"memlock_bytes": 8 << 20}
MEMLOCK = "n2: 8.0 MiB may be locked: RDMA fails with so little"


def found(
    odd: dict[str, dict[str, Any]] | None = None, *, wants: Requirements = GPU, count: int = 3, **common: Any
) -> Any:
    return judged(count, odd, wants=wants, gpus=gpus(1), **{**rdma(0, 0), **common})


def test_little_locked_memory_stops_a_job_over_rdma_with_every_way_out() -> None:
    (one,) = found({"n2": LITTLE})
    assert (one.verdict, one.name, one.text) == ("red", "memlock", MEMLOCK)
    for word in ("limits.conf", "PropagateResourceLimitsExcept=MEMLOCK", "LimitMEMLOCK", "--ulimit memlock=-1"):
        assert word in one.fix


@pytest.mark.parametrize(
    ("wants", "change"),
    [
        # Nobody said that ranks talk over NCCL.
        (Requirements(), {}),
        (CPU, {}),
        # NCCL was told to leave RDMA alone.
        (GPU, {"no_sockets": None}),
    ],
)
def test_little_locked_memory_stops_no_job_that_may_do_without(wants: Requirements, change: dict[str, Any]) -> None:
    assert only(found({"n2": LITTLE}, wants=wants, **change)) == ("amber", "memlock", MEMLOCK, ("n2",))


def test_one_host_alone_and_hosts_without_rdma_need_no_locked_memory() -> None:
    (one,) = judged(1, wants=GPU, gpus=gpus(1), **rdma(0), **LITTLE)
    assert one.verdict == "amber"
    assert judged(3, wants=GPU, gpus=gpus(1), **LITTLE) == []


def test_a_host_with_other_ports_is_named() -> None:
    verdict, name, text, hosts = only(found({"n3": rdma(0)}))
    assert (verdict, name, hosts) == ("amber", "RDMA", ("n3",))
    assert text == "2 x InfiniBand 400 Gbit/s on n1 and n2, 1 x InfiniBand 400 Gbit/s on n3"
    slow = only(found({"n3": rdma(0, 0, rate=200)}))[2]
    assert slow.endswith("2 x InfiniBand 200 Gbit/s on n3")


def test_hosts_of_which_some_have_no_rdma_are_told_to_miss_each_other() -> None:
    _, name, text, hosts = only(found({"n2": rdma()}))
    assert (name, hosts) == ("RDMA", ("n2",))
    assert text == (
        "2 x InfiniBand 400 Gbit/s on n1 and n3, no port that works on n2; "
        "NCCL takes sockets on some and RDMA on others, which do not find each other"
    )


def test_ports_say_nothing_of_jobs_on_cpus_or_of_one_host() -> None:
    assert found({"n3": rdma(0)}, wants=CPU) == []
    assert found(count=1) == []


def test_roce_hosts_with_other_entries_are_told_where_nccl_takes_one_for_all() -> None:
    roce: dict[str, Any] = {**rdma(3, 3, kind="RoCE"), "nccl": "2.20.5"}
    (one,) = found({"n3": rdma(5, 5, kind="RoCE")}, **roce)
    assert (one.verdict, one.name, one.hosts) == ("amber", "RoCE", ("n3",))
    assert one.text == (
        "RoCE v2 over IPv4 is GID index 3 on n1 and n2, GID index 5 on n3, and NCCL before 2.21 takes one for all"
    )
    assert one.fix == "`env.NCCL_IB_GID_INDEX=5` for n3 in the hostfile"


@pytest.mark.parametrize("nccl", ["2.21.5", "2.28.3", None])
def test_a_newer_nccl_finds_the_entry_itself(nccl: str | None) -> None:
    assert found({"n3": rdma(5, 5, kind="RoCE")}, **rdma(3, 3, kind="RoCE"), nccl=nccl) == []


def test_an_index_for_all_hosts_that_is_wrong_on_one_is_told_with_any_nccl() -> None:
    everywhere = Requirements(on_gpus=True, nccl={"NCCL_IB_GID_INDEX": "3"})
    (one,) = found({"n3": rdma(5, 5, kind="RoCE")}, wants=everywhere, **rdma(3, 3, kind="RoCE"))
    assert one.hosts == ("n3",)
    assert one.text.endswith("GID index 5 on n3, and NCCL_IB_GID_INDEX names another")
    assert found(wants=everywhere, **rdma(3, 3, kind="RoCE")) == []


def test_efa_without_a_plugin_is_told_for_each_host() -> None:
    efa = rdma(None, None, kind="EFA", rate=100)
    odd = {"n2": {"no_sockets": None, "net_plugin": None}}
    verdict, name, text, hosts = next(
        (one.verdict, one.name, one.text, one.hosts) for one in found(odd, **efa) if one.name == "EFA"
    )
    assert (verdict, name, hosts) == ("amber", "EFA", ("n2",))
    assert text == "n2: 2 EFA devices, and the loader finds no libnccl-net.so: NCCL takes TCP between hosts"
    assert found(**efa) == []


def test_efa_that_nobody_wants_is_not_spoken_of() -> None:
    efa: dict[str, Any] = {**rdma(None, None, kind="EFA", rate=100), "no_sockets": None, "net_plugin": None}
    sockets = Requirements(on_gpus=True, nccl={"NCCL_NET": "Socket"})
    assert [one.name for one in found(wants=sockets, **efa, net_variables=("NCCL_NET",))] == []


def test_a_host_whose_ranks_cannot_take_its_ports_is_told_to_miss_the_others() -> None:
    _, name, text, hosts = only(found({"n2": {"no_sockets": None}}))
    assert (name, hosts) == ("RDMA", ("n2",))
    assert text == (
        "2 x InfiniBand 400 Gbit/s on n1 and n3, 2 x InfiniBand 400 Gbit/s (not taken by NCCL) on n2; "
        "NCCL takes sockets on some and RDMA on others, which do not find each other"
    )
