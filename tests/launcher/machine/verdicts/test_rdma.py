from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dsrun.launcher.machine.verdict import Context
from dsrun.launcher.machine.verdicts.rdma import efa_verdicts, rdma_verdicts, takes_rdma
from support.machines import recorded_machine
from support.topologies import write_tree


@pytest.mark.parametrize(
    ("machine", "storage"),
    [
        ("dgx_h100", "mlx5_1,mlx5_2,mlx5_7,mlx5_8"),
        # Ports near the GPUs of another job are not storage's.
        ("hgx_h200_job", "mlx5_1,mlx5_2,mlx5_7,mlx5_8"),
        # Two more ports for storage are down, and NCCL leaves them alone by itself.
        ("dgx_a100", "mlx5_4,mlx5_5"),
        # No switch: no GPU is near any port, and all are as good.
        ("azure_nd_h100_v5", None),
        ("aws_p5", None),
        ("desktop", None),
    ],
)
def test_ports_that_no_gpu_is_near_are_named_with_the_way_to_leave_them_out(
    tmp_path: Path, machine: str, storage: str | None
) -> None:
    found = [one for one in rdma_verdicts(recorded_machine(machine, tmp_path).report()) if "NCCL_IB_HCA" in one.fix]
    assert [one.fix for one in found] == ([] if storage is None else [f"`NCCL_IB_HCA=^={storage}` keeps NCCL off"])


def test_who_names_the_cards_is_told_nothing(tmp_path: Path) -> None:
    report = recorded_machine("dgx_h100", tmp_path).report({"NCCL_IB_HCA": "mlx5_0"})
    assert list(rdma_verdicts(report)) == []


def test_efa_without_its_plugin_is_told_to_be_tcp(tmp_path: Path) -> None:
    machine = recorded_machine("aws_p5", tmp_path)
    (one,) = rdma_verdicts(replace(machine.report(), nccl_net_plugin=None))
    assert (one.level, one.text) == (
        "note",
        "32 EFA devices, and the loader finds no libnccl-net.so: NCCL takes TCP between hosts",
    )
    assert "aws-ofi-nccl" in one.fix
    write_tree(tmp_path, {"opt/amazon/ofi-nccl/lib/libnccl-net.so": ""})
    assert list(rdma_verdicts(machine.report({"LD_LIBRARY_PATH": "/opt/amazon/ofi-nccl/lib"}))) == []
    assert list(rdma_verdicts(machine.report({"NCCL_NET_PLUGIN": "aws-ofi"}))) == []


@pytest.mark.parametrize("machine", ["azure_nd_h100_v5", "aws_p5"])
def test_cards_that_a_container_shows_and_was_not_given_are_a_note_and_no_fault(tmp_path: Path, machine: str) -> None:
    here = recorded_machine(machine, tmp_path)
    (tmp_path / "dev/infiniband").rename(tmp_path / "away")
    report = here.report()
    (found,) = rdma_verdicts(report)
    assert (found.level, found.path) == ("note", "rdma.0.may_open")
    assert found.text.endswith(
        "programs here cannot open them (/dev/infiniband): NCCL takes others, or TCP, between hosts"
    )
    assert not takes_rdma(report)


def test_efa_without_its_plugin_slows_down_jobs_of_several_hosts(tmp_path: Path) -> None:
    cards = recorded_machine("aws_p5", tmp_path).report().rdma
    context = Context(crosses_hosts=True)
    (one,) = efa_verdicts(cards, net_plugin=None, variables=(), context=context)
    assert (one.level, one.text.partition(",")[0]) == ("amber", "32 EFA devices")
    assert list(efa_verdicts(cards, net_plugin="/usr/lib/libnccl-net.so", variables=(), context=context)) == []
    assert list(efa_verdicts(cards, net_plugin=None, variables=["NCCL_NET"], context=context)) == []
    closed = [replace(card, may_open=False) for card in cards]
    assert list(efa_verdicts(closed, net_plugin=None, variables=(), context=context)) == []


@pytest.mark.parametrize(
    ("environ", "missing", "takes"),
    [
        ({}, None, True),
        ({}, "usr/lib64/libibverbs.so.1", False),
        ({"NCCL_NET": "Socket"}, None, False),
        ({"NCCL_IB_DISABLE": "1"}, None, False),
    ],
)
def test_ranks_take_rdma_where_nccl_does(
    tmp_path: Path, environ: dict[str, str], missing: str | None, takes: bool
) -> None:
    machine = recorded_machine("dgx_h100", tmp_path)
    if missing is not None:
        (tmp_path / missing).unlink()
    assert takes_rdma(machine.report(environ)) is takes
