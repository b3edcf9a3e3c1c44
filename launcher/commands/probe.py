"""`dsrun probe`: shows what hardware and software there is. Only shows: what is looked at stands in ../probe.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator

import click

from dsrun.units import format_bytes

from ..probe import MemoryReport, ProbeReport, probe
from ..probe_gpu import Gpu

#: Section, label, value: one line of the table.
Row = tuple[str, str, str]


@click.command("probe")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
def command(as_json: bool) -> int:
    """Show host, processor, memory, GPUs and versions.

    Cores and memory are what this process may use (affinity, cgroups), not only what there is. Nothing is measured
    and torch is not imported.
    """
    report = probe()
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        print_table(rows(report))
    return 0


def rows(report: ProbeReport) -> list[Row]:
    """Returns the table's lines in reading order."""
    return [
        *_host_rows(report),
        *_cpu_rows(report),
        *_memory_rows(report.memory),
        *_gpu_rows(report),
        ("disk", "free", _free_at(report)),
        ("", "at", _or_none(report.disk.path, None)),
        *_network_rows(report),
        *_version_rows(report),
    ]


def _host_rows(report: ProbeReport) -> Iterator[Row]:
    host = report.host
    yield "host", "name", host.name
    yield "", "system", ", ".join(part for part in (host.os, f"kernel {host.kernel}", host.arch) if part)
    places = [f"{host.container} container" if host.container else None, "virtual machine" if host.virtual else None]
    where = ", ".join(part for part in (*places, host.machine) if part)
    if where:
        yield "", "runs on", where


def _cpu_rows(report: ProbeReport) -> Iterator[Row]:
    cpu = report.cpu
    yield "cpu", "model", _or_none(cpu.model, report.null_reasons.get("cpu.model"))
    causes: list[str] = []
    if cpu.cores_in_affinity < cpu.cores_present:
        causes.append(f"affinity leaves {cpu.cores_in_affinity}")
    if cpu.quota_cores is not None:
        causes.append(f"cgroup quota of {cpu.quota_cores:g}")
    yield "", "cores", f"{cpu.cores_usable} usable of {cpu.cores_present}" + _in_brackets(causes)
    yield "", "isa", " ".join(cpu.isa) or "none of note"


def _memory_rows(memory: MemoryReport) -> Iterator[Row]:
    limit = memory.cgroup_limit_bytes
    causes = [] if limit is None else [f"cgroup limit of {format_bytes(limit)}"]
    yield "memory", "usable", f"{_bytes(memory.usable_bytes)} of {_bytes(memory.total_bytes)}" + _in_brackets(causes)
    yield "", "/dev/shm", "none" if memory.shm_total_bytes is None else _bytes(memory.shm_total_bytes)
    yield "", "swap", f"{_bytes(memory.swap_total_bytes)}" if memory.swap_total_bytes else "none"


def _gpu_rows(report: ProbeReport) -> Iterator[Row]:
    if not report.gpus:
        yield "gpu", "none", report.null_reasons.get("driver", "the driver finds no GPU")
    for position, gpu in enumerate(report.gpus):
        yield "gpu" if position == 0 else "", str(gpu.index), _gpu_text(gpu)


def _gpu_text(gpu: Gpu) -> str:
    parts = [gpu.name or "unnamed", f"{_bytes(gpu.memory_free_bytes)} free of {_bytes(gpu.memory_total_bytes)}"]
    if gpu.compute_capability is not None:
        parts.append(f"sm {gpu.compute_capability}")
    if not gpu.usable:
        parts.append("hidden by CUDA_VISIBLE_DEVICES")
    return ", ".join(parts)


def _free_at(report: ProbeReport) -> str:
    disk = report.disk
    kind = _in_brackets([disk.filesystem] if disk.filesystem else [])
    return f"{_bytes(disk.free_bytes)} of {_bytes(disk.total_bytes)}{kind}"


def _network_rows(report: ProbeReport) -> Iterator[Row]:
    if not report.network:
        yield "network", "none", report.null_reasons.get("network", "no interface is up but loopback")
    for position, link in enumerate(report.network):
        speed = _in_brackets([f"{link.speed_mbit / 1000:g} Gbit/s"] if link.speed_mbit else [])
        yield "network" if position == 0 else "", link.interface, ", ".join(link.addresses) + speed


def _version_rows(report: ProbeReport) -> Iterator[Row]:
    versions, why = report.versions, report.null_reasons
    yield "versions", "dsrun", _or_none(versions.dsrun, why.get("versions.dsrun"))
    yield "", "Python", versions.python
    yield "", "  at", versions.python_path
    yield "", "torch", _or_none(versions.torch, why.get("versions.torch"))
    yield "", "CUDA", _or_none(versions.cuda, why.get("versions.cuda"))
    yield "", "NCCL", _or_none(versions.nccl, why.get("versions.nccl"))
    newest = _in_brackets([f"runs CUDA up to {report.driver_cuda}"] if report.driver_cuda else [])
    yield "", "driver", _or_none(report.driver, why.get("driver")) + newest


def _bytes(count: int | None) -> str:
    return "?" if count is None else format_bytes(count)


def _or_none(value: str | None, reason: str | None) -> str:
    return value if value is not None else "none" + _in_brackets([reason] if reason else [])


def _in_brackets(parts: list[str]) -> str:
    return f" ({', '.join(parts)})" if parts else ""


def print_table(lines: Iterable[Row]) -> None:
    """Prints the lines in three columns, folded to the width of the terminal (80 where there is none)."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for section, label, value in lines:
        # Text, not str: values come from files and drivers, and brackets in them are no markup.
        table.add_row(section, Text(label), Text(value))
    console = Console(file=sys.stdout, highlight=False)
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():
        click.echo(line.rstrip(), color=True)
