"""The table of recorded machines reads as reviewed: alike parts in one row, what is wrong last."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsrun.launcher.machine.read import with_loaded
from dsrun.launcher.machine.software.loaded_libraries import LoadedLibraries, UnknownLibraries
from dsrun.launcher.probe.columns import fold_rows
from dsrun.launcher.probe.rows import rows_of
from dsrun.launcher.table_rows import RowKind
from support.machines import NAMES, probed, recorded_machine

Json = dict[str, Any]


@pytest.fixture
def l40s(tmp_path: Path) -> Json:
    return recorded_machine("l40s_pcie", tmp_path).report().to_json()


def shown(report: Json, section: str, *, everything: bool = False) -> list[tuple[str, str]]:
    return [(row.label, row.value) for row in rows_of(report, everything=everything) if row.section == section]


def test_gpus_that_are_alike_are_one_row_and_the_odd_one_another(l40s: Json) -> None:
    assert shown(l40s, "gpu") == [
        ("model", "0-2,4-7: 7 x NVIDIA L40S 45.0 GiB, sm 8.9, PCIe gen4 x16"),
        ("model", "3: NVIDIA L40S 45.0 GiB, sm 8.9, PCIe gen4 x8 of x16"),
        ("free", "0-1,3-7: 44.5 GiB; 2: 14.2 GiB"),
        ("used by", "2: root (pid 4242, 30.3 GiB)"),
        ("now", "30 to 92 °C, 33 W of 350 W, GPU 2 is held back: thermal (software), thermal (hardware)"),
        ("paths", "NODE between 8 pairs, PIX between 4 pairs, SYS between 16 pairs"),
    ]


def test_a_machine_with_nvlink_says_so_in_a_word(tmp_path: Path) -> None:
    report = recorded_machine("dgx_h100", tmp_path).report({"CUDA_VISIBLE_DEVICES": "0,1"}).to_json()
    rows = shown(report, "gpu")
    assert rows[0] == ("model", "0-1: 2 x NVIDIA H100 80GB HBM3 79.6 GiB, sm 9.0, PCIe gen5 x16, 18 NVLinks")
    assert rows[1][1].startswith("2-7: 6 x NVIDIA H100")
    assert rows[1][1].endswith("18 NVLinks, hidden by CUDA_VISIBLE_DEVICES")
    assert dict(rows)["paths"] == "NV18 between all"
    assert [value for label, value in shown(report, "network") if label == "rdma"] == [
        "8 x InfiniBand, 400 Gbit/s, ACTIVE (mlx5_[0,3-6,9-11])",
        "2 x Ethernet, 200 Gbit/s, ACTIVE (mlx5_[1,7])",
        "2 x InfiniBand, 200 Gbit/s, ACTIVE (mlx5_[2,8])",
    ]
    assert ("nvme", "2 x KIOXIA KCM6DRUL3T84, 3.5 TiB, PCIe gen4 x4, at /raid (nvme2n1,nvme3n1)") in shown(
        report, "disk"
    )


def test_efa_is_told_by_its_name_and_not_by_a_layer_that_nobody_knows(tmp_path: Path) -> None:
    rows = shown(recorded_machine("aws_p5", tmp_path).report().to_json(), "network")
    assert any(label == "rdma" and value.startswith("32 x EFA, 100 Gbit/s, ACTIVE") for label, value in rows)


def test_a_machine_without_gpus_says_why(tmp_path: Path) -> None:
    report = recorded_machine("workstation", tmp_path).report(load_nvml=None).to_json()
    (row,) = shown(report, "gpu")
    assert row[0] == "none"
    assert row[1] == report["null_reasons"]["driver"]


@pytest.mark.parametrize("name", NAMES)
def test_everyday_rows_fit_a_screen_and_all_rows_hold_them(name: str) -> None:
    report = probed(name).to_json()
    usual, everything = rows_of(report), rows_of(report, everything=True)
    assert len(usual) <= 40
    labels = {(row.section, row.label) for row in everything}
    assert {(row.section, row.label) for row in usual} <= labels
    assert {"limits", "cgroup", "numa"} <= {section for section, _ in labels}
    assert all(row.value for row in everything)


def test_two_hosts_of_one_kind_do_not_differ(tmp_path: Path) -> None:
    report = json.dumps(recorded_machine("dgx_a100", tmp_path).report().to_json())
    reports = {name: json.loads(report) for name in ("n1", "n2")}
    # Addresses, names and whatever changes every moment are no difference.
    reports["n2"]["host"] |= {"name": "n2", "fqdn": "n2.lan", "boot_id": "x", "uptime_s": 5.0}
    reports["n2"]["network"][0]["addresses"] = ["10.99.0.1"]
    reports["n2"]["memory"]["usable_bytes"] //= 2
    reports["n2"]["gpus"][5] |= {"memory_free_bytes": 1 << 30, "uuid": "GPU-x"}
    for everything in (False, True):
        rows = {name: rows_of(report, everything=everything) for name, report in reports.items()}
        assert [row for row in fold_rows(rows) if len(row.shares) > 1] == []


def test_what_was_loaded_is_told_apart_from_what_is_installed(tmp_path: Path) -> None:
    report = recorded_machine("workstation", tmp_path).report()
    loaded = LoadedLibraries(
        torch="2.11.0+cu128",
        cuda_built="12.8",
        cuda_available=True,
        devices=4,
        cudnn=90100,
        nccl="2.27.3",
        gloo=True,
        mpi=False,
        threads=8,
        libraries=("/usr/lib/libnccl.so.2",),
    )
    assert shown(with_loaded(report, loaded).to_json(), "loaded") == [
        ("torch", "2.11.0+cu128"),
        ("CUDA", "built for 12.8, 4 devices"),
        ("NCCL", "2.27.3"),
        ("cuDNN", "90100"),
        ("backends", "nccl gloo"),
        ("library", "/usr/lib/libnccl.so.2"),
    ]
    without = with_loaded(report, replace(loaded, nccl=None)).to_json()
    assert [value for label, value in shown(without, "loaded") if label in ("NCCL", "backends")] == ["none", "gloo"]
    failed = with_loaded(report, UnknownLibraries(reason="torch took more than 60 s")).to_json()
    assert shown(failed, "loaded") == [("torch", "none (torch took more than 60 s)")]
    assert shown(report.to_json(), "loaded") == []


def test_rows_that_differ_by_nature_are_marked_so(l40s: Json) -> None:
    kinds = {row.label: row.kind for row in rows_of(l40s, everything=True)}
    assert (kinds["name"], kinds["free"], kinds["torch"]) == (RowKind.OWN, RowKind.NOW, RowKind.FACT)


@pytest.mark.parametrize(
    ("process", "busy"),
    [
        ({"memory_bytes": 9 << 30}, 1),
        ({"memory_bytes": None}, 1),
        ({"memory_bytes": 40 << 20}, 0),
        ({"memory_bytes": 1 << 30, "is_desktop": True}, 0),
        # Another dsrun may tell more of it.
        ({"memory_bytes": 9 << 30, "tells_more": 1}, 1),
    ],
)
def test_only_processes_that_count_make_a_gpu_busy(l40s: Json, process: Json, busy: int) -> None:
    for gpu in l40s["gpus"]:
        gpu["state"]["processes"] = []
    l40s["gpus"][0]["state"]["processes"] = [{"pid": 7, "user": "bob", **process}]
    (row,) = [row for row in rows_of(l40s, everything=False) if row.label == "used by"]
    assert (row.value.startswith("0: bob (pid 7, "), row.brief) == (True, f"{busy} of 8 busy")
