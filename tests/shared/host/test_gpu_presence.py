"""What the kernel shows of GPUs, on trees of the machines on which a wrong guess would refuse or waste a job."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from dsrun.host.gpu_presence import (
    Accelerators,
    hides_all_gpus,
    nvidia_open_files,
    nvidia_presence,
    other_accelerators,
)
from support.topologies import write_tree

NVIDIA, AMD, INTEL, ASPEED, GAUDI = "0x10de", "0x1002", "0x8086", "0x1a03", "0x1da3"
VGA, DISPLAY_3D, DISPLAY_OTHER, ACCELERATOR, NETWORK = "0x030000", "0x030200", "0x038000", "0x120000", "0x020000"
LINUX = ("linux", "x86_64")
VERSION = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs@U22)\n"


def card(bus: str, vendor: str, kind: str, device: str = "0x0000") -> dict[str, str]:
    """Files of a device on the PCI bus."""
    folder = f"sys/bus/pci/devices/0000:{bus}:00.0"
    return {f"{folder}/vendor": f"{vendor}\n", f"{folder}/class": f"{kind}\n", f"{folder}/device": f"{device}\n"}


def node(number: int, simds: int, version: int) -> dict[str, str]:
    """Files of a node of AMD's compute driver."""
    text = f"cpu_cores_count 0\nsimd_count {simds}\ngfx_target_version {version}\nvendor_id 4098\n"
    return {f"sys/class/kfd/kfd/topology/nodes/{number}/properties": text}


def test_a_machine_that_was_given_its_gpus_has_their_files_in_order(tmp_path: Path) -> None:
    files = {f"dev/nvidia{number}": "" for number in range(12)}
    others = {"dev/nvidiactl": "", "dev/nvidia-uvm": "", "dev/nvidia-caps/nvidia-cap1": ""}
    root = write_tree(tmp_path, {**files, **others, "proc/driver/nvidia/version": VERSION})
    found = nvidia_presence(root)
    assert found.files == tuple(f"/dev/nvidia{number}" for number in range(12))
    assert (found.is_given, found.count, found.kernel_module) == (True, 12, "580.95.05")


def test_a_proprietary_kernel_module_tells_its_version_too(tmp_path: Path) -> None:
    text = (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.216.03  Fri Oct 25 22:43:06 UTC 2024\nGCC version:  13\n"
    )
    root = write_tree(tmp_path, {"proc/driver/nvidia/version": text})
    assert nvidia_presence(root).kernel_module == "535.216.03"


def test_files_that_the_device_cgroup_forbids_are_there_and_not_given(tmp_path: Path) -> None:
    root = write_tree(tmp_path, {f"dev/nvidia{number}": "" for number in range(4)})
    found = nvidia_presence(root, may_open=lambda path: path.name == "nvidia2")
    assert (found.count, found.open_files, found.is_given) == (4, ("/dev/nvidia2",), True)
    assert not nvidia_presence(root, may_open=lambda path: False).is_given


def test_a_folder_in_a_devices_place_is_no_device(tmp_path: Path) -> None:
    (tmp_path / "dev/nvidia0").mkdir(parents=True)
    assert (nvidia_presence(tmp_path).is_given, nvidia_open_files(tmp_path)) == (False, 0)
    write_tree(tmp_path, {"dev/nvidia1": ""})
    assert nvidia_open_files(tmp_path) == 1


def test_cards_of_the_bus_tell_their_kernel_drivers_and_other_devices_of_nvidia_do_not_count(tmp_path: Path) -> None:
    audio, switch = card("02", NVIDIA, "0x040300"), card("03", NVIDIA, "0x068000")
    root = write_tree(tmp_path, {**card("01", NVIDIA, VGA), **card("04", NVIDIA, DISPLAY_3D), **audio, **switch})
    (root / "sys/bus/pci/devices/0000:01:00.0/driver").symlink_to("../../../bus/pci/drivers/nouveau")
    found = nvidia_presence(root)
    assert found.cards == {"0000:01:00.0": "nouveau", "0000:04:00.0": None}
    assert (found.count, found.is_given) == (2, False)


@pytest.mark.parametrize(("second", "given"), [("vfio-pci", False), ("nvidia", True)])
def test_files_that_were_left_when_virtual_machines_got_all_cards_give_none(
    tmp_path: Path, second: str, given: bool
) -> None:
    root = write_tree(tmp_path, {**card("01", NVIDIA, VGA), **card("04", NVIDIA, VGA), "dev/nvidia0": ""})
    for bus, driver in (("01", "vfio-pci"), ("04", second)):
        (root / f"sys/bus/pci/devices/0000:{bus}:00.0/driver").symlink_to(f"../../../bus/pci/drivers/{driver}")
    assert nvidia_presence(root).is_given is given


@pytest.mark.parametrize(
    ("kinds", "own"), [((), True), (("devtmpfs",), False), (("tmpfs",), True), (("devtmpfs", "tmpfs"), True)]
)
def test_a_container_has_a_dev_of_its_own_and_a_sandbox_has_files_alone(
    tmp_path: Path, kinds: tuple[str, ...], own: bool
) -> None:
    mounts = "".join(f"24 27 0:6 / /dev rw,relatime - {kind} {kind} rw\n" for kind in kinds)
    root = write_tree(tmp_path, {"proc/self/mountinfo": f"{mounts}30 24 0:9 / /dev/shm rw - tmpfs tmpfs rw\n"})
    assert nvidia_presence(root).has_own_dev is own


def test_a_machine_that_does_not_tell_its_mounts_has_the_kernels_dev(tmp_path: Path) -> None:
    assert not nvidia_presence(tmp_path).has_own_dev


def test_wsl_lends_a_gpu_of_nvidia_only_where_windows_has_its_driver(tmp_path: Path) -> None:
    root = write_tree(tmp_path, {"dev/dxg": "", "usr/lib/wsl/lib/libd3d12.so": ""})
    assert not nvidia_presence(root).is_given
    write_tree(tmp_path, {"usr/lib/wsl/lib/libnvidia-ml.so.1": ""})
    found = nvidia_presence(root)
    assert (found.in_wsl, found.is_given, found.count) == (True, True, 1)


@pytest.mark.parametrize(
    ("value", "hides"),
    [
        *((None, False), ("0", False), ("GPU-1a", False), ("MIG-2", False)),
        *(("", True), ("-1", True), ("NoDevFiles", True), ("-1,0", True), ("none", True), ("void", True)),
        # What HTCondor gives a job that asked for none, as CUDA knew no word for it.
        *(("10000", True), ("10001", False)),
        # CUDA finds no GPU by these, and who wrote them wanted some.
        *(("all", False), ("cuda:0", False), ("0 1", False), ("0;1", False)),
    ],
)
def test_a_list_hides_all_gpus_where_its_head_is_a_word_for_none(value: str | None, hides: bool) -> None:
    assert hides_all_gpus({} if value is None else {"CUDA_VISIBLE_DEVICES": value}) is hides


#: Graphics of a processor, two Data Center GPUs Max, eight MI300X beside two processors.
GPU_OF_INTEL = {**card("00", INTEL, VGA, "0xa780"), "dev/dri/renderD128": "", "dev/dri/card0": ""}
MAX = {**card("18", INTEL, DISPLAY_OTHER, "0x0bda"), **card("2a", INTEL, DISPLAY_OTHER, "0x0bda"), **GPU_OF_INTEL}
PROCESSOR_OF_AMD = node(0, 0, 0)
MI300X = {name: text for at in range(2, 10) for name, text in node(at, 1216, 90402).items()}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({}, (), id="nothing"),
        pytest.param({**card("03", ASPEED, VGA), "dev/dri/card0": ""}, (), id="a server's ASPEED chip"),
        pytest.param(GPU_OF_INTEL, ("Intel", 1, False), id="a laptop with Intel graphics"),
        pytest.param(
            MAX,
            ("Intel", 2, True),
            id="two Data Center GPUs Max",
        ),
        pytest.param(card("18", INTEL, DISPLAY_OTHER, "0x0bda"), (), id="one that the container was not given"),
        pytest.param(
            {**card("c1", AMD, DISPLAY_OTHER), "dev/kfd": "", **PROCESSOR_OF_AMD, **node(1, 24, 110003)},
            ("AMD", 1, False),
            id="a Ryzen with graphics in it",
        ),
        pytest.param(
            {"dev/kfd": "", **PROCESSOR_OF_AMD, **node(1, 0, 0), **MI300X},
            ("AMD", 8, True),
            id="8 x MI300X",
        ),
        pytest.param({**PROCESSOR_OF_AMD, **node(1, 1216, 90402)}, (), id="MI300X in a container without --device"),
        pytest.param({**card("0b", AMD, ACCELERATOR), "dev/kfd": ""}, ("AMD", 1, True), id="an Instinct by its class"),
        pytest.param({**card("33", GAUDI, ACCELERATOR), "dev/accel/accel0": ""}, ("Intel Gaudi", 1, True), id="Gaudi"),
        pytest.param({**card("00", INTEL, ACCELERATOR), "dev/accel/accel0": ""}, (), id="a laptop's NPU"),
        pytest.param({**card("00", "0x1ae0", NETWORK), "dev/vfio/vfio": ""}, (), id="Google's network card"),
    ],
)
def test_accelerators_of_other_makers_are_told_from_what_draws_the_desktop(
    tmp_path: Path, files: Mapping[str, str], expected: tuple[str, int, bool] | tuple[()]
) -> None:
    found = other_accelerators(write_tree(tmp_path, files), system=LINUX)
    name, count, for_computing = expected or ("", 0, False)
    assert found == ((Accelerators(name=name, count=count, for_computing=for_computing),) if expected else ())


def test_files_that_may_not_be_opened_are_no_accelerators(tmp_path: Path) -> None:
    root = write_tree(tmp_path, {"dev/kfd": "", **node(1, 1216, 90402), **GPU_OF_INTEL})
    assert other_accelerators(root, system=LINUX, may_open=lambda path: False) == ()


@pytest.mark.parametrize(("processor", "names"), [("arm64", ["Apple"]), ("x86_64", [])])
def test_a_mac_has_a_gpu_of_apples_where_the_processor_is_apples_too(
    tmp_path: Path, processor: str, names: list[str]
) -> None:
    assert [found.name for found in other_accelerators(tmp_path, system=("darwin", processor))] == names
