from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dsrun.launcher.commands.probe import print_table, rows
from dsrun.launcher.probe import probe
from dsrun.launcher.probe_gpu import Gpu
from dsrun.launcher.probe_network import NetworkReport
from dsrun.launcher.probe_report import DiskReport
from dsrun.launcher.probe_versions import Versions
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


def link(name: str, addresses: tuple[str, ...], speed_mbit: int | None) -> NetworkReport:
    return NetworkReport(
        interface=name,
        kind="ethernet",
        state="up",
        mtu=1500,
        speed_mbit=speed_mbit,
        driver=None,
        addresses=addresses,
        default_route=False,
        numa_node=None,
    )


def test_the_table_of_a_gpu_machine_reads_as_reviewed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = probe(root=tmp_path, environ={}, affinity={0}, ask_addresses=dict)
    report = replace(
        empty,
        host=replace(
            empty.host,
            name="box",
            os="Debian 12",
            kernel="6.1",
            arch="x86_64",
            container="docker",
            machine="Dell Inc. PowerEdge",
        ),
        cpu=replace(
            empty.cpu,
            model="Xeon",
            cores_present=64,
            cores_in_affinity=32,
            quota_cores=8.5,
            cores_usable=8,
            isa=("avx2", "amx_bf16"),
        ),
        memory=replace(
            empty.memory,
            total_bytes=512 * GIB,
            cgroup_limit_bytes=128 * GIB,
            usable_bytes=100 * GIB,
            swap_total_bytes=0,
            shm_total_bytes=GIB // 16,
        ),
        gpus=(gpu(0, usable=True), gpu(1, usable=False)),
        driver="570.1",
        driver_cuda="12.8",
        disk=DiskReport(path="/data/[run]", filesystem="nfs4", total_bytes=1000 * GIB, free_bytes=10 * GIB),
        network=(link("eth0", ("10.0.0.5",), 25000), link("ib0", ("10.1.0.5", "fd00::5"), None)),
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
