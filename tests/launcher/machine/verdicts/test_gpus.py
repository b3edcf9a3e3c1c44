from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsrun.launcher.machine.gpus.read import Gpu
from dsrun.launcher.machine.gpus.state import MigSlice
from dsrun.launcher.machine.gpus.users import GpuProcess
from dsrun.launcher.machine.gpus.xids import XidEvent
from dsrun.launcher.machine.pci import PcieLink
from dsrun.launcher.machine.report import ProbeReport
from dsrun.launcher.machine.verdicts.gpus import gpu_verdicts
from support.machines import recorded_machine

SLICE = MigSlice(uuid="MIG-1", name="NVIDIA H100 MIG 1g.10gb", memory_total_bytes=10 << 30)
Change = Callable[[Gpu], Gpu]


@pytest.fixture(scope="module")
def dgx(tmp_path_factory: pytest.TempPathFactory) -> ProbeReport:
    """A DGX H100 of which nothing is to be said; a value, so one serves all tests."""
    report = recorded_machine("dgx_h100", tmp_path_factory.mktemp("dgx")).report()
    assert gpu_verdicts(report) == []
    return report


def with_gpu(report: ProbeReport, index: int, change: Change) -> ProbeReport:
    return replace(report, gpus=tuple(change(gpu) if gpu.index == index else gpu for gpu in report.gpus))


def state(**values: Any) -> Change:
    def change(gpu: Gpu) -> Gpu:
        assert gpu.state is not None
        return replace(gpu, state=replace(gpu.state, **values))

    return change


def nvlink(**values: Any) -> Change:
    def change(gpu: Gpu) -> Gpu:
        assert gpu.nvlink is not None
        return replace(gpu, nvlink=replace(gpu.nvlink, **values))

    return change


def xids(*numbers: int) -> Change:
    events = tuple(XidEvent(number=number, text="", fatal=None, action=None, age_s=None) for number in numbers)
    return lambda gpu: replace(gpu, xids=numbers, xid_events=events)


def link(generation: int, width: int) -> Change:
    found = PcieLink(generation=generation, width=width, generation_max=5, width_max=16)
    return lambda gpu: replace(gpu, pcie=found)


def process(user: str | None, memory_bytes: int | None, *, is_desktop: bool = False) -> Change:
    one = GpuProcess(pid=4242, user=user, memory_bytes=memory_bytes, is_desktop=is_desktop)
    return state(processes=(one,))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (link(1, 8), "amber gpus.3.pcie.width: GPU 3 PCIe gen1 x8 of gen5 x16"),
        (link(1, 16), "note gpus.3.pcie.generation: GPU 3 PCIe gen1 x16 of gen5 x16: idle GPUs lower it"),
        (nvlink(fabric="in progress"), "red gpus.3.nvlink.fabric: GPU 3 waiting for the NVSwitch fabric (in progress)"),
        (nvlink(active=16, inactive=2), "amber gpus.3.nvlink.inactive: GPU 3 with 2 of 18 NVLinks down"),
        (nvlink(errors=7), "note gpus.3.nvlink.errors: GPU 3 with 7 errors on its NVLinks"),
        (
            nvlink(fabric_error="GPU is lost"),
            "red gpus.3.nvlink.fabric_error: GPU 3 refused by the NVSwitch fabric (GPU",
        ),
        (xids(13, 79), "red gpus.3.xid_events: GPU 3 Xid 79: fell off the bus"),
        (xids(63), "amber gpus.3.xid_events: GPU 3 Xid 63: memory row remapped"),
        (
            lambda gpu: replace(gpu, peer_access=("X", "OK", "GNS")),
            "note gpus.3.peer_access: GPU 3 without access to the memory of other GPUs (not with these GPUs)",
        ),
        (
            lambda gpu: replace(gpu, peer_access=("X", "CNS", "GNS")),
            "amber gpus.3.peer_access: GPU 3 without access to the memory of other GPUs (not with this chipset, not",
        ),
        (lambda gpu: replace(gpu, iommu="DMA"), "amber gpus.3.iommu: GPU 3 behind an IOMMU that translates (DMA)"),
        (state(remap_failed=True), "red gpus.3.state.remap_failed: GPU 3 without a spare row left"),
        (state(remap_pending=True), "amber gpus.3.state.remap_pending: GPU 3 waiting for a reset"),
        (state(ecc_uncorrected=2), "red gpus.3.state.ecc_uncorrected: GPU 3 with 2 uncorrected memory errors"),
        (
            state(throttle_reasons=("power cap", "thermal (hardware)"), temperature_c=93),
            "amber gpus.3.state.throttle_reasons: GPU 3 slowed down: thermal (hardware) at 93 °C",
        ),
        (state(power_limit_w=400.0), "note gpus.3.state.power_limit_w: GPU 3 limited to 400 W of 700 W"),
        (state(persistence=False), "note gpus.3.state.persistence: GPU 3 persistence off"),
        (state(compute_mode="prohibited"), "red gpus.3.state.compute_mode: GPU 3 closed to computing"),
        (
            state(compute_mode="exclusive process"),
            "note gpus.3.state.compute_mode: GPU 3 open to one process at a time (compute mode exclusive process)",
        ),
        (state(mig_enabled=True), "amber gpus.3.state.mig_slices: GPU 3 left out: in MIG mode without slices"),
        (state(recovery_action="reset the GPU"), "red gpus.3.state.recovery_action: GPU 3 needs a reset"),
        (
            process("somebody", 30 << 30),
            "amber gpus.3.state.processes: GPU 3 used by pid 4242 of user somebody, 79.2 GiB of 79.6 GiB free",
        ),
        (process("somebody", None), "amber gpus.3.state.processes: GPU 3 used by pid 4242 of user somebody, 79.2 GiB"),
    ],
)
def test_what_is_wrong_with_a_gpu_is_said_with_a_way_out(dgx: ProbeReport, change: Change, said: str) -> None:
    (verdict,) = gpu_verdicts(with_gpu(dgx, 3, change))
    assert f"{verdict.level} {verdict.path}: {verdict.text}".startswith(said)
    assert verdict.fix
    assert "GPU_INDEX" not in verdict.fix


@pytest.mark.parametrize(
    "change",
    [
        lambda gpu: replace(gpu, xids=None, xid_events=None),
        # A program's own doing.
        xids(13, 31, 43, 45),
        state(recovery_action="none"),
        state(mig_enabled=True, mig_slices=(SLICE,)),
        lambda gpu: replace(gpu, iommu="identity"),
        lambda gpu: replace(gpu, pcie=PcieLink(generation=None, width=None, generation_max=5, width_max=16)),
        lambda gpu: replace(gpu, peer_access=("X", "U", "OK")),
        state(throttle_reasons=("power cap",)),
        state(throttle_reasons=None, persistence=None, processes=None, ecc_uncorrected=None),
        state(power_limit_w=None),
        process("somebody", 10 << 20),
        process("somebody", 1 << 30, is_desktop=True),
        process(None, 30 << 30),
        lambda gpu: replace(gpu, state=None, pcie=None, nvlink=None),
    ],
)
def test_what_is_well_or_unknown_is_not_spoken_of(dgx: ProbeReport, change: Change) -> None:
    assert gpu_verdicts(with_gpu(dgx, 3, change)) == []


@pytest.mark.parametrize(("fabric", "virtual"), [(None, False), ("not started", True), ("not started", None)])
def test_a_card_without_its_bridge_or_switches_is_as_it_was_bought(
    dgx: ProbeReport, fabric: str | None, virtual: bool | None
) -> None:
    alone = replace(dgx, topology=replace(dgx.topology, nvswitches=0, fabric_manager=None))
    alone = replace(alone, host=replace(alone.host, virtual=virtual))
    assert gpu_verdicts(with_gpu(alone, 3, nvlink(active=0, inactive=4, fabric=fabric))) == []
    if fabric is not None:
        refused = nvlink(active=0, inactive=4, fabric="completed", fabric_error="Insufficient Resources")
        assert gpu_verdicts(with_gpu(alone, 3, refused)) == []


def test_one_gpu_without_its_links_is_told_beside_others_that_have_theirs(dgx: ProbeReport) -> None:
    (verdict,) = gpu_verdicts(with_gpu(dgx, 3, nvlink(active=0, inactive=18)))
    assert (verdict.level, verdict.text) == ("amber", "GPU 3 with 18 of 18 NVLinks down")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ("LibRmVersionMismatch", "Driver/library version mismatch"),
        ("DriverNotLoaded", "kernel module"),
        ("LibraryNotFound", "libnvidia-ml.so.1"),
        ("Unknown", "Unknown Error"),
    ],
)
def test_a_driver_that_fails_is_red_and_says_why(tmp_path: Path, error: str, text: str) -> None:
    report = recorded_machine("hgx_h200_job", tmp_path, driver_fails=error).report()
    (verdict,) = gpu_verdicts(report)
    assert (verdict.level, verdict.path) == ("red", "gpus_unusable.text")
    assert verdict.text.startswith("the GPUs of this machine cannot be used: ")
    assert text in verdict.text
    assert verdict.text.endswith(report.null_reasons["driver"])


def test_gpus_of_another_maker_are_red_where_a_job_would_want_them(tmp_path: Path) -> None:
    (verdict,) = gpu_verdicts(recorded_machine("mi300x", tmp_path).report())
    assert verdict.level == "red"
    assert verdict.text == "this machine has 8 AMD GPUs; dsrun trains on GPUs of NVIDIA, and on CPUs"


def test_a_gpu_that_is_lost_and_one_that_is_closed_are_told_apart(tmp_path: Path) -> None:
    verdicts = gpu_verdicts(recorded_machine("dgx_h100", tmp_path, lost=[3], forbidden=[5]).report())
    assert [(verdict.level, verdict.text) for verdict in verdicts] == [
        ("red", "GPU 3 left out: the driver counts it and cannot reach it (GPU is lost)"),
        ("amber", "GPU 5 left out: this process may not open it (Insufficient Permissions)"),
    ]


def test_what_a_job_goes_without_is_told_of_the_whole_machine(dgx: ProbeReport) -> None:
    idle = replace(
        dgx, gpus=(), gpus_usable=0, gpus_idle="the host has 8 NVIDIA GPUs, and this container was given none"
    )
    (verdict,) = gpu_verdicts(idle)
    assert (verdict.level, verdict.path) == ("note", "gpus_idle")
    assert verdict.text.endswith("was given none: jobs train on the CPU")
    (verdict,) = gpu_verdicts(replace(dgx, gpus_unlisted=2))
    assert verdict.text == "2 GPUs left out: the driver does not list them, for it could not start them"


def test_two_cards_of_a_desktop_share_the_lanes_of_its_board(tmp_path: Path) -> None:
    found = {verdict.path: verdict for verdict in gpu_verdicts(recorded_machine("desktop", tmp_path).report())}
    assert found["gpus.0.pcie.width"].level == "note"
    # They have no access to each other: an IOMMU is in nobody's way.
    assert not [path for path in found if path.endswith("iommu")]


def test_cards_of_efa_need_no_module_of_mellanox(dgx: ProbeReport) -> None:
    cards = tuple(replace(card, kind="EFA") for card in dgx.rdma)
    assert gpu_verdicts(replace(dgx, rdma=cards, topology=replace(dgx.topology, peermem=False))) == []


def test_ones_own_processes_are_no_strangers(dgx: ProbeReport) -> None:
    assert gpu_verdicts(with_gpu(dgx, 3, process(dgx.host.user, 30 << 30))) == []


def test_an_iommu_is_no_matter_for_a_single_gpu_or_in_a_virtual_machine(dgx: ProbeReport) -> None:
    behind = with_gpu(dgx, 0, lambda gpu: replace(gpu, iommu="DMA-FQ"))
    assert gpu_verdicts(replace(behind, gpus=behind.gpus[:1])) == []
    assert gpu_verdicts(replace(behind, host=replace(behind.host, virtual=True))) == []


def test_gpus_of_which_the_same_is_said_share_a_line(dgx: ProbeReport) -> None:
    report = dgx
    for index in (0, 1, 2, 4, 6, 7):
        report = with_gpu(report, index, state(remap_pending=True))
    (verdict,) = gpu_verdicts(report)
    assert verdict.text.startswith("GPUs 0-2,4,6-7 waiting")
    assert verdict.fix.endswith("`nvidia-smi -r -i 0,1,2,4,6,7`")
    assert verdict.path == "gpus.0.state.remap_pending"


def test_a_choice_that_names_no_gpu_is_told_once(tmp_path: Path) -> None:
    machine = recorded_machine("workstation", tmp_path)
    said = gpu_verdicts(machine.report({**machine.environ, "CUDA_VISIBLE_DEVICES": "9"}))
    assert [(one.level, "names none of them" in one.text) for one in said if "CUDA_VISIBLE" in one.text] == [
        ("red", True)
    ]


def test_hidden_gpus_and_a_missing_module_are_told_once(dgx: ProbeReport) -> None:
    variables = {"CUDA_VISIBLE_DEVICES": ""}
    (hidden,) = gpu_verdicts(replace(dgx, gpus_usable=0, software=replace(dgx.software, variables=variables)))
    assert (hidden.level, hidden.path) == ("amber", "gpus_usable")
    # No variable hides them: what does says so itself.
    assert gpu_verdicts(replace(dgx, gpus_usable=0)) == []
    (module,) = gpu_verdicts(replace(dgx, topology=replace(dgx.topology, peermem=False)))
    assert (module.level, module.fix) == ("note", "`modprobe nvidia_peermem`")


def test_a_machine_without_gpus_has_nothing_said_of_them(dgx: ProbeReport) -> None:
    assert gpu_verdicts(replace(dgx, gpus=(), gpus_usable=0)) == []


@pytest.mark.parametrize(
    ("name", "level"), [("NVIDIA GeForce RTX 3060 Laptop GPU", "note"), ("NVIDIA GeForce RTX 3090", "amber")]
)
def test_a_laptop_is_not_told_to_reseat_its_gpu(dgx: ProbeReport, name: str, level: str) -> None:
    alone = replace(dgx, gpus=(replace(link(1, 8)(dgx.gpus[0]), name=name),))
    (found,) = [one for one in gpu_verdicts(alone) if one.path == "gpus.0.pcie.width"]
    assert found.level == level


def test_gpus_that_are_all_lost_are_told_once(tmp_path: Path) -> None:
    report = recorded_machine("workstation", tmp_path, lost=range(4)).report()
    assert report.gpus_unusable is not None
    assert [one.path for one in gpu_verdicts(report) if one.level == "red"] == ["gpus_unusable.text"]
