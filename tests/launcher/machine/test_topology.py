from __future__ import annotations

from pathlib import Path

import pytest

from dsrun.launcher.probe.topology_text import legend_lines, topology_lines
from support.machines import recorded_machine

# Rows of GPUs as github.com/NVIDIA/nccl/issues/1505 shows them, without the last column (GPU NUMA ID).
DGX_A100 = """\
     GPU0 GPU1 GPU2 GPU3 GPU4 GPU5 GPU6 GPU7 NIC0 NIC1 NIC2 NIC3 NIC4 NIC5 NIC6 NIC7 NIC8 NIC9 NIC10 NIC11
GPU0 X    NV12 NV12 NV12 NV12 NV12 NV12 NV12 PXB  PXB  SYS  SYS  SYS  SYS  SYS  SYS  SYS  SYS  SYS SYS 48-63,176-191   3
GPU1 NV12 X    NV12 NV12 NV12 NV12 NV12 NV12 PXB  PXB  SYS  SYS  SYS  SYS  SYS  SYS  SYS  SYS  SYS SYS 48-63,176-191   3
GPU2 NV12 NV12 X    NV12 NV12 NV12 NV12 NV12 SYS  SYS  PXB  PXB  SYS  SYS  SYS  SYS  SYS  SYS  SYS SYS 16-31,144-159   1
GPU3 NV12 NV12 NV12 X    NV12 NV12 NV12 NV12 SYS  SYS  PXB  PXB  SYS  SYS  SYS  SYS  SYS  SYS  SYS SYS 16-31,144-159   1
GPU4 NV12 NV12 NV12 NV12 X    NV12 NV12 NV12 SYS  SYS  SYS  SYS  SYS  SYS  PXB  PXB  SYS  SYS  SYS SYS 112-127,240-255 7
"""
WORKSTATION = """\
      GPU0  GPU1  GPU2  GPU3  CPU Affinity  NUMA Affinity
GPU0   X    NV4   NODE  NODE  0-63          0
GPU1  NV4    X    NODE  NODE  0-63          0
GPU2  NODE  NODE   X    NV4   0-63          0
GPU3  NODE  NODE  NV4    X    0-63          0
"""
L40S = """\
      GPU0  GPU1  GPU2  GPU3  GPU4  GPU5  GPU6  GPU7  NIC0  NIC1  CPU Affinity  NUMA Affinity
GPU0   X    PIX   NODE  NODE  SYS   SYS   SYS   SYS   SYS   SYS   0-31,64-95    0
GPU1  PIX    X    NODE  NODE  SYS   SYS   SYS   SYS   SYS   SYS   0-31,64-95    0
GPU2  NODE  NODE   X    PIX   SYS   SYS   SYS   SYS   SYS   SYS   0-31,64-95    0
GPU3  NODE  NODE  PIX    X    SYS   SYS   SYS   SYS   SYS   SYS   0-31,64-95    0
GPU4  SYS   SYS   SYS   SYS    X    PIX   NODE  NODE  NODE  NODE  32-63,96-127  1
GPU5  SYS   SYS   SYS   SYS   PIX    X    NODE  NODE  NODE  NODE  32-63,96-127  1
GPU6  SYS   SYS   SYS   SYS   NODE  NODE   X    PIX   NODE  NODE  32-63,96-127  1
GPU7  SYS   SYS   SYS   SYS   NODE  NODE  PIX    X    NODE  NODE  32-63,96-127  1
NIC0  SYS   SYS   SYS   SYS   NODE  NODE  NODE  NODE   X    PIX
NIC1  SYS   SYS   SYS   SYS   NODE  NODE  NODE  NODE  PIX    X
"""


def test_a_dgx_a100_is_drawn_as_nvidia_smi_draws_it(tmp_path: Path) -> None:
    drawn = [line.split() for line in topology_lines(recorded_machine("dgx_a100", tmp_path).report().topology)]
    published = [line.split() for line in DGX_A100.splitlines()]
    assert drawn[0] == [*published[0], "CPU", "Affinity", "NUMA", "Affinity"]
    assert drawn[1:6] == published[1:]


@pytest.mark.parametrize(("name", "drawing"), [("workstation", WORKSTATION), ("l40s_pcie", L40S)])
def test_the_matrix_reads_as_reviewed(name: str, drawing: str, tmp_path: Path) -> None:
    assert topology_lines(recorded_machine(name, tmp_path).report().topology) == drawing.splitlines()


def test_on_a_dgx_h100_each_gpu_has_a_card_of_its_own_and_nvlink_to_all(tmp_path: Path) -> None:
    topology = recorded_machine("dgx_h100", tmp_path).report().topology
    # The user guide's table of network modules names the card of each GPU.
    own = ["mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11"]
    for gpu, card in enumerate(own):
        paths = topology.paths[gpu]
        nearest = [node.name for node, path in zip(topology.nodes, paths, strict=True) if path == "PXB"]
        assert nearest == [card]
        assert [path for path in paths[:8] if path != "X"] == ["NV18"] * 7
        assert set(paths[8:]) == {"PXB", "NODE", "SYS"}
    assert (topology.nvswitches, topology.peermem, topology.gdrcopy, topology.iommu_groups) == (4, True, False, 0)


def test_the_matrix_is_symmetric(tmp_path: Path) -> None:
    paths = recorded_machine("dgx_h100", tmp_path).report().topology.paths
    assert paths == tuple(zip(*paths, strict=True))


def test_the_legend_explains_the_words_that_occur_and_names_the_cards(tmp_path: Path) -> None:
    topology = recorded_machine("l40s_pcie", tmp_path).report().topology
    assert legend_lines(topology) == [
        "X    itself",
        "PIX  one PCIe switch at most",
        "NODE two host bridges of one NUMA node",
        "SYS  between NUMA nodes",
        "NIC0 mlx5_0",
        "NIC1 mlx5_1",
    ]


def test_a_gpu_whose_place_is_not_told_is_drawn_with_question_marks(tmp_path: Path) -> None:
    machine = recorded_machine("workstation", tmp_path)
    (tmp_path / "sys/bus/pci/devices/0000:41:00.0").unlink()
    lines = topology_lines(machine.report().topology)
    assert lines[3].split() == ["GPU2", "?", "?", "X", "NV4", "N/A", "N/A"]


def test_one_device_needs_no_matrix(tmp_path: Path) -> None:
    topology = recorded_machine("workstation", tmp_path).report().topology
    alone = type(topology)(
        nodes=topology.nodes[:1], paths=(("X",),), nvswitches=0, peermem=False, gdrcopy=False, iommu_groups=0
    )
    assert (topology_lines(alone), legend_lines(alone)) == ([], [])
