"""Which software differs from host to host, and which of that a job does not survive. Pure.

[Note: the odd one] What most hosts have is taken for what was meant, and of a tie what the first host has: one host in
sixteen was forgotten at the last update, not fifteen. Only differences are told; what is the same everywhere is right
as long as it works at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from ..machine.verdict import Context
from ..machine.verdicts.cuda_fit import CudaFit, FitGpu, cuda_fit
from ..machine.verdicts.torch_build import torch_verdicts
from .facts import HostFacts
from .findings import Fault, Finding, Verdict, faults, fold, named

_T = TypeVar("_T")
Facts = Mapping[str, HostFacts]


def judge_versions(facts: Facts, *, chosen: Facts, is_python: bool, on_gpus: bool) -> Iterator[Finding]:
    """Yields what differs.

    Args:
        facts: facts of the hosts that answered, by name, in rank order; not empty.
        chosen: the same, without GPUs that the hostfile leaves out.
        is_python: whether the ranks run Python, so that torch must be there; see `Requirements`.
        on_gpus: whether each rank needs a GPU of its own; see `Requirements`.
    """
    yield from _difference("dsrun", facts, lambda host: host.versions.dsrun, fix="install one dsrun on all hosts")
    yield from _difference(
        "Python",
        facts,
        lambda host: _minor(host.versions.python),
        fix="name one that is the same everywhere with `python=` in the hostfile",
    )
    if not is_python:
        return
    yield from _torch(facts, chosen, on_gpus=on_gpus)
    if on_gpus:
        yield from _difference(
            "CUDA", facts, lambda host: host.versions.cuda, fix="install one build of torch on all hosts"
        )
        yield from _difference(
            "NCCL", facts, lambda host: host.versions.nccl, fix="install one build of torch on all hosts"
        )
        yield from _difference("driver", facts, lambda host: host.driver, fix="install one driver on all hosts")
        yield from _difference(
            "GPUs",
            facts,
            models_of,
            fix="the slowest sets the pace; leave it out with `--exclude` if that is not worth it",
        )


def models_of(host: HostFacts) -> str | None:
    """Returns a host's GPUs as people write them, `8 x NVIDIA H100`; None without GPUs."""
    models = [gpu.model or gpu.device.label for gpu in host.gpus]
    return ", ".join(f"{models.count(model)} x {model}" for model in dict.fromkeys(models)) or None


def groups(values: Mapping[str, _T]) -> list[tuple[_T, list[str]]]:
    """Returns each value with the hosts that have it: the commonest first, then the one of the earlier host."""
    found: dict[_T, list[str]] = {}
    for name, value in values.items():
        found.setdefault(value, []).append(name)
    return sorted(found.items(), key=lambda item: -len(item[1]))


def in_words(parts: list[tuple[str, list[str]]]) -> str:
    """Says who has what: `2.13.0 on 15 hosts, 2.11.0 on n7`."""
    count = sum(len(names) for _, names in parts)
    return ", ".join(f"{value} on {named(names, count)}" for value, names in parts)


def _difference(
    name: str,
    facts: Facts,
    value_of: Callable[[HostFacts], str | None],
    *,
    fix: str,
    verdict: Verdict = "amber",
) -> Iterator[Finding]:
    """Yields a finding if hosts differ; a host where the value is not known says nothing, for better or worse."""
    known = {host: value for host, its in facts.items() if (value := value_of(its)) is not None}
    parts = groups(known)
    if len(parts) > 1:
        odd = tuple(host for host in known if known[host] != parts[0][0])
        yield Finding(verdict=verdict, name=name, text=in_words(parts), hosts=odd, fix=fix)


def _torch(facts: Facts, chosen: Facts, *, on_gpus: bool) -> Iterator[Finding]:
    """Judges torch: without it, or with another minor version, ranks do not work together; nor on GPUs without CUDA."""
    there = {name: its.versions.torch for name, its in facts.items() if its.versions.torch is not None}
    usual = groups(there)[0][0] if there else None
    context = Context(trains=True, needs_gpus=on_gpus, torch=usual)
    verdicts = {
        name: [
            *torch_verdicts(
                its.versions,
                gpus=len(its.gpus) if on_gpus else 0,
                fit=_fit(chosen[name]) if on_gpus else None,
                context=context,
            )
        ]
        for name, its in facts.items()
    }
    lacking = {host: faults(one for one in its if one.path == "versions.torch") for host, its in verdicts.items()}
    other = "there, or name another interpreter with `python=` in the hostfile"
    told: dict[str, list[Fault]] = {
        host: [(level, text, f"{fix} {other}") for level, text, fix in its] for host, its in lacking.items()
    }
    yield from fold("torch", told, len(facts))
    unfit = {host: faults(one for one in its if one.path == "versions.cuda") for host, its in verdicts.items()}
    yield from fold("CUDA", unfit, len(facts))
    if usual is not None and len(set(there.values())) > 1:
        odd = [name for name, version in there.items() if version != usual]
        is_far = any(_minor(there[name]) != _minor(usual) for name in odd)
        yield Finding(
            verdict="red" if is_far else "amber",
            name="torch",
            text=in_words(groups(there)),
            hosts=tuple(odd),
            fix=f"`pip install torch=={usual}` on {named(odd, len(facts))}",
        )


def _fit(host: HostFacts) -> CudaFit | None:
    """Returns whether a host's torch runs on its GPUs; None where it is not known."""
    if host.versions.cuda is None or not host.gpus:
        return None
    return cuda_fit(
        built=host.versions.cuda,
        driver=host.driver,
        newest=host.driver_cuda,
        libcuda=host.versions.libcuda,
        gpus=[
            FitGpu(name=one.gpu.name, capability=one.gpu.compute_capability) for one in host.gpus if one.gpu is not None
        ],
    )


def _minor(version: str) -> str:
    """`2.13.0+cu130` -> `2.13`."""
    return ".".join(version.split(".")[:2])
