from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsrun.launcher.plan.affinity import Binding, Cpu, bind_ranks
from dsrun.launcher.plan.launch_plan import Bind


def machine(*, packages: int = 1, nodes: int = 1, cores: int, threads: int = 1) -> list[Cpu]:
    """A regular machine, numbered as Linux does: siblings after all cores."""
    total = packages * nodes * cores
    return [
        Cpu(number=cpu, core=cpu % total, package=cpu % total // (nodes * cores), node=cpu % total // cores)
        for cpu in range(total * threads)
    ]


def bound(cpus: Sequence[Cpu], bind: Bind, nodes: int | Sequence[int | None]) -> list[tuple[list[int] | None, int]]:
    gpu_nodes = [None] * nodes if isinstance(nodes, int) else nodes
    found = bind_ranks(cpus, bind=bind, gpu_nodes=gpu_nodes)
    return [(None if one.cpus is None else list(one.cpus), one.threads) for one in found]


def span(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


# auto


@pytest.mark.parametrize("bind", ["auto", "none"])
def test_ranks_of_one_node_are_left_to_the_kernel_and_share_its_cores(bind: Bind) -> None:
    assert bound(machine(cores=8, threads=2), bind, 2) == [(None, 4), (None, 4)]


def test_auto_gives_each_rank_of_two_sockets_a_socket_with_all_its_threads() -> None:
    socket = machine(packages=2, cores=4, threads=2)
    assert bound(socket, "auto", 2) == [([0, 1, 2, 3, 8, 9, 10, 11], 4), ([4, 5, 6, 7, 12, 13, 14, 15], 4)]


def test_auto_lets_ranks_of_a_node_share_it() -> None:
    assert bound(machine(packages=2, cores=4), "auto", 4) == [*[(span(0, 4), 2)] * 2, *[(span(4, 4), 2)] * 2]


def test_auto_gives_each_rank_whole_neighbouring_nodes_where_there_are_more_of_them() -> None:
    assert bound(machine(packages=2, nodes=4, cores=2), "auto", 2) == [(span(0, 8), 8), (span(8, 8), 8)]


@pytest.mark.parametrize("ranks", [1, 3])
def test_auto_binds_nothing_where_a_rank_would_lose_cores(ranks: int) -> None:
    assert bound(machine(packages=2, cores=6), "auto", ranks) == [(None, 12 // ranks)] * ranks


def test_auto_binds_nothing_where_a_cpuset_leaves_one_node_little() -> None:
    cpus = [cpu for cpu in machine(packages=2, cores=8) if cpu.number < 9]
    assert bound(cpus, "auto", 2) == [(None, 4), (None, 4)]


def test_auto_sends_a_rank_to_its_gpus_node() -> None:
    box = machine(packages=2, cores=4)
    assert bound(box, "auto", [1, 0]) == [(span(4, 4), 4), (span(0, 4), 4)]
    assert bound(box, "auto", [1]) == [(span(4, 4), 4)]


def test_auto_leaves_ranks_unbound_whose_gpus_node_has_few_cores() -> None:
    assert bound(machine(packages=2, nodes=4, cores=4), "auto", [3]) == [(None, 32)]
    cpuset = [cpu for cpu in machine(packages=2, cores=8) if cpu.number not in range(1, 8)]
    assert bound(cpuset, "auto", [0, 0]) == [(None, 4), (None, 4)]
    assert bound(machine(packages=2, cores=4), "auto", [0, 0]) == [(span(0, 4), 2), (span(0, 4), 2)]


@pytest.mark.parametrize("bind", ["auto", "numa"])
def test_a_gpu_on_a_node_without_usable_cores_counts_as_unknown(bind: Bind) -> None:
    assert bound(machine(packages=2, cores=4), bind, [7, 9]) == [(span(0, 4), 4), (span(4, 4), 4)]


# numa


def test_numa_deals_ranks_out_over_the_nodes_in_blocks() -> None:
    box = machine(packages=2, cores=4)
    assert bound(box, "numa", 3) == [(span(0, 4), 2), (span(0, 4), 2), (span(4, 4), 4)]
    assert bound(box, "numa", 1) == [(span(0, 4), 4)]


# cores


def test_cores_are_contiguous_and_of_each_one_thread() -> None:
    box = machine(packages=2, cores=4, threads=2)
    assert bound(box, "cores", 4) == [([0, 1], 2), ([2, 3], 2), ([4, 5], 2), ([6, 7], 2)]


def test_cores_that_do_not_divide_are_all_used() -> None:
    assert bound(machine(cores=5), "cores", 2) == [([0, 1], 2), ([2, 3, 4], 3)]


def test_cores_are_taken_beside_the_gpu() -> None:
    box = machine(packages=2, cores=4)
    assert bound(box, "cores", [1, 1, 0]) == [([4, 5], 2), ([6, 7], 2), (span(0, 4), 4)]


def test_more_ranks_than_cores_of_the_gpus_node_take_the_next_nodes() -> None:
    assert bound(machine(packages=2, cores=2), "cores", [1, 1, 1, 0]) == [([1], 1), ([2], 1), ([3], 1), ([0], 1)]


def test_more_ranks_than_cores_take_a_thread_each_and_then_share() -> None:
    assert bound(machine(cores=2, threads=2), "cores", 4) == [([0], 1), ([2], 1), ([1], 1), ([3], 1)]
    assert bound(machine(cores=2), "cores", 4) == [([0], 1), ([0], 1), ([1], 1), ([1], 1)]


def test_interleaved_numbers_are_sorted_by_node_first() -> None:
    dell = [Cpu(number=cpu, core=cpu, package=cpu % 2, node=cpu % 2) for cpu in range(8)]
    assert bound(dell, "cores", 2) == [([0, 2, 4, 6], 4), ([1, 3, 5, 7], 4)]


# threads


@pytest.mark.parametrize(
    ("cores", "ranks", "quota", "threads"),
    [(8, 2, None, 4), (8, 3, None, 2), (2, 4, None, 1), (8, 2, 4.0, 2), (8, 2, 3.5, 1), (8, 1, 0.5, 1), (2, 1, 9.0, 2)],
)
def test_threads_are_what_cores_and_quota_leave(cores: int, ranks: int, quota: float | None, threads: int) -> None:
    found = bind_ranks(machine(cores=cores), bind="none", gpu_nodes=[None] * ranks, quota_cores=quota)
    assert found == (Binding(cpus=None, threads=threads),) * ranks


@pytest.mark.parametrize(
    ("box", "ranks", "threads"),
    [
        (machine(packages=2, cores=64, threads=2), 8, 16),
        (machine(packages=2, nodes=4, cores=12, threads=2), 8, 12),
        (machine(cores=72), 1, 72),
    ],
)
def test_big_machines_are_shared_whole(box: list[Cpu], ranks: int, threads: int) -> None:
    for bind in ("auto", "numa", "cores", "none"):
        assert {threads for _, threads in bound(box, bind, ranks)} == {threads}


# what holds for every machine


@st.composite
def machines(draw: st.DrawFn) -> list[Cpu]:
    """Irregular ones too: sparse numbers, nodes and cores of any size, siblings taken away by a cpuset."""
    cpus: list[Cpu] = []
    numbers = draw(st.lists(st.integers(0, 400), min_size=1, max_size=40, unique=True))
    while numbers:
        core = [numbers.pop() for _ in range(min(len(numbers), draw(st.integers(1, 4))))]
        node = draw(st.integers(0, 5))
        usable = core[: draw(st.integers(1, len(core)))]
        cpus += [Cpu(number=number, core=min(core), package=node // 2, node=node) for number in usable]
    return cpus


@settings(deadline=None, derandomize=True, max_examples=300)
@given(
    cpus=machines(),
    bind=st.sampled_from(["auto", "cores", "numa", "none"]),
    gpu_nodes=st.lists(st.none() | st.integers(0, 7), min_size=1, max_size=24),
    quota=st.none() | st.floats(0.1, 64),
)
def test_every_rank_can_run_and_cores_are_its_own(
    cpus: list[Cpu], bind: str, gpu_nodes: list[int | None], quota: float | None
) -> None:
    found = bind_ranks(cpus, bind=cast(Bind, bind), gpu_nodes=gpu_nodes, quota_cores=quota)
    assert found == bind_ranks(cpus[::-1], bind=cast(Bind, bind), gpu_nodes=gpu_nodes, quota_cores=quota)
    assert len(found) == len(gpu_nodes)
    core_of = {cpu.number: cpu.core for cpu in cpus}
    for one in found:
        assert one.threads >= 1
        assert one.cpus is None or (one.cpus and set(one.cpus) <= set(core_of) and list(one.cpus) == sorted(one.cpus))
        assert one.threads <= max(1, len({core_of[cpu] for cpu in one.cpus or core_of}))
    if bind == "cores" and len(set(core_of.values())) >= len(gpu_nodes):
        taken = [core_of[cpu] for one in found for cpu in one.cpus or ()]
        assert len(taken) == len(set(taken))
