from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dsrun.launcher.machine.gpus.usage import GpuNow, GpuUse, gpu_use_by_pid, gpus_now
from support.nvml import GIB, NVMLError, Part, made_up_nvml


def driver(*gpus: Part, percent: dict[str, int] | None = None) -> Any:
    """A driver that tells the load of these GPUs, and of no other."""
    nvml = made_up_nvml(*gpus)()

    def rates(part: Part) -> Any:
        if percent is None or part.uuid not in percent:
            raise NVMLError("not supported")
        return SimpleNamespace(gpu=percent[part.uuid])

    nvml.nvmlDeviceGetUtilizationRates = rates
    return lambda: nvml


def test_a_process_has_the_sum_of_its_memory_and_the_load_of_its_busiest_gpu() -> None:
    gpus = (Part("a", processes=[(7, GIB), (8, 2 * GIB)]), Part("b", processes=[(7, 3 * GIB)]), Part("c"))
    assert gpu_use_by_pid(driver(*gpus, percent={"a": 10, "b": 90, "c": 50})) == {
        7: GpuUse(memory_bytes=4 * GIB, percent=90),
        8: GpuUse(memory_bytes=2 * GIB, percent=10),
    }


def test_what_the_driver_does_not_tell_is_none() -> None:
    assert gpu_use_by_pid(driver(Part("a", processes=[(7, None)]))) == {7: GpuUse(memory_bytes=None, percent=None)}


def test_clients_of_mps_are_listed_and_a_gpu_that_cannot_be_reached_is_left_out() -> None:
    gpus = (Part("a", fails="NoPermission"), Part("b", processes=[(7, GIB)], mps=[(9, 2 * GIB)]))
    assert gpu_use_by_pid(driver(*gpus)) == {
        7: GpuUse(memory_bytes=GIB, percent=None),
        9: GpuUse(memory_bytes=2 * GIB, percent=None),
    }


def test_without_a_driver_there_is_no_use() -> None:
    def missing() -> Any:
        raise ImportError("pynvml")

    assert gpu_use_by_pid(missing) == {}


def test_each_gpu_tells_its_load_and_its_memory_whoever_uses_it() -> None:
    gpus = (Part("a", used_bytes=2 * GIB), Part("lost", fails="GpuIsLost"), Part("b", used_bytes=0))
    assert gpus_now(driver(*gpus, percent={"a": 97})) == [
        GpuNow(index=0, percent=97, memory_used_bytes=2 * GIB, memory_total_bytes=80 * GIB),
        GpuNow(index=2, percent=None, memory_used_bytes=0, memory_total_bytes=80 * GIB),
    ]
