from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from dsrun.errors import DsrunError
from dsrun.launcher.machine.devices.choice import (
    Device,
    DeviceLease,
    held_devices,
    own_line,
    read_devices,
    take_devices,
    user_of_process,
)
from support.machines import recorded_machine
from support.nvml import GIB, MIB, NVMLError, Part, box, made_up_nvml
from support.topologies import write_tree


def read(*gpus: Part, visible: str | None = None) -> tuple[Device, ...]:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return read_devices(environ, load_nvml=made_up_nvml(*gpus), user_of={4242: "bob"}.get)


def taken(
    devices: tuple[Device, ...], count: int, leased: Mapping[str, str] | None = None, *, share: bool = False
) -> str:
    chosen, _ = take_devices(devices, count, leased=leased or {}, share=share)
    return " ".join(device.name for device in chosen)


# what the driver says


def test_a_gpu_is_used_by_processes_that_hold_more_than_a_little() -> None:
    devices = read(*box(4, g0=[(1, 30 * MIB)], g1=[(4242, 9 * GIB), (7, 40 * MIB)], g2=[(7, None)]))
    assert [device.used_by for device in devices] == [(), ("pid 4242 of user bob",), ("pid 7",), ()]


def test_memory_that_no_visible_process_holds_is_another_containers() -> None:
    (device,) = read(Part("GPU-0", used_bytes=37 * GIB))
    assert device.used_by == ("processes that cannot be seen from here (37 GiB)",)


def test_in_wsl_what_nobody_listed_is_the_desktop_of_windows_up_to_half_of_a_gpu(tmp_path: Path) -> None:
    write_tree(tmp_path, {"dev/dxg": ""})
    parts = [Part("GPU-0", used_bytes=5 * GIB), Part("GPU-1", processes=[(4242, 9 * GIB)], used_bytes=9 * GIB)]
    load_nvml = made_up_nvml(*parts, Part("GPU-2", used_bytes=50 * GIB))
    found = read_devices({}, load_nvml=load_nvml, user_of={4242: "bob"}.get, root=tmp_path)
    assert [(device.used_by, device.desktop_bytes >> 30) for device in found] == [
        ((), 5),
        (("pid 4242 of user bob",), 0),
        (("processes that cannot be seen from here (50 GiB)",), 0),
    ]


def test_a_small_process_that_is_seen_does_not_hide_a_large_one_that_is_not() -> None:
    (device,) = read(Part("GPU-0", processes=[(9, 60 * MIB)], used_bytes=70 * GIB))
    assert device.used_by == ("processes that cannot be seen from here (69 GiB)",)
    (both,) = read(Part("GPU-0", processes=[(4242, 30 * GIB)], used_bytes=70 * GIB))
    assert both.used_by == ("pid 4242 of user bob", "processes that cannot be seen from here (40 GiB)")


def test_memory_that_listed_processes_hold_is_nobody_elses() -> None:
    own = [(os.getpid(), 70 * GIB)]
    gpus = [
        Part("GPU-0", processes=[(9, 60 * MIB)], used_bytes=1 * GIB),
        Part("GPU-1", processes=own, used_bytes=71 * GIB),
        # Whoever's memory the driver does not tell may have all of it.
        Part("GPU-2", processes=[(os.getpid(), None)], used_bytes=71 * GIB),
    ]
    assert [device.used_by for device in read(*gpus)] == [(), (), ()]


def test_clients_of_mps_are_users_and_its_server_is_not() -> None:
    server, client = (31, 30 * MIB), (4242, 9 * GIB)
    (device,) = read(Part("GPU-0", processes=[server], mps=[client], used_bytes=10 * GIB))
    assert device.used_by == ("pid 4242 of user bob",)
    (listed_twice,) = read(Part("GPU-0", processes=[server, client], mps=[client], used_bytes=10 * GIB))
    assert listed_twice.used_by == ("pid 4242 of user bob",)


def test_a_desktop_does_not_count_and_its_memory_is_nobody_elses() -> None:
    xorg, browser = (11, 900 * MIB), (12, 1600 * MIB)
    (device,) = read(Part("GPU-0", graphics=[xorg, browser], used_bytes=3 * GIB))
    assert (device.used_by, device.desktop_bytes) == ((), 2500 * MIB)
    (busy,) = read(Part("GPU-0", graphics=[xorg], processes=[(4242, 8 * GIB)], used_bytes=9 * GIB))
    assert busy.used_by == ("pid 4242 of user bob",)


def test_who_draws_and_computes_counts_with_more_than_a_desktops_part() -> None:
    browser, simulator = (12, 700 * MIB), (4242, 20 * GIB)
    (device,) = read(Part("GPU-0", graphics=[browser, simulator], processes=[browser, simulator], used_bytes=22 * GIB))
    assert (device.used_by, device.desktop_bytes) == (("pid 4242 of user bob",), 700 * MIB)


def test_page_cache_in_the_memory_of_a_gpu_that_is_a_numa_node_is_no_user() -> None:
    gh200 = Part("GPU-0", used_bytes=30 * GIB, numa_node=1)
    (device,) = read(gh200)
    assert device.used_by == ()
    (busy,) = read(replace(gh200, processes=[(4242, 9 * GIB)]))
    assert busy.used_by == ("pid 4242 of user bob",)


def test_no_gpu_of_a_recorded_machine_without_jobs_is_busy(tmp_path: Path) -> None:
    gh200 = recorded_machine("gh200", tmp_path / "gh200").load_nvml
    desktop = recorded_machine("desktop", tmp_path / "desktop").load_nvml
    cut = recorded_machine("a100_mig", tmp_path / "a100_mig").load_nvml
    assert [device.used_by for device in read_devices({}, load_nvml=gh200)] == [()]
    assert [device.used_by for device in read_devices({}, load_nvml=desktop)] == [(), ()]
    assert [device.label for device in read_devices({}, load_nvml=cut)] == [
        *(f"slice {number} of GPU 0" for number in range(7)),
        "GPU 2",
    ]


@pytest.mark.parametrize("fault", ["GpuIsLost", "NoPermission"])
def test_a_gpu_that_cannot_be_reached_is_left_out_and_the_others_are_counted_without_it(fault: str) -> None:
    gpus = [Part("GPU-0"), Part("GPU-1", fails=fault), Part("GPU-2")]
    assert [(device.name, device.label) for device in read(*gpus)] == [("GPU-0", "GPU 0"), ("GPU-2", "GPU 2")]
    assert [device.name for device in read(*gpus, visible="1")] == ["GPU-2"]


def test_a_gpu_in_mig_mode_without_slices_is_no_device() -> None:
    gpus = [Part("GPU-0", slices=[]), Part("GPU-1")]
    assert [device.name for device in read(*gpus)] == ["GPU-1"]
    assert read(*gpus, visible="0") == ()
    assert [device.name for device in read(*gpus, visible="1,0")] == ["GPU-1"]


@pytest.mark.parametrize(
    ("visible", "names"),
    [(None, ["GPU-0", "GPU-1", "GPU-2"]), ("2,0", ["GPU-2", "GPU-0"]), ("GPU-1", ["GPU-1"]), ("", []), ("9", [])],
)
def test_only_what_cuda_visible_devices_lists_is_offered_in_its_order(visible: str | None, names: list[str]) -> None:
    assert [device.name for device in read(*box(3), visible=visible)] == names


MIG = Part("GPU-1", slices=[Part("MIG-a", processes=[(4242, None)]), Part("MIG-b")])


def test_slices_are_devices_of_their_own() -> None:
    devices = read(Part("GPU-0"), MIG)
    assert [(device.name, device.label, device.is_slice) for device in devices] == [
        ("GPU-0", "GPU 0", False),
        ("MIG-a", "slice 0 of GPU 1", True),
        ("MIG-b", "slice 1 of GPU 1", True),
    ]
    assert devices[1].used_by == ("pid 4242 of user bob",)


def test_slices_are_chosen_by_their_uuids() -> None:
    assert [device.name for device in read(Part("GPU-0"), MIG, visible="MIG-b,MIG-a")] == ["MIG-b", "MIG-a"]
    (unknown,) = read(Part("GPU-0"), visible="MIG-elsewhere")
    assert (unknown.name, unknown.is_slice) == ("MIG-elsewhere", True)


def test_the_made_up_driver_answers_to_names_of_the_real_one_only() -> None:
    pynvml = pytest.importorskip("pynvml")
    assert [name for name in vars(made_up_nvml()()) if not hasattr(pynvml, name)] == []


def test_a_driver_that_fails_is_told_with_its_reason() -> None:
    nvml = made_up_nvml()()

    def refuse() -> int:
        raise NVMLError("GPU is lost")

    nvml.nvmlDeviceGetCount = refuse
    with pytest.raises(DsrunError, match=r"cannot be asked which are free: .*GPU is lost"):
        read_devices({}, load_nvml=lambda: nvml)


def test_the_user_of_a_process_is_named_and_of_a_dead_one_unknown() -> None:
    assert user_of_process(os.getpid()) is not None
    assert user_of_process(2**22 + 1) is None


def test_the_processes_that_started_this_one_do_not_count() -> None:
    gpus = box(3, g0=[(os.getpid(), GIB)], g1=[(os.getppid(), GIB)], g2=[(4242, GIB)])
    assert [bool(device.used_by) for device in read(*gpus)] == [False, False, True]
    assert own_line()[:2] == [os.getpid(), os.getppid()]


# the choice


def test_free_devices_are_taken_first_and_in_order() -> None:
    devices = read(*box(8, g0=[(4242, GIB)], g3=[(7, GIB)]))
    assert taken(devices, 3) == "GPU-1 GPU-2 GPU-4"
    assert taken(devices, 3, {"GPU-1": "job x"}) == "GPU-2 GPU-4 GPU-5"


def test_one_slice_of_each_gpu_is_taken_before_a_second_one_of_any() -> None:
    cut = [Part(f"GPU-{gpu}", slices=[Part(f"MIG-{gpu}{part}") for part in range(2)]) for gpu in range(2)]
    devices = read(*cut, Part("GPU-2"))
    assert taken(devices, 3) == "MIG-00 MIG-10 GPU-2"
    assert taken(devices, 4) == "MIG-00 MIG-01 MIG-10 GPU-2"
    assert taken(devices, 2, {"MIG-00": "job x"}) == "MIG-01 MIG-10"


def test_too_few_free_devices_are_none_and_say_who_is_on_the_others() -> None:
    devices = read(*box(3, g0=[(4242, GIB)]))
    chosen, obstacles = take_devices(devices, 2, leased={"GPU-1": "job x", "GPU-2": "job x"}, share=False)
    assert chosen == ()
    assert obstacles == {"pid 4242 of user bob": ["GPU 0"], "job x": ["GPU 1", "GPU 2"]}


def test_sharing_prefers_free_devices_then_those_of_others_and_leased_ones_last() -> None:
    devices = read(*box(4, g0=[(4242, GIB)], g2=[(7, GIB)]))
    assert taken(devices, 1, {"GPU-1": "job x"}, share=True) == "GPU-3"
    assert taken(devices, 3, {"GPU-1": "job x"}, share=True) == "GPU-0 GPU-2 GPU-3"
    assert taken(devices, 4, {"GPU-1": "job x"}, share=True) == "GPU-0 GPU-1 GPU-2 GPU-3"


# what ranks see


def test_a_part_of_the_gpus_is_named_by_uuid_and_all_of_them_leave_the_variable_alone() -> None:
    devices = read(*box(3))
    some = held_devices(devices[1:], devices, ranks=2)
    assert some == DeviceLease(cuda_visible_devices="GPU-1,GPU-2", labels=("GPU 1", "GPU 2"))
    assert some.environment(1) == {"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2"}
    assert held_devices(devices, devices, ranks=3).environment(0) == {}


def test_each_rank_sees_its_own_slice() -> None:
    devices = read(MIG)
    held = held_devices(devices, devices, ranks=3)
    assert [held.environment(rank)["CUDA_VISIBLE_DEVICES"] for rank in range(3)] == ["MIG-a", "MIG-b", "MIG-a"]


def test_ranks_beside_a_lost_gpu_are_told_their_gpus_by_name(tmp_path: Path) -> None:
    # CUDA may count the lost one or not: a number is not sure to mean the GPU that is leased.
    whole = recorded_machine("workstation", tmp_path / "whole")
    devices = read_devices({}, load_nvml=whole.load_nvml, own=[])
    assert held_devices(devices, devices, ranks=4).cuda_visible_devices is None
    broken = recorded_machine("workstation", tmp_path / "broken", lost=[1])
    left = read_devices({}, load_nvml=broken.load_nvml, own=[])
    held = held_devices(left, left, ranks=3)
    assert held.labels == ("GPU 0", "GPU 2", "GPU 3")
    assert held.cuda_visible_devices == ",".join(device.name for device in left)


def test_only_who_keeps_a_job_away_is_looked_up() -> None:
    asked: list[int] = []

    def user_of(pid: int) -> str:
        asked.append(pid)
        return "bob"

    part = Part("GPU-0", graphics=[(12, GIB)], processes=[(12, GIB), (5, MIB), (77, 9 * GIB), (4242, 9 * GIB)])
    (device,) = read_devices({}, load_nvml=made_up_nvml(part), user_of=user_of, own=[77])
    assert (device.used_by, asked) == (("pid 4242 of user bob",), [4242])
