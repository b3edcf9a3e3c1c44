from __future__ import annotations

from pathlib import Path

import pytest

from dsrun.launcher.machine.processor.topology import parse_cpu_list, read_cpus
from dsrun.launcher.plan.affinity import Cpu
from support.topologies import write_cpu, write_machine, write_node, write_tree


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("0-3,8,10-11\n", (0, 1, 2, 3, 8, 10, 11)),
        ("\n", ()),
        ("", ()),
        ("5", (5,)),
        ("x,3-,-4,1-y,2", (2,)),
        ("3-1", ()),
    ],
)
def test_the_kernels_lists_are_read_and_nonsense_is_left_out(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_cpu_list(text) == numbers


def test_a_list_of_nonsense_length_is_cut() -> None:
    assert len(parse_cpu_list("0-99999999999")) == (1 << 16) + 1


def test_two_sockets_of_four_nodes_with_smt_are_told_apart(tmp_path: Path) -> None:
    everything = write_machine(tmp_path, packages=2, nodes=4, cores=2, threads=2)
    cpus = read_cpus(tmp_path, allowed=everything)
    assert len(cpus) == 32
    assert cpus[0] == Cpu(number=0, core=0, package=0, node=0)
    assert cpus[31] == Cpu(number=31, core=15, package=1, node=7)
    assert [cpu.node for cpu in cpus[:16]] == [node for node in range(8) for _ in range(2)]


def test_only_allowed_cpus_are_read_and_keep_the_name_of_their_core(tmp_path: Path) -> None:
    write_machine(tmp_path, cores=2, threads=2)
    assert read_cpus(tmp_path, allowed={3, 2}) == (Cpu(number=2, core=0), Cpu(number=3, core=1))


def test_smt_that_is_off_leaves_cores_of_one_cpu(tmp_path: Path) -> None:
    for cpu in (0, 1):
        write_cpu(tmp_path, cpu, siblings=[cpu])
    write_node(tmp_path, 0, [0, 1])
    assert [cpu.core for cpu in read_cpus(tmp_path, allowed={0, 1})] == [0, 1]


def test_the_older_name_of_the_siblings_is_read(tmp_path: Path) -> None:
    write_tree(tmp_path, {"sys/devices/system/cpu/cpu5/topology/thread_siblings_list": "1,5\n"})
    assert read_cpus(tmp_path, allowed={5}) == (Cpu(number=5, core=1),)


def test_a_machine_that_tells_nothing_has_cores_of_its_cpus_on_one_node(tmp_path: Path) -> None:
    assert read_cpus(tmp_path, allowed={0, 7}) == (Cpu(number=0, core=0), Cpu(number=7, core=7))


def test_a_cpu_that_went_offline_is_a_core_of_its_own(tmp_path: Path) -> None:
    write_machine(tmp_path, cores=2)
    (tmp_path / "sys/devices/system/cpu/cpu9").mkdir()
    assert read_cpus(tmp_path, allowed={0, 9})[1] == Cpu(number=9, core=9)


def test_grace_has_nodes_of_memory_alone_and_a_package_of_minus_one(tmp_path: Path) -> None:
    for cpu in range(72):
        write_cpu(tmp_path, cpu, siblings=[cpu], package=-1)
    write_node(tmp_path, 0, range(72))
    for node in range(1, 9):
        write_node(tmp_path, node, [])
    write_tree(tmp_path, {"sys/devices/system/node/online": "0-8\n"})
    cpus = read_cpus(tmp_path, allowed=range(72))
    assert {(cpu.package, cpu.node) for cpu in cpus} == {(0, 0)}
    assert len({cpu.core for cpu in cpus}) == 72


def test_big_and_little_cores_with_smt_on_the_big_ones_only(tmp_path: Path) -> None:
    for cpu, siblings in enumerate([[0, 1], [0, 1], [2, 3], [2, 3], [4], [5]]):
        write_cpu(tmp_path, cpu, siblings=siblings)
    assert [cpu.core for cpu in read_cpus(tmp_path, allowed=range(6))] == [0, 0, 2, 2, 4, 5]


def test_nodes_and_cpus_may_be_numbered_with_gaps(tmp_path: Path) -> None:
    for cpu, package in ((8, 0), (88, 3)):
        write_cpu(tmp_path, cpu, siblings=[cpu], package=package)
    write_node(tmp_path, 0, [8])
    write_node(tmp_path, 8, [88])
    write_tree(tmp_path, {"sys/devices/system/node/online": "0,8\n"})
    assert read_cpus(tmp_path, allowed={8, 88}) == (
        Cpu(number=8, core=8, package=0, node=0),
        Cpu(number=88, core=88, package=3, node=8),
    )
