from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dsrun.launcher.probe_gpu import list_gpus, read_gpus, visible_devices

GIB = 1 << 30


class NVMLError(Exception):
    pass


class NVMLError_LibraryNotFound(NVMLError):
    pass


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


def test_a_job_may_have_several_slices_where_a_process_has_one() -> None:
    report = read_gpus({"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}, load_nvml=lambda: fake_nvml(1))
    assert (report.usable_count, report.slice_count) == (2, 2)


def test_a_question_the_driver_does_not_answer_leaves_the_others_standing() -> None:
    def refuse(*_: object) -> None:
        raise NVMLError("not supported")

    nvml = fake_nvml(1, nvmlDeviceGetMemoryInfo=refuse, nvmlShutdown=refuse)
    (gpu,) = read_gpus({}, load_nvml=lambda: nvml).gpus
    assert (gpu.name, gpu.memory_total_bytes) == ("NVIDIA H200", None)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NVMLError_LibraryNotFound(), "no NVIDIA driver"),
        (
            NVMLError("Driver/library version mismatch"),
            "the NVIDIA driver does not answer: Driver/library version mismatch",
        ),
    ],
)
def test_no_driver_is_an_answer_and_not_a_crash(error: Exception, reason: str) -> None:
    report = read_gpus({}, load_nvml=lambda: fake_nvml(0, init=error))
    assert (report.gpus, report.usable_count, report.reason) == ((), 0, reason)


@pytest.mark.parametrize(
    ("value", "devices"),
    [
        (None, (0, 1, 2)),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("2,0", (2, 0)),
        (" 1 , 2 ", (1, 2)),
        ("0,9,1", (0,)),
        ("0,-1,1", (0,)),
        ("1,1", ()),
        ("GPU-b", (1,)),
        ("GPU-a", ()),
        ("GPU-aa1,GPU-aa0", (2, 0)),
        ("MIG-x,MIG-y", (None, None)),
        ("MIG-x,1", (None, 1)),
        ("MIG-x,MIG-x", ()),
        ("0,x", (0,)),
    ],
)
def test_visible_devices_follow_cudas_rules_and_a_job_may_have_several_slices(
    value: str | None, devices: tuple[int | None, ...]
) -> None:
    assert visible_devices(value, ["GPU-aa0", "GPU-bb0", "GPU-aa1"]) == devices


def test_a_gpu_is_told_with_its_number_to_the_job() -> None:
    report = read_gpus({"CUDA_VISIBLE_DEVICES": "2,0"}, load_nvml=lambda: fake_nvml(3))
    assert [(gpu.usable, gpu.cuda_index) for gpu in report.gpus] == [(True, 1), (False, None), (True, 0)]


def lost_at(index: int) -> Any:
    def handle(number: int) -> int:
        if number == index:
            raise NVMLError("GPU is lost")
        return number

    return fake_nvml(3, nvmlDeviceGetHandleByIndex=handle)


def test_a_lost_gpu_is_an_error_of_the_driver_for_a_launch() -> None:
    report = read_gpus({}, load_nvml=lambda: lost_at(1))
    assert (report.gpus, report.reason) == ((), "the NVIDIA driver does not answer: GPU is lost")


def test_a_lost_gpu_is_listed_where_that_is_asked_for_and_no_job_has_it() -> None:
    report = list_gpus(lost_at(1), None, keep_lost=True)
    assert [(gpu.lost, gpu.usable, gpu.name) for gpu in report.gpus] == [
        (False, True, "NVIDIA H200"),
        (True, False, None),
        (False, True, "NVIDIA H200"),
    ]
    assert report.usable_count == 2
