from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsrun.launcher.machine.devices.choice import read_devices
from dsrun.launcher.machine.gpus.read import GpuReport, left_out_of, read_gpus
from support.machines import Machine, recorded_machine
from support.nvml import ERRORS, NVMLError, Part, made_up_nvml
from support.topologies import write_tree

GIB = 1 << 30


def fake_nvml(count: int, *, init: Exception | None = None, **changes: Any) -> SimpleNamespace:
    def start() -> None:
        if init is not None:
            raise init

    calls: dict[str, Any] = {
        "nvmlInit": start,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: count,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}{handle}aa",
        "nvmlDeviceGetName": lambda handle: b"NVIDIA H200",
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=8 * GIB, free=6 * GIB),
        "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, 0),
        "nvmlSystemGetDriverVersion": lambda: "570.1",
        "nvmlSystemGetCudaDriverVersion_v2": lambda: 12080,
    }
    return SimpleNamespace(NVMLError=NVMLError, **(calls | changes))


def test_gpus_are_read_from_the_driver() -> None:
    report = read_gpus({"CUDA_VISIBLE_DEVICES": "1"}, load_nvml=lambda: fake_nvml(2))
    assert (report.usable_count, report.driver, report.driver_cuda, report.reason) == (1, "570.1", "12.8", None)
    assert [(gpu.name, gpu.memory_free_bytes, gpu.compute_capability) for gpu in report.gpus] == [
        ("NVIDIA H200", 6 * GIB, "9.0"),
        ("NVIDIA H200", 6 * GIB, "9.0"),
    ]
    assert [gpu.usable for gpu in report.gpus] == [False, True]


def test_a_gpu_in_mig_mode_without_slices_is_seen_by_no_job(tmp_path: Path) -> None:
    machine = recorded_machine("a100_mig", tmp_path)
    report = read_gpus({}, load_nvml=machine.load_nvml, root=machine.root)
    assert (report.usable_count, [gpu.usable for gpu in report.gpus]) == (2, [True, False, True])
    assert [None if place.slices is None else len(place.slices) for place in report.places] == [7, 0, None]
    only = read_gpus({"CUDA_VISIBLE_DEVICES": "1"}, load_nvml=machine.load_nvml, root=machine.root)
    assert only.usable_count == 0


def test_a_job_may_have_several_slices_where_a_process_has_one() -> None:
    report = read_gpus({"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}, load_nvml=lambda: fake_nvml(1))
    assert report.usable_count == 2


def test_a_question_the_driver_does_not_answer_leaves_the_others_standing() -> None:
    def refuse(*_: object) -> None:
        raise NVMLError("not supported")

    nvml = fake_nvml(1, nvmlDeviceGetMemoryInfo=refuse, nvmlShutdown=refuse)
    (gpu,) = read_gpus({}, load_nvml=lambda: nvml).gpus
    assert (gpu.name, gpu.memory_total_bytes) == ("NVIDIA H200", None)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ERRORS["LibraryNotFound"](), "no NVIDIA driver"),
        (
            NVMLError("Driver/library version mismatch"),
            "the NVIDIA driver does not answer: Driver/library version mismatch",
        ),
    ],
)
def test_no_driver_is_an_answer_and_not_a_crash(error: Exception, reason: str, tmp_path: Path) -> None:
    report = read_gpus({}, load_nvml=lambda: fake_nvml(0, init=error), root=tmp_path)
    assert (report.gpus, report.usable_count, report.reason) == ((), 0, reason)


def test_a_gpu_is_told_with_its_number_to_the_job() -> None:
    report = read_gpus({"CUDA_VISIBLE_DEVICES": "2,0"}, load_nvml=lambda: fake_nvml(3))
    assert [(gpu.usable, gpu.cuda_index) for gpu in report.gpus] == [(True, 1), (False, None), (True, 0)]


def lost_at(index: int, name: str = "GpuIsLost") -> Any:
    def handle(number: int) -> int:
        if number == index:
            raise ERRORS[name]
        return number

    return fake_nvml(3, nvmlDeviceGetHandleByIndex=handle)


@pytest.mark.parametrize(
    ("name", "words"), [("GpuIsLost", "GPU is lost"), ("NoPermission", "Insufficient Permissions")]
)
def test_one_gpu_that_is_lost_or_forbidden_is_left_out_and_the_others_are_a_jobs(name: str, words: str) -> None:
    report = read_gpus({}, load_nvml=lambda: lost_at(1, name))
    assert [(gpu.index, gpu.usable, gpu.cuda_index, gpu.lost) for gpu in report.gpus] == [
        (0, True, 0, False),
        (1, False, None, True),
        (2, True, 1, False),
    ]
    assert (report.usable_count, report.fault, report.reason) == (2, None, None)
    assert [(gpu.index, gpu.reason, gpu.is_forbidden) for gpu in report.left_out] == [
        (1, words, name == "NoPermission")
    ]


def test_cuda_visible_devices_counts_the_gpus_that_are_left() -> None:
    report = read_gpus({"CUDA_VISIBLE_DEVICES": "1"}, load_nvml=lambda: lost_at(1))
    assert [(gpu.usable, gpu.cuda_index) for gpu in report.gpus] == [(False, None), (False, None), (True, 0)]


# why there are none


#: Of an NVIDIA card on the PCI bus.
GPU_FILES = {"vendor": "0x10de\n", "class": "0x030200\n"}


def read(machine: Machine, **environ: str) -> GpuReport:
    return read_gpus({**machine.environ, **environ}, load_nvml=machine.load_nvml, root=machine.root)


FAULTS = {
    "LibRmVersionMismatch": (
        r"Driver/library version mismatch: the driver was updated, and the old kernel module \S+ is still loaded",
        "reboot this machine",
    ),
    "Unknown": ("Unknown Error: this process may not open /dev/nvidia0", "ls -l"),
    "DriverNotLoaded": ("NVIDIA's kernel module is not loaded", "modprobe"),
    "LibraryNotFound": ("libnvidia-ml.so.1, the driver's library, is not found, and the GPUs are there", "--nv"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_driver_that_fails_beside_its_gpus_is_a_fault_with_a_way_out(tmp_path: Path, name: str) -> None:
    report = read(recorded_machine("workstation", tmp_path, driver_fails=name))
    reason, way_out = FAULTS[name]
    assert report.fault is not None
    assert re.fullmatch(reason, report.fault.reason)
    assert way_out in report.fault.way_out
    assert (report.usable_count, report.reason) == (0, report.fault.reason)


def test_the_choice_of_no_gpu_is_no_fault_of_the_driver(tmp_path: Path) -> None:
    machine = recorded_machine("workstation", tmp_path, driver_fails="LibRmVersionMismatch")
    assert read(machine, CUDA_VISIBLE_DEVICES="").fault is None


def test_a_machine_whose_gpus_are_all_lost_is_a_fault(tmp_path: Path) -> None:
    report = read(recorded_machine("l40s_pcie", tmp_path, lost=range(8)))
    assert report.fault is not None
    assert report.fault.reason.endswith("GPUs: GPU is lost")


@pytest.mark.parametrize("value", ["4", "GPU-9", "0,0"])
def test_a_choice_that_names_no_gpu_is_a_fault_and_no_job_on_the_cpu(tmp_path: Path, value: str) -> None:
    report = read(recorded_machine("workstation", tmp_path), CUDA_VISIBLE_DEVICES=value)
    assert report.fault is not None
    assert report.fault.reason == (
        f"CUDA_VISIBLE_DEVICES is `{value}` and names none of them; this process sees GPUs 0 to 3"
    )


def test_a_choice_of_a_gpu_that_is_lost_is_told_so(tmp_path: Path) -> None:
    report = read(recorded_machine("workstation", tmp_path, lost=[3]), CUDA_VISIBLE_DEVICES="3")
    assert report.fault is not None
    assert report.fault.reason == (
        "CUDA_VISIBLE_DEVICES is `3` and names none of them; this process sees GPUs 0 to 2; "
        "GPU 3 left out: the driver counts it and cannot reach it (GPU is lost)"
    )
    assert report.fault.way_out.endswith("; exchange it if it comes back")


def test_a_slice_that_was_made_anew_is_a_fault_under_its_old_name_and_ends_the_list(tmp_path: Path) -> None:
    old, new = (f"MIG-0a1b2c3d-0000-0000-0000-00000000000{number}" for number in (1, 2))
    load_nvml = made_up_nvml(Part("GPU-0", slices=[Part(new)]), Part("GPU-1"))
    gone = read_gpus({"CUDA_VISIBLE_DEVICES": old}, load_nvml=load_nvml, root=tmp_path)
    assert gone.fault is not None
    assert gone.fault.reason == (
        f"CUDA_VISIBLE_DEVICES is `{old}` and names none of them; this process sees GPUs 0 to 1"
    )
    for value, count in ((f"{new},{old},1", 1), (f"{new},1", 2), ("MIG-GPU-0/1/0", 1)):
        assert read_gpus({"CUDA_VISIBLE_DEVICES": value}, load_nvml=load_nvml, root=tmp_path).usable_count == count
        assert len(read_devices({"CUDA_VISIBLE_DEVICES": value}, load_nvml=load_nvml)) == count


def test_a_choice_beside_a_gpu_in_mig_mode_is_not_blamed_on_the_mode(tmp_path: Path) -> None:
    load_nvml = made_up_nvml(Part("GPU-0", slices=[]), Part("GPU-1"))
    outside, cut = (
        read_gpus({"CUDA_VISIBLE_DEVICES": value}, load_nvml=load_nvml, root=tmp_path).fault for value in ("7", "0")
    )
    assert outside is not None
    assert outside.reason.startswith(
        "CUDA_VISIBLE_DEVICES is `7` and names none of them; this process sees GPUs 0 to 1; "
    )
    assert cut is not None
    assert cut.reason == "MIG mode is on, and there are no slices"


def test_a_gpu_in_mig_mode_without_slices_is_a_fault_where_it_is_the_only_one(tmp_path: Path) -> None:
    def cut(count: int) -> GpuReport:
        mode = {
            "nvmlDeviceGetMigMode": lambda gpu: [int(gpu == 0)] * 2,
            "nvmlDeviceGetMaxMigDeviceCount": lambda gpu: 0,
        }
        return read_gpus({}, load_nvml=lambda: fake_nvml(count, **mode), root=tmp_path)

    alone, beside = cut(1), cut(2)
    assert alone.fault is not None
    assert alone.fault.reason == "MIG mode is on, and there are no slices"
    assert (beside.usable_count, beside.fault) == (1, None)
    (left_out,) = left_out_of(beside)
    assert left_out.text == "GPU 0 left out: in MIG mode without slices, CUDA sees nothing of it"


def test_a_gpu_that_the_driver_could_not_start_is_counted(tmp_path: Path) -> None:
    machine = recorded_machine("workstation", tmp_path)
    assert read(machine).unlisted == 0
    write_tree(tmp_path, {"dev/nvidia9": ""})
    report = read(machine)
    assert (report.unlisted, report.fault) == (1, None)


def test_the_file_of_a_gpu_that_was_handed_to_a_virtual_machine_is_no_gpu_that_did_not_start(tmp_path: Path) -> None:
    machine = recorded_machine("workstation", tmp_path)
    card = tmp_path / "sys/bus/pci/devices/0000:99:00.0"
    vfio = tmp_path / "sys/bus/pci/drivers/vfio-pci"
    vfio.mkdir(parents=True)
    write_tree(tmp_path, {f"{card.relative_to(tmp_path)}/{name}": text for name, text in GPU_FILES.items()})
    (card / "driver").symlink_to(vfio)
    assert read(machine).unlisted == 0
    # Handed over since the boot.
    write_tree(tmp_path, {"dev/nvidia4": ""})
    assert read(machine).unlisted == 0
    write_tree(tmp_path, {"dev/nvidia5": ""})
    assert read(machine).unlisted == 1


def test_gpus_of_other_jobs_are_not_missed(tmp_path: Path) -> None:
    report = read(recorded_machine("hgx_h200_job", tmp_path))
    assert (report.usable_count, report.unlisted, report.fault, report.idle) == (4, 0, None, None)


def test_a_missing_package_is_a_fault_beside_gpus_and_none_without(tmp_path: Path) -> None:
    def no_package() -> Any:
        raise ImportError

    assert read_gpus({}, load_nvml=no_package, root=tmp_path).fault is None
    machine = replace(recorded_machine("workstation", tmp_path), load_nvml=no_package)
    fault = read(machine).fault
    assert fault is not None
    assert fault.way_out == "`pip install nvidia-ml-py`"
