"""A fabric that is not ready is foretold on every generation of NVSwitch, and never where there is none to wait for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dsrun.launcher.machine.gpus.fabric_manager import FabricManager
from dsrun.launcher.machine.gpus.read import Gpu
from dsrun.launcher.machine.report import ProbeReport
from dsrun.launcher.machine.verdicts.gpus import gpu_verdicts
from dsrun.launcher.machine.verdicts.nvlinks import access_remarks, iommu_remarks
from support.machines import recorded_machine
from support.topologies import write_tree

RUNNING = FabricManager(running=True, version="550.90.07")
ENDED = FabricManager(running=False, version=None)
UNSEEN = FabricManager(running=None, version=None)
Get = Callable[..., ProbeReport]


@pytest.fixture(scope="module")
def get(tmp_path_factory: pytest.TempPathFactory) -> Get:
    """Gives the report of a machine, probed once, with another fabric manager."""
    reports: dict[tuple[str, str | None], ProbeReport] = {}

    def get_one(name: str, fault: str | None = None, *, manager: FabricManager = UNSEEN) -> ProbeReport:
        if (name, fault) not in reports:
            reports[name, fault] = recorded_machine(name, tmp_path_factory.mktemp("machine"), fault=fault).report()
        report = reports[name, fault]
        return replace(report, topology=replace(report.topology, fabric_manager=manager))

    return get_one


def said(report: ProbeReport) -> list[str]:
    return [f"{verdict.level} {verdict.path}: {verdict.text}" for verdict in gpu_verdicts(report)]


@pytest.mark.parametrize(("name", "switches"), [("dgx_a100", 6), ("dgx_h100", 4)])
@pytest.mark.parametrize("manager", [UNSEEN, ENDED], ids=["unseen", "ended"])
def test_without_a_fabric_manager_cuda_does_not_start(
    get: Get, name: str, switches: int, manager: FabricManager
) -> None:
    report = get(name, "no fabric manager", manager=manager)
    (verdict,) = gpu_verdicts(report)
    assert (verdict.level, verdict.path) == ("red", "topology.fabric_manager.running")
    assert verdict.text == f"{switches} NVSwitches and no NVLink up: CUDA does not start (error 802)"
    assert verdict.fix == f"`systemctl enable --now nvidia-fabricmanager`, of version {report.driver}"


def test_a_fabric_manager_that_runs_in_vain_is_to_be_asked_why(get: Get) -> None:
    manager = replace(RUNNING, version="550.54.15")
    (verdict,) = gpu_verdicts(get("dgx_h100", "no fabric manager", manager=manager))
    assert verdict.text == "4 NVSwitches, the fabric manager runs, no NVLink is up: CUDA does not start (error 802)"
    assert verdict.fix == (
        "why: `journalctl -u nvidia-fabricmanager`; restart it, of version 550.90.07 (installed is 550.54.15)"
    )


def test_gpus_that_wait_for_the_fabric_and_those_it_refused_are_named(get: Get) -> None:
    assert said(get("dgx_h100", "waiting", manager=RUNNING)) == [
        "red gpus.0.nvlink.fabric: GPUs 0-7 waiting for the NVSwitch fabric (in progress): CUDA does not start "
        "(error 802)"
    ]
    assert said(get("dgx_h100", "refused", manager=RUNNING)) == [
        "red gpus.5.nvlink.fabric_error: GPU 5 refused by the NVSwitch fabric (NVML's error 15): CUDA does not start "
        "(error 802)"
    ]


@pytest.mark.parametrize(("name", "level"), [("dgx_a100", "red"), ("dgx_h100", "amber")])
def test_a_fabric_manager_that_ended_stops_an_a100_now_and_an_h100_at_its_next_reset(
    get: Get, name: str, level: str
) -> None:
    (verdict,) = gpu_verdicts(get(name, manager=ENDED))
    assert (verdict.level, verdict.path) == (level, "topology.fabric_manager.running")
    assert ("the next reset" in verdict.text) == (level == "amber")


def test_a_fabric_manager_of_another_version_is_told_of(get: Get) -> None:
    assert said(get("dgx_h100", manager=replace(RUNNING, version="550.54.15"))) == [
        "amber topology.fabric_manager.version: fabric manager 550.54.15 beside driver 550.90.07: it starts with its "
        "own version only"
    ]
    assert said(get("dgx_h100", manager=RUNNING)) == []


def test_what_has_no_fabric_waits_for_none(get: Get) -> None:
    """One GPU in a virtual machine, GPUs in MIG mode, and Blackwell, whose switches are no devices of the driver."""
    down = get("dgx_h100", "no fabric manager")
    board = replace(down, topology=replace(down.topology, nvswitches=0, fabric_manager=None))
    guest = replace(board, host=replace(board.host, virtual=True), gpus=board.gpus[:1])
    assert said(guest) == []
    # Nor is a switch of Blackwell seen on the machine itself, whose GPUs do wait.
    assert said(board) == [
        "red gpus.0.nvlink.fabric: GPUs 0-7 waiting for the NVSwitch fabric (not started): CUDA does not start "
        "(error 802)"
    ]
    assert not any("802" in text for text in said(_in_mig_mode(get("dgx_a100", "no fabric manager"))))
    whole = get("dgx_h100")
    assert said(replace(whole, topology=replace(whole.topology, nvswitches=0, fabric_manager=None))) == []


def test_the_probe_looks_for_the_fabric_manager_where_there_are_switches(tmp_path: Path) -> None:
    machine = recorded_machine("dgx_h100", tmp_path)
    status = "Package: nvidia-fabricmanager-550\nStatus: install ok installed\nVersion: 550.90.07-1\n"
    files = {"proc/2/comm": "kthreadd\n", "proc/77/comm": "nv-fabricmanage\n", "var/lib/dpkg/status": status}
    write_tree(tmp_path, files)
    assert machine.report().topology.fabric_manager == RUNNING


def _in_mig_mode(report: ProbeReport) -> ProbeReport:
    found: list[Gpu] = []
    for gpu in report.gpus:
        assert gpu.state is not None
        found.append(replace(gpu, state=replace(gpu.state, mig_enabled=True)))
    return replace(report, gpus=tuple(found))


def gpu(name: str, *, access: tuple[str, ...] = (), iommu: str | None = None) -> Gpu:
    return Gpu(
        index=0,
        uuid="GPU-1",
        name=name,
        memory_total_bytes=None,
        memory_free_bytes=None,
        compute_capability=None,
        usable=True,
        peer_access=access,
        iommu=iommu,
    )


@pytest.mark.parametrize(
    ("name", "word", "virtual", "level", "fix"),
    [
        ("NVIDIA GeForce RTX 4090", "GNS", False, "note", "nothing: these cards cannot"),
        ("NVIDIA GeForce RTX 3090", "CNS", False, "note", "nothing: these cards cannot"),
        ("NVIDIA GeForce RTX 3090", "TNS", None, "note", "nothing: these cards cannot"),
        ("NVIDIA L40S", "NS", False, "note", "nothing: these cards cannot"),
        ("NVIDIA GH200 480GB", "TNS", None, "note", "nothing: chips without NVLink between them are built so"),
        ("NVIDIA GH200 480GB", "NS", None, "note", "nothing: chips without NVLink between them are built so"),
        ("NVIDIA A100-PCIE-40GB", "CNS", True, "note", "nothing from here"),
        ("NVIDIA A100-PCIE-40GB", "TNS", False, "amber", "switch PCIe's ACS and the IOMMU off"),
        ("NVIDIA A100-PCIE-40GB", "DR", False, "amber", "remove what switches it off"),
    ],
)
def test_access_between_gpus_has_the_way_out_of_its_kind_of_machine(
    name: str, word: str, virtual: bool | None, level: str, fix: str
) -> None:
    ((found, _, way_out, path),) = access_remarks(gpu(name, access=("X", word)), virtual=virtual)
    assert (found, path) == (level, "peer_access")
    assert way_out.startswith(fix)


@pytest.mark.parametrize("word", ["OK", "U"])
def test_access_that_is_there_or_unknown_is_not_spoken_of(word: str) -> None:
    assert list(access_remarks(gpu("NVIDIA L40S", access=("X", word)), virtual=False)) == []


@pytest.mark.parametrize(
    ("name", "arch", "virtual", "said"),
    [
        ("NVIDIA L40S", "x86_64", False, ("amber", "`iommu=pt` on the kernel's command line")),
        ("NVIDIA L40S", "x86_64", True, None),
        ("NVIDIA L40S", "aarch64", None, ("note", "`iommu.passthrough=1` on the kernel's command line")),
        ("NVIDIA GH200 480GB", "aarch64", None, None),
    ],
)
def test_an_iommu_is_spoken_of_in_the_words_of_its_machine(
    name: str, arch: str, virtual: bool | None, said: tuple[str, str] | None
) -> None:
    found = list(iommu_remarks(gpu(name, iommu="DMA-FQ"), arch=arch, virtual=virtual))
    if said is None:
        assert found == []
    else:
        ((level, _, fix, path),) = found
        assert (level, path) == (said[0], "iommu")
        assert fix.startswith(said[1])
