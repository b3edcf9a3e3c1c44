from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from dsrun.launcher.machine.network.rdma import rdma_facts
from support.machines import recorded_machine


@pytest.mark.parametrize(
    ("machine", "ports"),
    [
        ("aws_p5", {("EFA", 100): 32}),
        ("azure_nd_h100_v5", {("InfiniBand", 400): 8, ("RoCE", 100): 1}),
        ("dgx_h100", {("InfiniBand", 400): 8, ("InfiniBand", 200): 2, ("RoCE", 200): 2}),
        # One of its two ports is down.
        ("l40s_pcie", {("RoCE", 100): 1}),
        ("desktop", {}),
    ],
)
def test_ports_that_work_are_compared_by_kind_and_rate(
    tmp_path: Path, machine: str, ports: dict[tuple[str, int], int]
) -> None:
    found = rdma_facts(recorded_machine(machine, tmp_path).report().rdma)
    assert Counter((port.kind, port.rate_gbit) for port in found) == ports


def test_cards_that_ranks_may_not_open_are_not_compared(tmp_path: Path) -> None:
    machine = recorded_machine("dgx_h100", tmp_path)
    (tmp_path / "dev/infiniband").rename(tmp_path / "away")
    assert rdma_facts(machine.report().rdma) == ()
