"""Which GPU is whose on one host, as its agent finds it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsrun.errors import InputError
from dsrun.launcher.hosts.spec import HostSpec
from dsrun.launcher.machine.devices.by_rank import find_gpus, gpus_of_ranks, rank_variables, slice_note
from dsrun.launcher.plan.launch_plan import GpuPlace, NodePlan, WorkerSpec
from support.machines import recorded_machine
from support.topologies import write_gpus, write_tree


def opens(path: Path) -> bool:
    """Whether a device file of a recorded machine may be opened: one that is forbidden is a socket."""
    return path.is_file()


def host(ranks: int, *, chosen: tuple[int, ...] | None = None, gpus: tuple[GpuPlace, ...] = (), **env: str) -> NodePlan:
    return NodePlan(
        node_rank=0,
        host=HostSpec(name="n1", slots=ranks, source="hosts:1"),
        workers=tuple(WorkerSpec(rank=rank, local_rank=rank, env=dict(env)) for rank in range(ranks)),
        gpus=gpus,
        chosen=chosen,
    )


def gpu(number: int, *, model: str = "H100", slices: tuple[str, ...] | None = None) -> GpuPlace:
    return GpuPlace(uuid=f"GPU-{number}", address=f"0000:{number:02x}:00.0", model=model, slices=slices)


BOX = tuple(gpu(number) for number in range(4))
CUT = gpu(0, slices=("MIG-a", "MIG-b"))


def visible(node: NodePlan, **given: str) -> list[str | None]:
    return [own.get("CUDA_VISIBLE_DEVICES") for own in rank_variables(node, given)]


# what the kernel shows


def test_gpus_that_a_device_cgroup_takes_away_are_not_counted(tmp_path: Path) -> None:
    machine = recorded_machine("hgx_h200_job", tmp_path)
    found = find_gpus(machine.root, may_open=opens)
    assert [gpu.address for gpu in found] == [gpu.pci_address for gpu in machine.report().gpus]
    assert len(list((tmp_path / "proc/driver/nvidia/gpus").iterdir())) == 8


def test_a_container_without_gpus_has_none_though_proc_shows_its_hosts(tmp_path: Path) -> None:
    write_gpus(tmp_path, [0, 1])
    assert len(find_gpus(tmp_path)) == 2
    for number in range(2):
        (tmp_path / f"dev/nvidia{number}").unlink()
    assert find_gpus(tmp_path) == ()


def test_the_name_of_a_gpu_that_sleeps_is_unknown_and_an_excluded_one_is_left_out(tmp_path: Path) -> None:
    machine = recorded_machine("desktop", tmp_path)
    awake, asleep = find_gpus(machine.root)
    assert (awake.uuid is None, asleep.uuid, asleep.model) == (False, None, "NVIDIA GeForce RTX 3090")
    information = tmp_path / "proc/driver/nvidia/gpus/0000:02:00.0/information"
    information.write_text(information.read_text().replace("GPU Excluded: \t No", "GPU Excluded: \t Yes"))
    assert find_gpus(machine.root) == (awake,)


def test_gpus_are_in_the_order_of_their_addresses_as_numbers(tmp_path: Path) -> None:
    for address in ("10000:01:00.0", "0009:01:00.0", "0019:01:00.0"):
        write_tree(tmp_path, {f"proc/driver/nvidia/gpus/{address}/information": "Model: \t\t H100\n"})
    assert [gpu.address for gpu in find_gpus(tmp_path)] == ["0009:01:00.0", "0019:01:00.0", "10000:01:00.0"]


# what ranks see


def test_chosen_places_count_what_the_hosts_own_variable_names() -> None:
    assert visible(host(1, chosen=(0,)), CUDA_VISIBLE_DEVICES="2,3") == ["2"]
    assert visible(host(2, chosen=(1, 0)), CUDA_VISIBLE_DEVICES="2, 3") == ["3,2"] * 2
    assert visible(host(1, chosen=(1,), gpus=BOX), CUDA_VISIBLE_DEVICES="2,3") == ["GPU-3"]
    assert visible(host(1, chosen=(1,), gpus=BOX), CUDA_VISIBLE_DEVICES="GPU-3,GPU-1") == ["GPU-1"]


def test_chosen_places_are_gpus_where_the_host_names_none() -> None:
    assert visible(host(2, chosen=(1, 3), gpus=BOX)) == ["GPU-1,GPU-3"] * 2
    assert visible(host(2, chosen=(1, 3))) == ["1,3"] * 2


def test_places_of_unequal_gpus_that_cuda_counts_by_speed_are_refused_on_other_hosts_too() -> None:
    unequal = (gpu(0, model="RTX 3090"), gpu(1, model="RTX 4090"))
    order = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    with pytest.raises(InputError, match="leaves it to CUDA which GPU a number means, and hosts:1 counts 0: RTX 3090"):
        rank_variables(host(1, chosen=(1,), gpus=unequal), order)
    assert visible(host(1, chosen=(1,), gpus=unequal), CUDA_VISIBLE_DEVICES="GPU-1,GPU-0", **order) == ["GPU-0"]
    assert visible(host(1, chosen=(1,), gpus=BOX), **order) == ["GPU-1"]
    assert visible(host(1, gpus=unequal), **order) == [None]


def test_a_place_that_no_process_there_sees_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        rank_variables(host(1, chosen=(2,)), {"CUDA_VISIBLE_DEVICES": "2,3"})
    assert caught.value.render() == (
        "error: hosts:1: GPU 2 of host `n1` is asked for, and CUDA_VISIBLE_DEVICES there is '2,3'\n"
        "hint: ids count the GPUs that CUDA_VISIBLE_DEVICES names there; choose others with `--include`"
    )
    with pytest.raises(InputError, match="GPU 4 of host `n1` is asked for, and 4 are there"):
        rank_variables(host(1, chosen=(4,), gpus=BOX), {})


def test_what_nobody_chose_stays_as_it_is() -> None:
    assert visible(host(2, gpus=BOX)) == visible(host(2), CUDA_VISIBLE_DEVICES="2,3") == [None, None]
    # The front end has held devices of its own machine, and named them.
    assert visible(host(2, chosen=(0, 1), CUDA_VISIBLE_DEVICES="GPU-7")) == [None, None]
    assert visible(host(1, chosen=(0,)), DSRUN_BACKEND="gloo") == [None]


def test_each_rank_gets_a_slice_of_those_that_the_scheduler_named() -> None:
    names = "MIG-a,MIG-b,MIG-c"
    assert visible(host(3), CUDA_VISIBLE_DEVICES=names) == ["MIG-a", "MIG-b", "MIG-c"]
    assert visible(host(2, chosen=(2, 0)), CUDA_VISIBLE_DEVICES=names) == ["MIG-c", "MIG-a"]
    assert visible(host(2, gpus=(CUT,))) == ["MIG-a", "MIG-b"]


def test_one_slice_of_each_gpu_comes_before_a_second_one_of_any() -> None:
    gpus = (CUT, gpu(1, slices=("MIG-c", "MIG-d")), gpu(2))
    assert visible(host(4, gpus=gpus)) == ["MIG-a", "MIG-c", "GPU-2", "MIG-b"]
    # Places count devices as people read them.
    assert visible(host(2, gpus=gpus, chosen=(1, 2))) == ["MIG-b", "MIG-c"]


def test_ranks_on_several_slices_are_told_what_that_means() -> None:
    several = [{"CUDA_VISIBLE_DEVICES": name} for name in ("MIG-a", "MIG-b")]
    note = slice_note(several, {})
    assert note is not None
    assert note.startswith(
        "2 MIG slices: each rank sees its own as cuda:0, and NCCL does not connect slices of one GPU"
    )
    assert slice_note(several, {"DSRUN_BACKEND": "gloo"}) is None
    assert slice_note(several[:1], {}) is slice_note([{}, {}], {}) is None


# whose is whose


def numbers(gpus: tuple[GpuPlace, ...], *values: str | None, **given: str) -> list[int | None]:
    environs = [given if value is None else {"CUDA_VISIBLE_DEVICES": value, **given} for value in values]
    return [None if its is None else gpus.index(its) for its in gpus_of_ranks(gpus, environs)]


def test_the_local_rank_counts_what_all_ranks_see() -> None:
    assert numbers(BOX, None, None, None) == [0, 1, 2]
    assert numbers(BOX, "3,0", "3,0") == [3, 0]
    assert numbers(BOX, "GPU-2,GPU-1", "GPU-2,GPU-1", "GPU-2,GPU-1") == [2, 1, None]
    assert numbers(BOX, "", "") == [None, None]


def test_ranks_that_train_on_the_cpu_use_none() -> None:
    assert numbers(BOX, None, None, DSRUN_BACKEND="gloo") == [None, None]
    assert numbers(BOX, "3", "1", DSRUN_BACKEND="gloo") == [None, None]
    assert numbers(BOX, None, None, DSRUN_BACKEND="nccl") == [0, 1]


def test_a_rank_that_was_shown_a_gpu_of_its_own_uses_that_one() -> None:
    assert numbers(BOX, "3", "1") == [3, 1]
    assert numbers((CUT, gpu(1)), "MIG-b", "1", "MIG-elsewhere") == [0, 1, None]
    assert numbers((CUT, gpu(1)), None, None, None, None) == [0, 1, 0, None]


def test_numbers_of_unequal_gpus_mean_nothing_here_where_cuda_sorts_them_by_speed() -> None:
    unequal = (gpu(0, model="RTX 3090"), gpu(1, model="RTX 4090"))
    assert numbers(unequal, "0", CUDA_DEVICE_ORDER="FASTEST_FIRST") == [None]
    assert numbers(unequal, None, CUDA_DEVICE_ORDER="FASTEST_FIRST") == [None]
    assert numbers(unequal, "GPU-1", CUDA_DEVICE_ORDER="FASTEST_FIRST") == [1]
    assert numbers(unequal, "0", CUDA_DEVICE_ORDER="PCI_BUS_ID") == numbers(unequal, "0") == [0]
    assert numbers(BOX, "2", CUDA_DEVICE_ORDER="FASTEST_FIRST") == [2]
