from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsrun.launcher.machine.network.interfaces import Addresses
from dsrun.launcher.machine.provenance import null_reasons, source_of
from dsrun.launcher.machine.read import completed, probe, with_loaded
from dsrun.launcher.machine.software.loaded_libraries import LoadedLibraries, UnknownLibraries
from support.cli import clean_environment, invoke
from support.machines import NAMES, probed, recorded_machine
from support.nvml import NVMLError
from support.topologies import write_tree

GIB = 1 << 30
V2_MOUNT = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"


def no_addresses() -> Addresses:
    return {}


def paths_of(value: Any, path: str = "") -> list[str]:
    """Every leaf of JSON values, by its dotted path."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else None
    if items is None:
        return [path]
    return [inner for key, item in items for inner in paths_of(item, f"{path}.{key}".lstrip("."))]


def values_at(report: dict[str, Any], path: str) -> Any:
    for part in path.split("."):
        report = report[int(part)] if isinstance(report, list | tuple) else report[part]
    return report


# the whole


def test_an_empty_tree_and_no_driver_give_a_report_with_a_reason_for_every_null(tmp_path: Path) -> None:
    report = probe(root=tmp_path, environ={}, affinity={0}, ask_addresses=no_addresses, import_path=[]).to_json()
    reasons = report.pop("null_reasons")
    sources = report.pop("sources")
    nulls = [path for path in paths_of(report) if values_at(report, path) is None]
    assert report["memory"]["total_bytes"] is None
    assert sorted(reasons) == sorted(nulls)
    assert "not told" not in reasons.values()
    assert sources["cpu.model"] == "/proc/cpuinfo"


@pytest.mark.parametrize("name", NAMES)
def test_every_value_of_a_recorded_machine_has_a_source_or_a_reason(name: str) -> None:
    report = probed(name).to_json()
    reasons: dict[str, str] = report.pop("null_reasons")
    told = [path for path in paths_of(report) if path.split(".")[0] not in ("schema_version", "sources", "verdicts")]
    assert [path for path in told if not source_of(path)] == []
    assert {path for path in told if values_at(report, path) is None} == set(reasons)
    assert "not told" not in reasons.values()
    assert json.loads(json.dumps(report)) == report


def test_a_driver_that_answers_nothing_but_a_count_leaves_a_report(tmp_path: Path) -> None:
    def refuse(*_: object) -> None:
        raise NVMLError("unknown error")

    calls: dict[str, Any] = {"nvmlInit": lambda: None, "nvmlDeviceGetCount": lambda: 1}
    calls["nvmlDeviceGetHandleByIndex"] = lambda index: index
    names = ("Shutdown", "DeviceGetUUID", "DeviceGetName", "DeviceGetMemoryInfo", "DeviceGetCudaComputeCapability")
    calls |= {f"nvml{name}": refuse for name in (*names, "SystemGetDriverVersion", "SystemGetCudaDriverVersion_v2")}
    report = probe(
        root=tmp_path,
        environ={},
        affinity={0},
        load_nvml=lambda: SimpleNamespace(NVMLError=NVMLError, **calls),
        ask_addresses=no_addresses,
    )
    (gpu,) = report.gpus
    assert (gpu.name, gpu.pci_address, gpu.state and gpu.state.processes) == (None, None, None)
    assert report.null_reasons["gpus.0.name"] == "the driver does not say"
    assert report.topology.paths == (("X",),)


def test_gpus_are_asked_at_once_for_some_answers_take_milliseconds(tmp_path: Path) -> None:
    machine = recorded_machine("workstation", tmp_path)
    driver = machine.load_nvml()
    all_of_them = threading.Barrier(4, timeout=60)
    temperature = driver.nvmlDeviceGetTemperature

    def slow(gpu: Any, sensor: int) -> int:
        all_of_them.wait()
        return temperature(gpu, sensor)

    driver.nvmlDeviceGetTemperature = slow
    report = machine.report(load_nvml=lambda: driver)
    assert [gpu.state and gpu.state.temperature_c for gpu in report.gpus] == [41] * 4


def test_a_launch_gets_the_list_of_gpus_without_asking_each(tmp_path: Path) -> None:
    report = recorded_machine("workstation", tmp_path).report(gpu_state=False)
    assert [(gpu.name, gpu.state, gpu.nvlink) for gpu in report.gpus] == [("NVIDIA RTX A6000", None, None)] * 4
    assert {report.null_reasons[f"gpus.0.{name}"] for name in ("state", "iommu", "xids")} == {"not asked"}


def test_a_gpu_that_is_lost_does_not_hide_the_others(tmp_path: Path) -> None:
    machine = recorded_machine("workstation", tmp_path)
    driver = machine.load_nvml()
    reach = driver.nvmlDeviceGetHandleByIndex

    def handle(index: int) -> Any:
        if index == 2:
            raise NVMLError("GPU is lost")
        return reach(index)

    driver.nvmlDeviceGetHandleByIndex = handle
    report = machine.report(load_nvml=lambda: driver)
    assert [gpu.lost for gpu in report.gpus] == [False, False, True, False]
    assert report.gpus[0].peer_access == ("X", "OK", "U", "OK")
    assert (report.gpus_usable, report.topology.paths[2]) == (3, ("?", "?", "X", "?"))
    (verdict,) = [verdict for verdict in report.verdicts if verdict.path == "gpus.2.lost"]
    assert (verdict.level, verdict.text) == (
        "red",
        "GPU 2 left out: the driver counts it and cannot reach it (GPU is lost)",
    )
    assert report.null_reasons["gpus.2.state"] == "the driver does not say"


def test_interfaces_that_cannot_be_listed_are_a_reason_and_not_a_crash(tmp_path: Path) -> None:
    def refuse() -> Addresses:
        raise PermissionError("not here")

    report = probe(root=tmp_path, environ={}, affinity={0}, ask_addresses=refuse)
    assert report.network == ()
    assert report.null_reasons["network"] == "psutil cannot list the interfaces: not here"


def test_a_report_keeps_reasons_that_still_hold_and_drops_those_that_do_not(tmp_path: Path) -> None:
    report = probe(root=tmp_path, environ={}, affinity={0}, ask_addresses=no_addresses, import_path=[])
    assert report.null_reasons["loaded"].startswith("not asked")
    assert with_loaded(report, UnknownLibraries(reason="no torch")).null_reasons["loaded"] == "no torch"
    loaded = LoadedLibraries(
        torch="2.11.0",
        cuda_built=None,
        cuda_available=False,
        devices=0,
        cudnn=None,
        nccl=None,
        gloo=True,
        mpi=False,
        threads=4,
        libraries=(),
    )
    full = with_loaded(report, loaded)
    assert full.loaded == loaded
    assert {path for path in full.null_reasons if path.startswith("loaded")} == {
        *("loaded.cuda_built", "loaded.cudnn", "loaded.nccl", "loaded.driver_cuda", "loaded.cuda_init")
    }
    assert full.null_reasons["driver"] == report.null_reasons["driver"]
    assert completed(full) == full


def test_paths_a_job_uses_stand_behind_the_working_folder(tmp_path: Path) -> None:
    report = probe(root=tmp_path, environ={}, affinity={0}, ask_addresses=no_addresses, paths=[tmp_path / "nvme"])
    assert [place.path for place in report.storage.paths] == [str(Path.cwd()), str(tmp_path / "nvme")]
    assert report.disk.path == str(Path.cwd())


def test_variables_of_the_job_are_told_without_their_secrets(tmp_path: Path) -> None:
    report = probe(
        root=tmp_path,
        environ={"HF_TOKEN": "hf_abcdefghijklmnopqrst", "NCCL_IB_HCA": "mlx5_0"},
        affinity={0},
        ask_addresses=no_addresses,
    )
    assert report.software.variables == {"HF_TOKEN": "***", "NCCL_IB_HCA": "mlx5_0"}


def test_reasons_are_given_by_the_longest_beginning() -> None:
    value = {"a": [{"b": None, "c": None}], "d": None, "e": 1}
    assert null_reasons(value, "", {"a": "some", "a.*.b": "b", "d": "d"}) == {"a.0.b": "b", "a.0.c": "some", "d": "d"}


def test_probe_takes_the_smaller_of_free_memory_and_room_below_the_limit(tmp_path: Path) -> None:
    root = write_tree(
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
    assert (report.cpu.cores_usable, report.cpu.cores_present, report.cpu.quota_cores) == (3, 16, 3.5)
    assert (report.host.os, report.cgroup.memory_used_bytes) == ("Debian 12", 2 * GIB)


def test_probing_loads_the_standard_library_and_psutil_alone() -> None:
    told = "import sys; from dsrun.launcher.machine.read import probe; probe().to_json(); print(*sys.modules)"
    environ = {**clean_environment(), "PYTHONPATH": ""}
    done = subprocess.run([sys.executable, "-c", told], env=environ, capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    bare = subprocess.run(
        [sys.executable, "-c", "import sys; print(*sys.modules)"],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    mine = loaded - {name.partition(".")[0] for name in bare.stdout.split()} - set(sys.stdlib_module_names)
    assert mine == {"dsrun", "psutil", "pynvml"}


def test_probe_json_is_one_object_with_its_schema_version() -> None:
    result = invoke("probe", "--json")
    report = json.loads(result.stdout)
    assert (result.exit_code, result.stderr, report["schema_version"]) == (0, "", 2)
    assert list(report) == [
        *(
            "schema_version",
            "host",
            "cpu",
            "memory",
            "cgroup_version",
            "cgroup",
            "numa",
            "binding",
            "gpus",
            "gpus_usable",
        ),
        *("driver", "driver_cuda", "topology", "disk", "storage", "network", "rdma", "nccl_interface"),
        *("gloo_interface", "nccl_net_plugin", "versions", "software"),
        *("gpus_left_out", "gpus_unlisted", "gpus_idle", "gpus_unusable", "nccl_verbs"),
        *("loaded", "measured", "verdicts", "null_reasons", "sources"),
    ]
    assert report["cpu"]["cores_usable"] >= 1
