"""The live view: a table of hosts, and one of GPUs that grows no longer than a screen."""

from __future__ import annotations

from typing import Any

from dsrun.launcher.probe.watch import GpuLoad, Load
from dsrun.launcher.probe.watch_text import watch_lines

GIB = 1 << 30


def gpu(index: int, **changes: Any) -> GpuLoad:
    usual: dict[str, Any] = {
        "index": index,
        "utilization_percent": 97,
        "memory_used_bytes": 40 * GIB,
        "memory_total_bytes": 80 * GIB,
        "temperature_c": 61,
        "power_w": 512.4,
        "power_limit_w": 700.0,
        "held_back_by": (),
        "processes": ({"pid": 41, "user": "ada", "command": "python", "memory_bytes": 39 * GIB},),
    }
    return GpuLoad(**{**usual, **changes})


def load(*gpus: GpuLoad) -> Load:
    return Load(
        cores=64,
        cpu_percent=12.4,
        memory_used_bytes=900 << 20,
        memory_total_bytes=512 * GIB,
        network={"eth0": (1.25e9, 3e6), "ib0": (0.25e9, 0.0)},
        disk={"nvme0n1": (0.0, 4.2e4)},
        gpus=gpus,
    )


def test_a_host_and_its_gpus() -> None:
    unknown = gpu(
        1,
        utilization_percent=None,
        memory_used_bytes=None,
        temperature_c=None,
        power_w=None,
        held_back_by=("power cap", "thermal (hardware)"),
        processes=(),
    )
    assert "\n".join(watch_lines({"box": load(gpu(0), unknown)})) == (
        "HOST  CPU        MEMORY                  NET IN    NET OUT   READ  WRITTEN\n"
        "box   12% of 64  900.0 MiB of 512.0 GiB  1.5 GB/s  3.0 MB/s  -     42 kB/s\n"
        "\n"
        "GPU  BUSY  MEMORY            TEMP   POWER         HELD BACK BY                   PROCESSES\n"
        "0    97%   40.0 of 80.0 GiB  61 °C  512 of 700 W  -                              ada python 41 39.0 GiB\n"
        "1    -     -                 -      -             power cap, thermal (hardware)  -"
    )


def test_gpus_of_a_few_hosts_carry_their_names_and_of_many_hosts_are_one_row_each() -> None:
    few = watch_lines({"n1": load(gpu(0)), "n2": load(gpu(0))})
    assert [line.split()[0] for line in few if line] == ["HOST", "n1", "n2", "GPU", "n1:0", "n2:0"]
    busy = load(gpu(0), gpu(1, utilization_percent=3, temperature_c=88, held_back_by=("thermal (hardware)",)))
    many = watch_lines({f"n{index}": busy for index in range(64)})
    assert len(many) == 1 + 64 + 1 + 1 + 64
    assert many[-1] == "n63   2     3 to 97%  80.0 of 160.0 GiB  88 °C    1: thermal (hardware)"


def test_a_host_that_tells_nothing_stands_last_with_the_reason() -> None:
    lines = watch_lines({"n1": "the connection was lost", "n2": load()})
    assert lines[-1] == "n1  the connection was lost"
    assert watch_lines({"n1": "lost"}) == ["n1  lost"]
