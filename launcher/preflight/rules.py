"""Which hosts cannot run their part of a job, and which only badly: each rule looks at one thing on every host. Pure.

What is to be said of a host by itself is a rule of machine/verdicts, with the probe; here it is asked of all hosts.
What differs in software stands in versions, in files in files, and in networks in network. A rule that depends on a
size names it as a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median_high

from dsrun.units import format_bytes, format_duration

from ..hosts.spec import HostSpec
from ..machine.verdict import Context
from ..machine.verdicts.gpu_use import is_full, use_remarks
from ..machine.verdicts.left_out import left_out_verdicts
from ..machine.verdicts.limits import open_files_verdicts, shared_memory_verdicts
from ..machine.verdicts.no_gpus import no_gpu_verdicts
from ..survey.client import NoAnswer
from .facts import HostFacts, JobGpu
from .files import judge_files
from .findings import AnsweredHost, Fault, Finding, Requirements, faults, fold, named
from .network import judge_network
from .versions import groups, judge_versions

#: Beyond this, times in logs and files mislead; failures are put in order by measured offsets all the same.
_CLOCK_AMBER_S = 0.5
#: Beyond this, certificates and build tools fail as well.
_CLOCK_RED_S = 3600.0
#: Of memory, between a host and the usual one.
_MEMORY_SHARE = 0.1

#: Findings that stop a job on GPUs only.
_OF_GPUS = ("GPUs", "GPU use", "CUDA", "machine", "memlock")


def judge(hosts: Sequence[HostSpec], seen: Mapping[str, AnsweredHost | NoAnswer], wants: Requirements) -> list[Finding]:
    """Judges all hosts of a job.

    Args:
        hosts: hosts of the job, in rank order.
        seen: answer of each host, or the reason why it gave none, by host name.
        wants: needs that the job has of its hosts.

    Returns:
        red findings first; empty if all hosts are alike and fit.
    """
    count = len(hosts)
    silent = {name: its for name, its in seen.items() if isinstance(its, NoAnswer)}
    answered = {host.name: its for host in hosts if isinstance(its := seen[host.name], AnsweredHost)}
    specs = {host.name: host for host in hosts if host.name in answered}
    facts = {name: its.facts for name, its in answered.items()}
    found = [*_silent(silent, count)]
    if facts:
        on_gpus = any(its.gpus for its in facts.values()) if wants.on_gpus is None else wants.on_gpus
        chosen = {name: _with_chosen_gpus(specs[name], its) for name, its in facts.items()}
        found += judge_versions(facts, chosen=chosen, is_python=wants.is_python, on_gpus=on_gpus)
        if wants.on_gpus is not False:
            found += fold("GPU driver", {name: _driver_faults(its) for name, its in facts.items()}, count)
        if on_gpus:
            found += fold("GPUs", {name: _count_faults(specs[name], its) for name, its in facts.items()}, count)
            found += fold("GPU use", {name: _use_faults(specs[name], its) for name, its in facts.items()}, count)
        found += _same_machine(specs, facts, on_gpus=on_gpus)
        found += judge_files(facts, wants, count)
        found += fold(
            "/dev/shm", {name: faults(shared_memory_verdicts(its.memory)) for name, its in facts.items()}, count
        )
        found += judge_network(specs, facts, wants, on_gpus=on_gpus, count=count)
        found += fold("nofile", {name: faults(open_files_verdicts(its.limits)) for name, its in facts.items()}, count)
        found += _less(
            "memory",
            {name: size for name, its in facts.items() if (size := its.memory.limit_bytes) is not None},
            format_bytes,
            fix="is another job there, or a smaller cgroup limit? the host with least decides what fits",
        )
        found += _less(
            "cores",
            {name: its.cores_usable for name, its in facts.items()},
            str,
            fix="is dsrun there under a smaller CPU set or quota?",
        )
        found += fold("clock", {name: _clock_faults(its) for name, its in answered.items()}, count)
    if wants.on_gpus is None:
        # Nobody said that ranks need GPUs: a script may be there that trains on CPUs.
        found = [replace(finding, verdict="amber") if finding.name in _OF_GPUS else finding for finding in found]
    return sorted(found, key=lambda finding: finding.verdict != "red")


def _silent(silent: Mapping[str, NoAnswer], count: int) -> Iterator[Finding]:
    found: dict[str, list[Fault]] = {
        name: [("red", answer.reason, answer.hint or "is it up, and does `ssh` reach it from here?")]
        for name, answer in silent.items()
    }
    return fold("host", found, count)


def _with_chosen_gpus(spec: HostSpec, facts: HostFacts) -> HostFacts:
    """Leaves out GPUs that the hostfile does not name, as that of the screen."""
    if spec.gpus is None:
        return facts
    return replace(facts, gpus=tuple(gpu for number, gpu in enumerate(facts.gpus) if number in spec.gpus))


def _driver_faults(facts: HostFacts) -> Iterator[Fault]:
    """Judges a host whose GPUs do not serve: no job asked for a host of the CPU there."""
    yield from faults(no_gpu_verdicts(facts.gpus_unusable, context=Context(trains=True)))
    # Ranks are counted against the GPUs that are left below.
    for level, text, fix in faults(left_out_verdicts(facts.left_out, context=Context(counts_gpus=True))):
        yield level, text, f"{fix}; or leave the host out with `--exclude` if its ranks need all GPUs"


def _count_faults(spec: HostSpec, facts: HostFacts) -> Iterator[Fault]:
    """Judges whether a host has the GPUs that its slots take: ids count those a job sees there."""
    there = facts.gpus
    if facts.gpus_unusable is not None:
        return
    missing = _missing_gpus(spec, facts)
    if not there:
        yield "red", f"no GPU: {facts.no_gpus}", "leave the host out with `--exclude`, or run with `--backend gloo`"
    elif missing:
        has = "GPU 0 only" if len(there) == 1 else f"GPUs 0 to {len(there) - 1}"
        numbers = ", ".join(map(str, missing))
        yield "red", f"no GPU {numbers}; it has {has}", f"see {spec.source}, or choose with `--include`"
    elif len(there) < spec.slots:
        text = f"{len(there)} GPU{'s' * (len(there) > 1)} for {spec.slots} ranks"
        yield "red", text, f"use `-n {len(there)}`, or give it as many `slots` as GPUs"


def _use_faults(spec: HostSpec, facts: HostFacts) -> Iterator[Fault]:
    """Judges who is on the GPUs that the host's slots take; nothing where they are not all there."""
    there = facts.gpus
    if len(there) < spec.slots or _missing_gpus(spec, facts):
        return
    # Where nobody chose, ranks of this machine are given free ones, see devices.
    may_move = spec.gpus is None and sum(not is_full(_free_bytes(gpu)) for gpu in there) >= spec.slots
    context = Context(needs_gpus=True, takes_free_gpus=may_move)
    for gpu in [there[number] for number in spec.slot_ids]:
        total_bytes = None if gpu.gpu is None else gpu.gpu.memory_total_bytes
        for level, text, fix, _ in use_remarks(
            gpu.device.used_by, free_bytes=_free_bytes(gpu), total_bytes=total_bytes, context=context
        ):
            yield level, f"{gpu.device.label} {text}", fix


def _missing_gpus(spec: HostSpec, facts: HostFacts) -> list[int]:
    """Returns those of a host's chosen GPUs that a job does not see there."""
    return [number for number in spec.gpus or () if number >= len(facts.gpus)]


def _free_bytes(gpu: JobGpu) -> int | None:
    return None if gpu.gpu is None else gpu.gpu.memory_free_bytes


def _same_machine(specs: Mapping[str, HostSpec], facts: Mapping[str, HostFacts], *, on_gpus: bool) -> Iterator[Finding]:
    """Tells of two names of one machine: on a CPU that is two halves of it, on one GPU NCCL refuses."""
    for _, names in groups({name: its.place for name, its in facts.items()}):
        if len(names) < 2:
            continue
        slots = [slot for name in names for slot in specs[name].slot_ids]
        is_red = on_gpus and len(set(slots)) < len(slots)
        shared = ", and their ranks would share GPUs" if is_red else ""
        yield Finding(
            verdict="red" if is_red else "amber",
            name="machine",
            text=f"{named(names, len(facts))}: one machine{shared}",
            hosts=tuple(names),
            fix="give each machine one line in the hostfile, and add up the slots",
        )


def _less(name: str, sizes: Mapping[str, int], show: Callable[[int], str], *, fix: str) -> Iterator[Finding]:
    """Tells of hosts with clearly less than the usual one."""
    if not sizes:
        return
    usual = median_high(sizes.values())
    odd = {host: size for host, size in sizes.items() if size < usual * (1 - _MEMORY_SHARE)}
    if odd:
        parts = [(show(size), names) for size, names in groups(odd)]
        shown = ", ".join(f"{size} on {named(names, len(sizes))}" for size, names in parts)
        text = f"{shown}, {show(usual)} on the usual host"
        yield Finding(verdict="amber", name=name, text=text, hosts=tuple(odd), fix=fix)


def _clock_faults(seen: AnsweredHost) -> Iterator[Fault]:
    offset, doubt = seen.clock_offset_s, seen.clock_doubt_s
    if abs(offset) - doubt <= _CLOCK_AMBER_S:
        return
    side = "ahead of" if offset > 0 else "behind"
    text = f"{format_duration(abs(offset))} {side} this machine (give or take {format_duration(doubt)})"
    yield "red" if abs(offset) - doubt > _CLOCK_RED_S else "amber", text, "`timedatectl set-ntp true` on both"
