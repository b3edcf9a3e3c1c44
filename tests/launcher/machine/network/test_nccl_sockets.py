from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dsrun.launcher.machine.network.nccl_sockets import (
    NcclLibraries,
    read_libraries,
    read_no_sockets,
    why_no_sockets,
)
from support.machines import recorded_machine
from support.topologies import write_tree

BOTH = NcclLibraries(net_plugin="/usr/lib64/libnccl-net.so", verbs="/usr/lib64/libibverbs.so.1")


@pytest.mark.parametrize(
    ("machine", "environ", "reason"),
    [
        ("dgx_h100", {}, "mlx5_0 does RDMA"),
        ("aws_p5", {}, "rdmap79s0 does RDMA"),
        ("desktop", {}, None),
        ("dgx_h100", {"NCCL_IB_DISABLE": "1"}, None),
        ("dgx_h100", {"NCCL_IB_DISABLE": "0"}, "mlx5_0 does RDMA"),
        # AWS's plugin does not ask that variable.
        ("aws_p5", {"NCCL_IB_DISABLE": "1"}, "rdmap79s0 does RDMA"),
        ("dgx_h100", {"NCCL_NET": "socket"}, None),
        ("desktop", {"NCCL_NET": "FasTrak"}, "NCCL_NET=FasTrak"),
        ("desktop", {"NCCL_NET_PLUGIN": "/opt/libnccl-net-x.so"}, "NCCL_NET_PLUGIN=/opt/libnccl-net-x.so"),
        ("desktop", {"NCCL_NET_PLUGIN": "none"}, None),
    ],
)
def test_nccl_takes_sockets_where_there_is_nothing_better_or_it_is_told_to(
    tmp_path: Path, machine: str, environ: dict[str, str], reason: str | None
) -> None:
    cards = recorded_machine(machine, tmp_path).report().rdma
    assert why_no_sockets(environ, cards, libraries=BOTH) == reason


def test_without_its_plugin_efa_is_left_to_sockets(tmp_path: Path) -> None:
    cards = recorded_machine("aws_p5", tmp_path).report().rdma
    assert why_no_sockets({}, cards, libraries=replace(BOTH, net_plugin=None)) is None


def test_a_plugin_counts_where_the_loader_looks_and_nowhere_else(tmp_path: Path) -> None:
    write_tree(tmp_path, {"opt/amazon/ofi-nccl/lib/libnccl-net.so": ""})
    assert read_libraries(tmp_path, {"LD_LIBRARY_PATH": ":/none"}) == NcclLibraries(net_plugin=None, verbs=None)
    folder = "/opt/amazon/ofi-nccl/lib"
    assert read_libraries(tmp_path, {"LD_LIBRARY_PATH": f"/x:{folder}"}).net_plugin == f"{folder}/libnccl-net.so"
    write_tree(tmp_path, {"usr/lib64/libnccl-net.so": ""})
    assert read_libraries(tmp_path, {}).net_plugin == "/usr/lib64/libnccl-net.so"


@pytest.mark.parametrize("missing", ["dev/infiniband", "usr/lib64/libibverbs.so.1", "sys/class/infiniband_verbs"])
def test_a_container_without_the_files_of_cards_or_their_library_has_sockets(tmp_path: Path, missing: str) -> None:
    machine = recorded_machine("azure_nd_h100_v5", tmp_path)
    assert read_no_sockets(tmp_path, {}, machine.report().rdma) == "mlx5_an0 does RDMA"
    (tmp_path / missing).rename(tmp_path / "away")
    assert read_no_sockets(tmp_path, {}, machine.report().rdma) is None
