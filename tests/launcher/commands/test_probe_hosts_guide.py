"""What docs/guides/probe.md shows of many hosts, measured and watched, is what their views are made of."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import click

from dsrun.launcher.bench.figure import figure
from dsrun.launcher.bench.rows import measured_rows
from dsrun.launcher.preflight.findings import Finding
from dsrun.launcher.probe.many_hosts import ManyReports
from dsrun.launcher.probe.table import host_lines
from dsrun.launcher.probe.view import hosts_view
from dsrun.launcher.probe.watch import GpuLoad, Load
from dsrun.launcher.probe.watch_text import watch_lines
from support.machines import recorded_machine

GUIDE = (Path(__file__).parents[3] / "docs/guides/probe.md").read_text()
BLOCKS = re.findall(r"^```\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
GIB = 1 << 30


def block(beginning: str) -> str:
    (found,) = (text for text in BLOCKS if text.startswith(beginning))
    return found


def cluster(folder: Path) -> ManyReports:
    """Sixteen DGX H100, of which one was forgotten at the last update and has a slow link."""
    usual: dict[str, Any] = json.loads(json.dumps(recorded_machine("dgx_h100", folder).report().to_json()))
    usual["host"] |= {"kernel": "5.15", "arch": "x86_64"}
    usual["disk"] |= {"path": "/home/ada/run", "filesystem": "nfs4", "total_bytes": 80 << 40, "free_bytes": 31 << 40}
    usual["storage"]["paths"] = []
    usual["memory"] |= {"shm_total_bytes": 1008 * GIB}
    usual["versions"] |= {"dsrun": "0.2.0", "python": "3.11.7", "python_path": "/opt/venv/bin/python"}
    usual["versions"] |= {"torch": "2.13.0+cu128", "cuda": "12.8", "nccl": "2.27.3"}
    usual["verdicts"] = []
    names = [f"n{index:02}" for index in range(1, 17)]
    reports = {name: copy.deepcopy(usual) for name in names}
    for index, name in enumerate(names):
        reports[name]["memory"]["usable_bytes"] = (1700 + index) * GIB
    odd = reports["n07"]
    odd["versions"] |= {"torch": "2.11.0+cu126", "cuda": "12.6"}
    odd["gpus"][3]["pcie"] |= {"width": 8}
    text, fix = "GPU 3 PCIe gen5 x8 of gen5 x16", "reseat the card or its riser; look up the slot's lanes"
    odd["verdicts"] = [{"level": "amber", "text": text, "fix": fix, "path": "gpus.3.pcie.width"}]
    finding = Finding(
        verdict="red",
        name="torch",
        text="2.13.0+cu128 on 15 hosts, 2.11.0+cu126 on n07",
        hosts=("n07",),
        fix="`pip install torch==2.13.0+cu128` on n07",
    )
    clocks = {name: (0.0002 * index - 0.001, 0.0005) for index, name in enumerate(names)}
    return ManyReports(hosts=tuple(names), reports=reports, unable={}, findings=(finding,), clocks=clocks)


def test_the_view_of_many_hosts_is_that_of_the_guide(tmp_path: Path) -> None:
    lines = hosts_view(cluster(tmp_path), width=80, everything=False)
    assert "".join(click.unstyle(line) + "\n" for line in lines) == block("all 16 hosts")


def test_the_figures_are_shown_as_in_the_guide() -> None:
    def at(name: str, unit: Any, *values: float) -> dict[str, Any]:
        return figure(name, unit, values).to_json()

    memory = [
        at("memory copy, one core", "B/s", 11.8e9, 12.1e9, 12.2e9),
        at("memory copy, 112 cores", "B/s", 401e9, 409e9, 412e9),
    ]
    disk = [
        at("write in order", "B/s", 3.9e9, 4.0e9, 4.1e9),
        at("read in order", "B/s", 6.6e9, 6.7e9, 6.7e9),
        at("random 4 KiB reads, 1 at once", "1/s", 12_100, 12_400, 12_500),
        at("random 4 KiB reads, 16 at once", "1/s", 118_000, 121_000, 124_000),
    ]
    gpu = [
        at("host to GPU 0", "B/s", 55.1e9, 55.3e9, 55.3e9),
        at("GPU to host 0", "B/s", 54.8e9, 55.0e9, 55.1e9),
        at("bf16 matrix product, GPU 0", "FLOP/s", 701e12, 712e12, 715e12),
    ]
    measured = {
        "memory": [{"figures": memory}],
        "disk": [{"path": "/raid", "direct": True, "figures": disk}],
        "gpu": [{"figures": gpu}],
    }
    lines = host_lines(list(measured_rows(measured)), width=80)
    assert "".join(click.unstyle(line) + "\n" for line in lines) == block("measured")


def test_the_live_view_is_that_of_the_guide() -> None:
    def gpu(index: int, held_back_by: tuple[str, ...] = ()) -> GpuLoad:
        process = {"pid": 4242 + index, "user": "ada", "command": "python", "memory_bytes": 70 * GIB}
        return GpuLoad(
            index=index,
            utilization_percent=98 - index,
            memory_used_bytes=71 * GIB,
            memory_total_bytes=80 * GIB,
            temperature_c=61 + 20 * index,
            power_w=655.0,
            power_limit_w=700.0,
            held_back_by=held_back_by,
            processes=(process,),
        )

    load = Load(
        cores=224,
        cpu_percent=12.0,
        memory_used_bytes=310 * GIB,
        memory_total_bytes=2016 * GIB,
        network={"ib0": (21.4e9, 21.9e9)},
        disk={"nvme0n1": (0.0, 1.2e9)},
        gpus=(gpu(0), gpu(1, ("thermal (hardware)",))),
    )
    assert "".join(line + "\n" for line in watch_lines({"dgx": load})) == block("HOST")
