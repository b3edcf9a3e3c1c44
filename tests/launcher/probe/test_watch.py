"""What a host does is the difference of two samples of its counters."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from dsrun.launcher.probe.watch import (
    Sample,
    answer,
    load_between,
    parse_diskstats,
    parse_net_dev,
    parse_stat,
    sample,
)
from support.machines import recorded_machine
from support.nvml import NVMLError
from support.topologies import write_tree

STAT = "cpu  {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 0 0 1 0 0 0 0 0 0\ncpu1 1 0 0 1 0 0 0 0 0 0\nintr 5\n"
NET = "Inter-|   Receive\n face |bytes\n    lo: 9 0 0 0 0 0 0 0 9 0\n  eth0: {rx} 1 0 0 0 0 0 0 {tx} 0 0\n"
DISK = " 259 0 nvme0n1 1 0 {read} 0 1 0 {written} 0 0 0 0\n 259 1 nvme0n1p1 1 0 5 0 1 0 5 0 0 0 0\n"
MIB = 1 << 20


def no_nvml() -> SimpleNamespace:
    def refuse() -> None:
        raise NVMLError("no driver")

    return SimpleNamespace(NVMLError=NVMLError, nvmlInit=refuse)


def taken(root: Path, *, at_s: float, busy: int = 0, idle: int = 0, moved: int = 0) -> Sample:
    write_tree(
        root,
        {
            "proc/stat": STAT.format(busy=busy, idle=idle),
            "proc/meminfo": "MemTotal: 4096 kB\nMemAvailable: 3072 kB\n",
            "proc/net/dev": NET.format(rx=2 * moved, tx=moved),
            "proc/diskstats": DISK.format(read=moved // 512, written=4 * moved // 512),
            "sys/block/nvme0n1/device/model": "x",
        },
    )
    return sample(root=root, clock=lambda: at_s, load_nvml=no_nvml)


def test_rates_are_what_moved_in_the_time_between(tmp_path: Path) -> None:
    before = taken(tmp_path, at_s=10.0, busy=100, idle=100, moved=0)
    load = load_between(before, taken(tmp_path, at_s=12.0, busy=190, idle=110, moved=8 * MIB))
    assert (load.cores, load.cpu_percent) == (2, 90.0)
    assert (load.memory_used_bytes, load.memory_total_bytes) == (1 * MIB, 4 * MIB)
    assert load.network == {"eth0": (8 * MIB, 4 * MIB)}
    assert load.disk == {"nvme0n1": (4 * MIB, 16 * MIB)}
    assert load.gpus == ()


def test_nothing_that_moved_and_no_time_between_are_no_rates(tmp_path: Path) -> None:
    one = taken(tmp_path, at_s=5.0, busy=3, idle=4, moved=512)
    load = load_between(one, one)
    assert (load.cpu_percent, load.network, load.disk) == (0.0, {}, {})


def test_a_counter_that_began_anew_is_no_negative_rate(tmp_path: Path) -> None:
    before = taken(tmp_path, at_s=0.0, moved=8 * MIB)
    assert load_between(before, taken(tmp_path, at_s=1.0, moved=0)).network == {}


def test_the_limit_of_the_cgroup_is_what_memory_is_a_part_of(tmp_path: Path) -> None:
    write_tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
            "sys/fs/cgroup/memory.max": f"{2 * MIB}\n",
            "sys/fs/cgroup/memory.current": f"{MIB // 2}\n",
        },
    )
    found = taken(tmp_path, at_s=0.0)
    assert (found.memory_used_bytes, found.memory_total_bytes) == (MIB // 2, 2 * MIB)


def test_gpus_are_read_as_the_driver_tells_them(tmp_path: Path) -> None:
    machine = recorded_machine("l40s_pcie", tmp_path)
    found = sample(root=tmp_path, clock=lambda: 0.0, load_nvml=machine.load_nvml)
    assert [gpu.index for gpu in found.gpus] == list(range(8))
    hot = found.gpus[2]
    assert (hot.temperature_c, hot.power_limit_w) == (92, 350.0)
    assert hot.held_back_by == ("thermal (software)", "thermal (hardware)")
    assert (hot.memory_used_bytes or 0) > (found.gpus[0].memory_used_bytes or 0) > 0
    assert [process["pid"] for process in hot.processes] == [4242]
    assert Sample.from_json(json.loads(json.dumps(asdict(found)))) == found


def test_this_machine_answers_in_json() -> None:
    with ExitStack() as keep:
        found = Sample.from_json(json.loads(json.dumps(answer({}, keep))))
    assert found.cores >= 1
    assert 0 < found.memory_used_bytes < found.memory_total_bytes


@pytest.mark.parametrize("text", ["", "cpu\n", "nonsense 1 2\n"])
def test_broken_files_are_no_counters(text: str) -> None:
    assert parse_stat(text)[1:] == (0, 0)
    assert parse_net_dev(text) == {}
    assert parse_diskstats(text, is_drive=lambda name: True) == {}
