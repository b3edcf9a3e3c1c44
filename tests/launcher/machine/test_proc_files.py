from __future__ import annotations

from pathlib import Path

import pytest

from dsrun.launcher.machine.proc_files import container_of, machine_of, parse_cpuinfo, parse_os_release, usable_cores
from support.topologies import write_tree


@pytest.mark.parametrize(("affinity", "quota", "usable"), [(8, None, 8), (8, 2.5, 2), (2, 16.0, 2), (4, 0.5, 1)])
def test_usable_cores_are_what_affinity_and_quota_leave(affinity: int, quota: float | None, usable: int) -> None:
    assert usable_cores(range(affinity), quota) == usable


def test_cpuinfo_of_x86_gives_model_cores_and_instruction_sets() -> None:
    one = "processor\t: {n}\nmodel name\t: Xeon Gold\nflags\t\t: fpu avx2 amx_tile avx512f hypervisor\n\n"
    info = parse_cpuinfo(one.format(n=0) + one.format(n=1))
    assert (info.model, info.cores, info.isa, info.virtual) == ("Xeon Gold", 2, ("avx2", "avx512f", "amx_tile"), True)


def test_cpuinfo_of_arm_has_no_model_and_says_nothing_of_a_hypervisor() -> None:
    info = parse_cpuinfo("processor\t: 0\nFeatures\t: fp asimd sve2 bf16\nCPU implementer\t: 0x41\n")
    assert (info.model, info.cores, info.isa, info.virtual) == (None, 1, ("asimd", "sve2", "bf16"), None)


@pytest.mark.parametrize(
    ("text", "name"),
    [('NAME="A"\nPRETTY_NAME="Debian 12"\n', "Debian 12"), ("NAME=Alpine\n", "Alpine"), ("", None), ("junk", None)],
)
def test_os_release_gives_the_name_for_people(text: str, name: str | None) -> None:
    assert parse_os_release(text) == name


def test_container_and_machine_are_told_by_their_signs(tmp_path: Path) -> None:
    assert container_of(tmp_path, {}) is None
    assert machine_of(tmp_path) is None
    write_tree(tmp_path, {".dockerenv": "", "sys/class/dmi/id/sys_vendor": "Dell Inc.\n"})
    write_tree(tmp_path, {"sys/class/dmi/id/product_name": "PowerEdge\n"})
    assert container_of(tmp_path, {}) == "docker"
    assert container_of(tmp_path, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) == "kubernetes"
    assert machine_of(tmp_path) == "Dell Inc. PowerEdge"


_OVERLAY = "31 22 0:51 / / rw,relatime - overlay overlay rw,lowerdir="


@pytest.mark.parametrize(
    ("files", "environ", "name"),
    [
        (
            {
                ".lock": "",
                "proc/self/mountinfo": "31 22 8:1 /raid/enroot/data/user-1000/pyxis_99.0 / rw - ext4 /dev/sda1 rw\n",
            },
            {},
            "enroot",
        ),
        ({".lock": "", "proc/self/mountinfo": f"{_OVERLAY}/run/enroot/1000/pytorch/lower\n"}, {}, "enroot"),
        # A file of that name on a host is no sign of anything.
        ({".lock": "", "proc/self/mountinfo": "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"}, {}, None),
        ({".singularity.d/env": ""}, {"APPTAINER_CONTAINER": "/home/ada/torch.sif"}, "apptainer"),
        ({".singularity.d/env": ""}, {"SINGULARITY_CONTAINER": "/home/ada/torch.sif"}, "singularity"),
        ({"run/.containerenv": ""}, {}, "podman"),
        ({}, {"container": "podman"}, "podman"),
        ({"run/systemd/container": "lxc\n"}, {}, "lxc"),
        ({"dev/lxd/sock": ""}, {}, "lxc"),
        ({"proc/self/mountinfo": "40 31 0:44 /proc/cpuinfo /proc/cpuinfo rw - fuse.lxcfs lxcfs rw\n"}, {}, "lxc"),
        (
            {
                "proc/self/mountinfo": f"{_OVERLAY}"
                "/var/lib/containerd/io.containerd.snapshotter.v1.overlayfs/snapshots/7/fs\n"
            },
            {},
            "containerd",
        ),
        ({"proc/self/mountinfo": f"{_OVERLAY}/live/rootfs.squashfs\n"}, {}, None),
    ],
)
def test_each_kind_of_container_is_known_by_what_it_leaves(
    tmp_path: Path, files: dict[str, str], environ: dict[str, str], name: str | None
) -> None:
    write_tree(tmp_path, files)
    assert container_of(tmp_path, environ) == name
