"""What a pod asks of its node, in Kubernetes' own quantities, and the class that Kubernetes puts it into. Pure.

[Note: quality of service] Cores and memory alone decide about a pod's class. *Guaranteed*: every container has limits
of both, and requests that are equal to them. *BestEffort*: none names either; such a pod gets the smallest share of
processor time, is evicted first, and is the kernel's first choice where memory is short, whatever GPUs it has.
*Burstable*: all others. See https://kubernetes.io/docs/concepts/workloads/pods/pod-qos/.

[Note: countable resources] What a device plugin offers (`nvidia.com/gpu`, `rdma/...`) and huge pages cannot be
overbooked: a limit is needed, and a request must be equal to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, Literal

from dsrun.errors import Problem

GPU = "nvidia.com/gpu"
Quality = Literal["Guaranteed", "Burstable", "BestEffort"]
Quantity = int | str

#: `m` is a thousandth: `400m` of memory is less than a byte, which is why sizes are read by another pattern.
_CPUS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,3})?|[0-9]{1,9}m")
_SIZE = re.compile(r"(?P<count>[0-9]{1,9}(?:\.[0-9]{1,3})?)(?P<unit>[MGT]i?)B?")
_COUNT = re.compile(r"[1-9][0-9]{0,8}")
#: `vendor.com/name`.
_DEVICE = re.compile(
    r"(?P<domain>[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*)"
    r"/(?P<name>[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)"
)
_QUANTITY = re.compile(
    r"(?P<number>[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))(?P<unit>[KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,3}|)"
)
_UNITS = {
    "": Fraction(1),
    **{unit: Fraction(1, 1000**power) for power, unit in enumerate("mun", start=1)},
    **{unit: Fraction(1000**power) for power, unit in enumerate("kMGTPE", start=1)},
    **{f"{unit}i": Fraction(1024**power) for power, unit in enumerate("KMGTPE", start=1)},
}


def read_cpus(text: str) -> Quantity | None:
    """Returns a number of cores as Kubernetes writes it, None for what is none: `96`, `7.5` or `7500m`."""
    if _CPUS.fullmatch(text) is None or not amount(text):
        return None
    return int(text) if text.isdecimal() else text


def read_size(text: str) -> str | None:
    """Returns a size as Kubernetes writes it, None for what is none: `900Gi` of `900Gi` or `900GiB`."""
    found = _SIZE.fullmatch(text)
    return None if found is None or not Fraction(found["count"]) else found["count"] + found["unit"]


def read_resource(text: str) -> tuple[str, Quantity] | None:
    """Returns a resource and how much of it, None for what is none: `rdma/hca=1`, `hugepages-2Mi=4Gi`."""
    name, _, value = text.partition("=")
    if re.fullmatch(r"hugepages-[0-9]+[KMG]i|ephemeral-storage", name):
        size = read_size(value)
        return None if size is None else (name, size)
    device = _DEVICE.fullmatch(name)
    is_known = device is not None and len(device["domain"]) <= 253 and len(device["name"]) <= 63
    return (name, int(value)) if is_known and _COUNT.fullmatch(value) else None


def amount(quantity: object) -> Fraction | None:
    """Returns what a quantity comes to, in cores, bytes or devices; None where it is no quantity."""
    found = _QUANTITY.fullmatch(str(quantity)) if isinstance(quantity, int | str) else None
    if found is None:
        return None
    unit = found["unit"]
    factor = _UNITS[unit] if unit in _UNITS else Fraction(10) ** int(unit[1:])
    return Fraction(found["number"].rstrip(".") or "0") * factor


def quality_of(pod: Mapping[str, Any]) -> Quality:
    """Returns a pod's class. See [Note: quality of service].

    Args:
        pod: its spec.
    """
    named: set[str] = set()
    is_guaranteed = True
    for _, resources in _asking(pod):
        limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
        for resource in ("cpu", "memory"):
            limit = amount(limits.get(resource, 0))
            # What is limited and not requested is requested by Kubernetes itself.
            request = amount(requests.get(resource, limits.get(resource, 0)))
            if limit or request:
                named.add(resource)
            is_guaranteed &= bool(limit) and limit == request
    return "BestEffort" if not named else "Guaranteed" if is_guaranteed else "Burstable"


def resource_problems(pod: Mapping[str, Any]) -> list[Problem]:
    """Returns what Kubernetes would refuse of what the containers ask for. See [Note: countable resources].

    Args:
        pod: its spec.
    """
    return [problem for where, resources in _asking(pod) for problem in _problems(where, resources)]


def _problems(where: str, resources: Mapping[str, Any]) -> Iterator[Problem]:
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    for kind, values in (("limits", limits), ("requests", requests)):
        for name, value in values.items():
            if isinstance(value, float):
                yield Problem(
                    f"{where}: `resources.{kind}` has {value} of {name}, a number with a point; expected a quantity",
                    f"write it in quotes, '{value}': JobSet takes whole numbers and words",
                )
            elif amount(value) is None:
                yield Problem(
                    f"{where}: `resources.{kind}` has {value!r} of {name}; expected a quantity",
                    "a count like 8, or a size like 900Gi",
                )
    for name, value in requests.items():
        request, limit = amount(value), amount(limits.get(name))
        if request is not None and limit is not None and request > limit:
            yield Problem(
                f"{where}: {value} of {name} are requested, and {limits[name]} is the limit",
                "a request is at most its limit",
            )
        elif _is_countable(name) and request != limit:
            yield Problem(
                f"{where}: {value} of {name} are requested, and the limit is {limits.get(name, 'missing')}",
                "devices and huge pages need a limit that is equal to the request",
            )
    names = {*limits, *requests}
    if any(name.startswith("hugepages-") for name in names) and not names & {"cpu", "memory"}:
        yield Problem(
            f"{where}: huge pages are asked for, and neither cores nor memory", "name `--cpus` and `--memory`"
        )


def _is_countable(name: str) -> bool:
    return name.startswith("hugepages-") or ("/" in name and "kubernetes.io/" not in name)


def _asking(pod: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields what each container asks for, and its name."""
    for field in ("containers", "initContainers"):
        for container in pod.get(field) or []:
            yield f"container {container.get('name')}", container.get("resources") or {}
