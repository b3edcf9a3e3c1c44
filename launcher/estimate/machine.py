"""The machine of a plan: `--gpus`, a hostfile, or what the probe sees here. Values in, one `Machine` out."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dsrun.errors import InputError, Problem, UsageError
from dsrun.estimate.run.catalogue import GpuSpec, find_gpu, find_product
from dsrun.estimate.run.machine import Machine, Speeds

from ..hosts.hostfile import read_hostfile

if TYPE_CHECKING:
    from ..machine.report import ProbeReport

#: GPUs of one host where only their number is given.
_GPUS_PER_HOST = 8
_GPUS = re.compile(r"(?:(?P<hosts>[1-9][0-9]{0,5})x)??(?:(?P<count>[1-9][0-9]{0,5})x)?(?P<name>[A-Za-z][\w -]*)")
_SIZE = re.compile(r"(?P<number>[0-9]{1,6}(?:\.[0-9]+)?)(?P<unit>[GgTt])(?:i?[Bb])?")


def _probe() -> ProbeReport:
    """Looks at this machine; what reads it is imported then, for a plan of `--gpus` does without."""
    from ..machine.read import probe

    return probe()


def find_machine(
    *,
    gpus: str | None,
    hostfile: str | None,
    ranks: int | None,
    host_memory: str | None = None,
    nvme: str | None = None,
    speeds: Sequence[str] = (),
    look: Callable[[], ProbeReport] = _probe,
) -> Machine:
    """Returns the machine that the options describe.

    Args:
        gpus: `8xH100-80G`, `2x8xH100-80G` (hosts x GPUs), or `H100-80G` beside a hostfile or `ranks`.
        hostfile: hosts and ranks; they are taken to be like this machine where `gpus` does not say otherwise.
        ranks: ranks on this machine; without GPUs they compute on the CPU.
        host_memory: memory of each host.
        nvme: space for offloading on each host.
        speeds: `NAME=VALUE`, in GB/s, TFLOP/s for `flops`.
        look: function that reports on this machine where `gpus` does not describe it; tests give a made-up one.

    Raises:
        UsageError: carries everything that is wrong with the options, or GPUs of this machine do not serve.
        HostfileError: the hostfile is wrong.
    """
    problems: list[Problem] = []
    stated = _speeds(speeds, problems)
    memory = _size(host_memory, "--host-memory", problems)
    space = _size(nvme, "--nvme", problems)
    machine: Machine | None = None
    try:
        machine = _machine(gpus=gpus, hostfile=hostfile, ranks=ranks, look=look)
    except InputError as error:
        problems += error.problems
    if problems or machine is None:
        raise UsageError.of(problems)
    if memory is not None:
        machine = replace(machine, host_memory_bytes=memory)
    return replace(machine, nvme_bytes=space if space is not None else machine.nvme_bytes, given=stated)


def _machine(*, gpus: str | None, hostfile: str | None, ranks: int | None, look: Callable[[], ProbeReport]) -> Machine:
    hosts = None if hostfile is None else read_hostfile(Path(hostfile))
    if gpus is not None:
        match = _GPUS.fullmatch(gpus.strip())
        if match is None:
            raise UsageError(f"`--gpus` is `{gpus}`; expected e.g. `8xH100-80G`, or `2x8xH100-80G` for two hosts")
        spec = find_gpu(match["name"])
        if match["count"] is not None:
            if hosts is not None or ranks is not None:
                other = "--hostfile" if hosts is not None else "-n"
                raise UsageError(
                    f"`--gpus {gpus}` and `{other}` both say how many ranks there are",
                    hint=f"beside `{other}` name the GPU alone: `--gpus {spec.name}`",
                )
            return _of_gpus(spec, hosts=match["hosts"], count=int(match["count"]))
        if hosts is None:
            return _of_gpus(spec, hosts=None, count=ranks or 1)
        total, most = sum(host.slots for host in hosts), max(host.slots for host in hosts)
        return Machine(
            label=f"{total} x {spec.name} on {len(hosts)} host{'s' if len(hosts) > 1 else ''}",
            ranks=total,
            ranks_per_host=most,
            gpu=spec,
            gpu_memory_bytes=spec.memory_bytes,
        )
    if hosts is None:
        return _here(look(), ranks=ranks)
    total, most = sum(host.slots for host in hosts), max(host.slots for host in hosts)
    here = _here(look(), ranks=most)
    note = "every host of the hostfile is taken to be like this machine"
    return replace(
        here,
        label=f"{total} ranks on {len(hosts)} hosts",
        ranks=total,
        notes=(*here.notes, note) if total > most else here.notes,
    )


def _of_gpus(spec: GpuSpec, *, hosts: str | None, count: int) -> Machine:
    notes: tuple[str, ...] = ()
    if hosts is not None:
        total, per_host = int(hosts) * count, count
    else:
        total, per_host = count, min(count, _GPUS_PER_HOST)
        if total > per_host:
            notes = (f"{_GPUS_PER_HOST} GPUs a host; write `HOSTSxGPUSxNAME` for another number",)
    on = "" if total == per_host else f" on {-(-total // per_host)} hosts"
    return Machine(
        label=f"{total} x {spec.name}{on}",
        ranks=total,
        ranks_per_host=per_host,
        gpu=spec,
        gpu_memory_bytes=spec.memory_bytes,
        notes=notes,
    )


def _here(report: ProbeReport, *, ranks: int | None) -> Machine:
    """Returns this machine; one whose GPUs do not serve is not taken for one without.

    Raises:
        UsageError: they do not.
    """
    if report.gpus_unusable is not None:
        hint = f"{report.gpus_unusable.fix}; `--gpus 8xH100-80G` plans for GPUs that are named"
        raise UsageError(report.gpus_unusable.text, hint=hint)
    return machine_here(report, ranks=ranks)


def machine_here(report: ProbeReport, *, ranks: int | None, use_gpus: bool = True) -> Machine:
    """Returns this machine as it is now: free memory of its GPUs, or memory its ranks may take.

    Args:
        report: report of the probe on this machine.
        ranks: ranks on it; None: one a GPU, or one.
        use_gpus: False: ranks compute on the CPU though there are GPUs.
    """
    gpus = [gpu for gpu in report.gpus if gpu.usable] if use_gpus else []
    count = ranks or max(1, len(gpus))
    memory = report.memory.usable_bytes
    base = Machine(
        label=f"{count} rank{'s' if count > 1 else ''} on the CPU of this machine",
        ranks=count,
        ranks_per_host=count,
        host_memory_bytes=None if memory is None else memory + (report.memory.swap_free_bytes or 0),
        nvme_bytes=report.disk.free_bytes,
    )
    # GB10 and Thor compute in the host's memory, and their driver tells of none.
    free = [memory if gpu.memory_free_bytes is None else gpu.memory_free_bytes for gpu in gpus]
    known = [size for size in free if size is not None]
    if not known:
        return replace(base, cores_per_host=report.cpu.cores_usable)
    product = gpus[0].name or "an unnamed GPU"
    spec = find_product(product)
    sharing = -(-count // len(gpus))
    notes = [f"free GPU memory as it is now, of {product}"]
    if any(gpu.memory_free_bytes is None for gpu in gpus):
        notes = [
            f"the driver tells no memory of {product}: it is taken to be this machine's own, as free as it is now; "
            "what is offloaded to the CPU stays in the same memory"
        ]
    if spec is None:
        notes.append(f"{product} is not in the catalogue, so its speeds are not known")
    return replace(
        base,
        label=f"{count} x {product} of this machine",
        gpu=spec,
        gpu_memory_bytes=min(known) // sharing,
        notes=tuple(notes),
    )


def _speeds(texts: Sequence[str], problems: list[Problem]) -> Speeds:
    values: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        if name not in Speeds.names() or not 0 < number < float("inf"):
            names = ", ".join(f"`{known}`" for known in Speeds.names())
            problems.append(
                Problem(f"`--speed` is `{text}`; expected NAME=VALUE with a value above 0", f"NAME is one of {names}")
            )
        else:
            values[name] = number * (1e12 if name == "flops" else 1e9)
    return Speeds(**values)


def _size(text: str | None, flag: str, problems: list[Problem]) -> int | None:
    if text is None:
        return None
    match = _SIZE.fullmatch(text)
    if match is None:
        problems.append(Problem(f"`{flag}` is `{text}`; expected a size like `512G` or `2T`"))
        return None
    return round(float(match["number"]) * (1 << (40 if match["unit"] in "Tt" else 30)))
