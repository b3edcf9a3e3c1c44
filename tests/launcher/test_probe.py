from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import pytest

from dsrun.launcher.commands.probe import print_table, rows
from dsrun.launcher.probe import (
    CpuReport,
    DiskReport,
    HostReport,
    MemoryReport,
    NetworkReport,
    ProbeReport,
    probe,
)
from dsrun.launcher.probe_cgroup import CgroupLimits, parse_self_cgroup, read_limits
from dsrun.launcher.probe_gpu import Gpu, read_gpus, visible_devices
from dsrun.launcher.probe_machine import (
    container_of,
    filesystem_of,
    machine_of,
    parse_cpuinfo,
    parse_meminfo,
    parse_os_release,
    usable_cores,
)
from dsrun.launcher.probe_versions import Versions, parse_cuda_version, read_versions
from support.cli import invoke

GIB = 1 << 30
TABLE = """\
host      name      box
          system    Debian 12, kernel 6.1, x86_64
          runs on   docker container, Dell Inc. PowerEdge
cpu       model     Xeon
          cores     8 usable of 64 (affinity leaves 32, cgroup quota of 8.5)
          isa       avx2 amx_bf16
memory    usable    100.0 GiB of 512.0 GiB (cgroup limit of 128.0 GiB)
          /dev/shm  64.0 MiB
          swap      none
gpu       0         NVIDIA H200, 139.0 GiB free of 140.0 GiB, sm 9.0
          1         NVIDIA H200, 139.0 GiB free of 140.0 GiB, sm 9.0, hidden by
                    CUDA_VISIBLE_DEVICES
disk      free      10.0 GiB of 1000.0 GiB (nfs4)
          at        /data/[run]
network   eth0      10.0.0.5 (25 Gbit/s)
          ib0       10.1.0.5, fd00::5
versions  dsrun     none (not installed as a package)
          Python    3.11.7
            at      /venv/python
          torch     2.11.0+cu128
          CUDA      12.8
          NCCL      2.27.3
          driver    570.1 (runs CUDA up to 12.8)
"""
V2_MOUNT = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1_MOUNTS = (
    "31 23 0:28 {root} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "32 23 0:29 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)
NO_LIMIT_V1 = "9223372036854771712"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def limits(quota: float | None, memory: int | None, left: int | None, version: str = "v2") -> CgroupLimits:
    return CgroupLimits(version=version, quota_cores=quota, memory_limit_bytes=memory, memory_left_bytes=left)


# cgroups


def test_v2_takes_the_smallest_limit_between_the_own_group_and_the_root(tmp_path: Path) -> None:
    cgroup = "sys/fs/cgroup"
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user.slice/job\n",
            "proc/self/mountinfo": V2_MOUNT.format(root="/"),
            f"{cgroup}/user.slice/cpu.max": "150000 100000\n",
            f"{cgroup}/user.slice/memory.max": f"{8 * GIB}\n",
            f"{cgroup}/user.slice/memory.current": f"{7 * GIB}\n",
            f"{cgroup}/user.slice/memory.stat": f"anon 1\ninactive_file {2 * GIB}\n",
            f"{cgroup}/user.slice/job/cpu.max": "max 100000\n",
            f"{cgroup}/user.slice/job/memory.max": f"{16 * GIB}\n",
            f"{cgroup}/user.slice/job/memory.current": f"{GIB}\n",
        },
    )
    assert read_limits(root) == limits(1.5, 8 * GIB, 3 * GIB)


def test_v1_reads_each_controller_in_its_own_hierarchy(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/a/b\n4:cpu,cpuacct:/a\n1:name=systemd:/x\n",
            "proc/self/mountinfo": V1_MOUNTS.format(root="/"),
            "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "200000\n",
            "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": NO_LIMIT_V1,
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": f"{4 * GIB}\n",
            "sys/fs/cgroup/memory/a/memory.usage_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT_V1,
        },
    )
    assert read_limits(root) == limits(2.0, 4 * GIB, 3 * GIB, "v1")


def test_v1_knows_limits_above_the_mounted_root(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/docker/abc\n",
            "proc/self/mountinfo": V1_MOUNTS.format(root="/docker/abc"),
            "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT_V1,
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "0",
            "sys/fs/cgroup/memory/memory.stat": f"cache 0\nhierarchical_memory_limit {2 * GIB}\n",
        },
    )
    assert read_limits(root) == limits(None, 2 * GIB, 2 * GIB, "v1")


@pytest.mark.parametrize(("own", "mounted"), [("/docker/abc", "/docker/abc"), ("/docker/abc", "/"), ("/../..", "/")])
def test_inside_a_container_the_mounted_root_is_the_own_group(tmp_path: Path, own: str, mounted: str) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": f"0::{own}\n",
            "proc/self/mountinfo": V2_MOUNT.format(root=mounted),
            "sys/fs/cgroup/cpu.max": "300000 100000",
        },
    )
    assert read_limits(root).quota_cores == 3.0


def test_a_mount_point_with_a_blank_is_found(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": "30 23 0:26 / /my\\040groups rw - cgroup2 cgroup2 rw\n",
            "my groups/cpu.max": "100000 100000",
        },
    )
    assert read_limits(root).quota_cores == 1.0


@pytest.mark.parametrize("text", ["", "nonsense\n", "0::\n", "1:2\n"])
def test_no_cgroups_and_broken_files_mean_no_limit(tmp_path: Path, text: str) -> None:
    tree(tmp_path, {"proc/self/cgroup": text, "proc/self/mountinfo": text})
    assert read_limits(tmp_path) == CgroupLimits(
        version=None, quota_cores=None, memory_limit_bytes=None, memory_left_bytes=None
    )


def test_a_group_path_may_hold_colons() -> None:
    assert parse_self_cgroup("0::/a:b\n") == {"": PurePosixPath("/a:b")}


@pytest.mark.parametrize(("affinity", "quota", "usable"), [(8, None, 8), (8, 2.5, 2), (2, 16.0, 2), (4, 0.5, 1)])
def test_usable_cores_are_what_affinity_and_quota_leave(affinity: int, quota: float | None, usable: int) -> None:
    assert usable_cores(range(affinity), quota) == usable


# processor, memory, host


def test_cpuinfo_of_x86_gives_model_cores_and_instruction_sets() -> None:
    one = "processor\t: {n}\nmodel name\t: Xeon Gold\nflags\t\t: fpu avx2 amx_tile avx512f hypervisor\n\n"
    info = parse_cpuinfo(one.format(n=0) + one.format(n=1))
    assert (info.model, info.cores, info.isa, info.virtual) == ("Xeon Gold", 2, ("avx2", "avx512f", "amx_tile"), True)


def test_cpuinfo_of_arm_has_no_model_and_says_nothing_of_a_hypervisor() -> None:
    info = parse_cpuinfo("processor\t: 0\nFeatures\t: fp asimd sve2 bf16\nCPU implementer\t: 0x41\n")
    assert (info.model, info.cores, info.isa, info.virtual) == (None, 1, ("asimd", "sve2", "bf16"), None)


def test_meminfo_is_in_bytes_and_skips_what_is_no_size() -> None:
    assert parse_meminfo("MemTotal:  16 kB\nHugePages_Total: 0\nrubbish\n") == {"MemTotal": 16384}


@pytest.mark.parametrize(
    ("text", "name"),
    [('NAME="A"\nPRETTY_NAME="Debian 12"\n', "Debian 12"), ("NAME=Alpine\n", "Alpine"), ("", None), ("junk", None)],
)
def test_os_release_gives_the_name_for_people(text: str, name: str | None) -> None:
    assert parse_os_release(text) == name


@pytest.mark.parametrize(
    ("path", "kind"), [("/home/u/x", "nfs4"), ("/home", "nfs4"), ("/homes", "ext4"), ("/tmp/a", "tmpfs")]
)
def test_filesystem_is_that_of_the_deepest_and_latest_mount(path: str, kind: str) -> None:
    mountinfo = (
        "1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:9 / /home rw - nfs4 nas:/ rw\n"
        "3 1 8:2 / /tmp rw - xfs /dev/b rw\n4 3 0:7 / /tmp rw - tmpfs tmpfs rw\n"
    )
    assert filesystem_of(PurePosixPath(path), mountinfo) == kind


def test_container_and_machine_are_told_by_their_signs(tmp_path: Path) -> None:
    assert container_of(tmp_path, {}) is None
    assert machine_of(tmp_path) is None
    tree(tmp_path, {".dockerenv": "", "sys/class/dmi/id/sys_vendor": "Dell Inc.\n"})
    tree(tmp_path, {"sys/class/dmi/id/product_name": "PowerEdge\n"})
    assert container_of(tmp_path, {}) == "docker"
    assert container_of(tmp_path, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) == "kubernetes"
    assert machine_of(tmp_path) == "Dell Inc. PowerEdge"


# GPUs


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


# versions


def test_versions_come_from_metadata_of_packages_that_cannot_be_imported(tmp_path: Path) -> None:
    tree(
        tmp_path,
        {
            "torch-2.11.0+cu128.dist-info/METADATA": "Name: torch\nVersion: 2.11.0+cu128\n",
            "torch/__init__.py": "raise AssertionError('imported')\n",
            "torch/version.py": "from typing import Optional\ncuda: Optional[str] = '12.8'\n",
            "nvidia_nccl_cu12-2.27.3.dist-info/METADATA": "Name: nvidia-nccl-cu12\nVersion: 2.27.3\n",
        },
    )
    versions = read_versions([str(tmp_path)])
    assert (versions.torch, versions.cuda, versions.nccl, versions.dsrun) == ("2.11.0+cu128", "12.8", "2.27.3", None)


@pytest.mark.parametrize(
    ("text", "cuda"),
    [("cuda = '12.6'\n", "12.6"), ("cuda: Optional[str] = None\n", None), ("", None), ("xcuda = '1'\n", None)],
)
def test_cuda_version_is_read_from_the_text_of_torch(text: str, cuda: str | None) -> None:
    assert parse_cuda_version(text) == cuda


# the whole


def test_probe_of_a_bare_tree_gives_a_reason_for_every_null(tmp_path: Path) -> None:
    report = probe(root=tmp_path, environ={}, affinity={0}).to_json()

    def nulls(value: Any, path: str) -> list[str]:
        if isinstance(value, dict):
            return [null for key, item in value.items() for null in nulls(item, f"{path}.{key}".lstrip("."))]
        if isinstance(value, list | tuple):
            return [null for key, item in enumerate(value) for null in nulls(item, f"{path}.{key}")]
        return [path] if value is None else []

    assert report["memory"]["total_bytes"] is None
    assert sorted(nulls(report, "")) == sorted(set(report["null_reasons"]) - {"network"})


def test_probe_takes_the_smaller_of_free_memory_and_room_below_the_limit(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/meminfo": f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {60 * GIB // 1024} kB\n",
            "proc/cpuinfo": "".join(f"processor\t: {n}\n" for n in range(16)),
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": V2_MOUNT.format(root="/"),
            "sys/fs/cgroup/memory.max": str(8 * GIB),
            "sys/fs/cgroup/memory.current": str(2 * GIB),
            "sys/fs/cgroup/cpu.max": "350000 100000",
            "etc/os-release": "PRETTY_NAME='Debian 12'\n",
        },
    )
    report = probe(root=root, environ={}, affinity=range(8))
    assert (report.memory.usable_bytes, report.memory.cgroup_limit_bytes) == (6 * GIB, 8 * GIB)
    shown = {label: value for _, label, value in rows(report)}
    assert shown["usable"] == "6.0 GiB of 64.0 GiB (cgroup limit of 8.0 GiB)"
    assert shown["cores"] == "3 usable of 16 (affinity leaves 8, cgroup quota of 3.5)"
    assert shown["system"].startswith("Debian 12, kernel ")


def gpu(index: int, *, usable: bool) -> Gpu:
    return Gpu(
        index=index,
        uuid=f"GPU-{index}",
        name="NVIDIA H200",
        memory_total_bytes=140 * GIB,
        memory_free_bytes=139 * GIB,
        compute_capability="9.0",
        usable=usable,
    )


def test_the_table_of_a_gpu_machine_reads_as_reviewed(capsys: pytest.CaptureFixture[str]) -> None:
    report = ProbeReport(
        host=HostReport(
            name="box",
            os="Debian 12",
            kernel="6.1",
            arch="x86_64",
            container="docker",
            machine="Dell Inc. PowerEdge",
            virtual=False,
        ),
        cpu=CpuReport(
            model="Xeon",
            cores_present=64,
            cores_in_affinity=32,
            quota_cores=8.5,
            cores_usable=8,
            isa=("avx2", "amx_bf16"),
        ),
        memory=MemoryReport(
            total_bytes=512 * GIB,
            available_bytes=500 * GIB,
            cgroup_limit_bytes=128 * GIB,
            usable_bytes=100 * GIB,
            swap_total_bytes=0,
            swap_free_bytes=0,
            shm_total_bytes=GIB // 16,
            shm_free_bytes=1,
        ),
        cgroup_version="v2",
        gpus=(gpu(0, usable=True), gpu(1, usable=False)),
        gpus_usable=1,
        driver="570.1",
        driver_cuda="12.8",
        disk=DiskReport(path="/data/[run]", filesystem="nfs4", total_bytes=1000 * GIB, free_bytes=10 * GIB),
        network=(
            NetworkReport(interface="eth0", addresses=("10.0.0.5",), speed_mbit=25000),
            NetworkReport(interface="ib0", addresses=("10.1.0.5", "fd00::5"), speed_mbit=None),
        ),
        versions=Versions(
            dsrun=None, python="3.11.7", python_path="/venv/python", torch="2.11.0+cu128", cuda="12.8", nccl="2.27.3"
        ),
        null_reasons={"versions.dsrun": "not installed as a package"},
    )
    print_table(rows(report))
    assert capsys.readouterr().out == TABLE


def test_probe_prints_a_table_no_wider_than_80_columns_and_without_trailing_blanks() -> None:
    result = invoke("probe")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == [
        *("host", "cpu", "memory", "gpu", "disk", "network", "versions")
    ]
    assert all(len(line) <= 80 and line == line.rstrip() for line in lines)
    assert "\x1b" not in result.stdout


def test_probe_json_is_one_object_with_its_schema_version() -> None:
    result = invoke("probe", "--json")
    report = json.loads(result.stdout)
    assert (result.exit_code, result.stderr, report["schema_version"]) == (0, "", 1)
    assert list(report) == [
        *("schema_version", "host", "cpu", "memory", "cgroup_version", "gpus", "gpus_usable", "driver"),
        *("driver_cuda", "disk", "network", "versions", "null_reasons"),
    ]
    assert report["cpu"]["cores_usable"] >= 1
