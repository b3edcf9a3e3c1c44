"""What the API server and JobSet's webhook demand of a manifest, as far as `dsrun k8s` writes or merges it.

Written by hand from the published definitions: JobSet v1alpha2 (its CRD and its validating webhook, August 2026) and
Kubernetes 1.33 (batch/v1 and core/v1). Strict: a field that is not in the table is an error, as it is for `kubectl`.
One that is right and missing here is to be added when dsrun writes it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any, cast

Check = Callable[[object, str], Iterator[str]]

LABEL_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
LABEL_1123 = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
QUANTITY = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?")
_FACTORS = {
    "": Decimal(1),
    **{unit: Decimal(1000) ** -power for power, unit in enumerate("mun", start=1)},
    **{unit: Decimal(1000) ** power for power, unit in enumerate("kMGTPE", start=1)},
    **{f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", start=1)},
}


def manifest_errors(manifest: object) -> list[str]:
    """Returns all that would be refused of a JobSet; nothing where it would be taken."""
    errors = list(_JOB_SET(manifest, "manifest"))
    # Rules over several fields need the fields.
    return errors or list(_rules(cast("dict[str, Any]", manifest)))


def amount(quantity: object) -> Decimal:
    """Returns what a quantity comes to."""
    number, unit = re.match(r"([-+0-9.]*)(.*)", str(quantity)).groups()  # pyright: ignore[reportOptionalMemberAccess]
    return Decimal(number) * _FACTORS[unit]


def _fields(table: Mapping[str, Check], *, needs: tuple[str, ...] = ()) -> Check:
    def check(value: object, where: str) -> Iterator[str]:
        if not isinstance(value, dict):
            yield f"{where}: not an object"
            return
        fields = cast("dict[str, object]", value)
        for name, inner in fields.items():
            if name in table:
                yield from table[name](inner, f"{where}.{name}")
            else:
                yield f"{where}: unknown field {name!r}"
        yield from (f"{where}: {name!r} is missing" for name in needs if name not in fields)

    return check


def _each(entry: Check, *, key: str | None = None) -> Check:
    def check(value: object, where: str) -> Iterator[str]:
        if not isinstance(value, list):
            yield f"{where}: not a list"
            return
        entries = cast("list[Any]", value)
        for number, one in enumerate(entries):
            yield from entry(one, f"{where}[{number}]")
        if key is not None:
            keys = [one.get(key) for one in entries if isinstance(one, dict)]
            yield from (f"{where}: {one!r} twice" for one in {one for one in keys if keys.count(one) > 1})

    return check


def _map_of(entry: Check) -> Check:
    def check(value: object, where: str) -> Iterator[str]:
        if not isinstance(value, dict):
            yield f"{where}: not an object"
            return
        for name, inner in cast("dict[object, object]", value).items():
            if not isinstance(name, str):
                yield f"{where}: key {name!r}"
            yield from entry(inner, f"{where}.{name}")

    return check


def _text(pattern: str = r".*", longest: int = 1 << 20) -> Check:
    def check(value: object, where: str) -> Iterator[str]:
        if not isinstance(value, str):
            yield f"{where}: not a string: {value!r}"
        elif re.fullmatch(pattern, value, re.DOTALL) is None or len(value) > longest:
            yield f"{where}: {value!r}"

    return check


def _one_of(*values: str) -> Check:
    return _text("|".join(map(re.escape, values)))


def _whole(least: int = -(2**31), most: int = 2**31 - 1) -> Check:
    def check(value: object, where: str) -> Iterator[str]:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            yield f"{where}: {value!r}"

    return check


def _flag(value: object, where: str) -> Iterator[str]:
    if not isinstance(value, bool):
        yield f"{where}: not a boolean: {value!r}"


def _quantity(value: object, where: str) -> Iterator[str]:
    # An integer or a string: the definition has no other numbers.
    is_number = isinstance(value, int | str) and not isinstance(value, bool)
    if not is_number or QUANTITY.fullmatch(str(value)) is None or amount(value) < 0:
        yield f"{where}: {value!r} is no quantity"


_LABEL = _text(LABEL_1123.pattern, 63)
_KEY = _fields({"key": _text(), "name": _text(), "optional": _flag}, needs=("key",))
_METADATA = _fields({"labels": _map_of(_text()), "annotations": _map_of(_text())})
_ENV = _fields(
    {
        "name": _text(r"[ -<>-~]+"),
        "value": _text(),
        "valueFrom": _fields(
            {
                "fieldRef": _fields(
                    {
                        "apiVersion": _one_of("v1"),
                        "fieldPath": _text(
                            r"metadata\.(name|namespace|uid|(labels|annotations)\['[^']+'\])"
                            r"|spec\.(nodeName|serviceAccountName)|status\.(hostIPs?|podIPs?)"
                        ),
                    },
                    needs=("fieldPath",),
                ),
                "secretKeyRef": _KEY,
                "configMapKeyRef": _KEY,
            }
        ),
    },
    needs=("name",),
)
_MOUNT = _fields(
    {"name": _text(), "mountPath": _text(r"[^:]+"), "subPath": _text(), "readOnly": _flag}, needs=("name", "mountPath")
)
_RESOURCES = _fields({"limits": _map_of(_quantity), "requests": _map_of(_quantity)})
_CONTAINER = _fields(
    {
        "name": _LABEL,
        "image": _text(r"\S+"),
        "imagePullPolicy": _one_of("Always", "IfNotPresent", "Never"),
        "command": _each(_text()),
        "args": _each(_text()),
        "workingDir": _text(),
        "env": _each(_ENV),
        "ports": _each(
            _fields(
                {
                    "name": _text(r"[a-z0-9-]+", 15),
                    "containerPort": _whole(1, 65535),
                    "hostPort": _whole(1, 65535),
                    "protocol": _one_of("TCP", "UDP", "SCTP"),
                },
                needs=("containerPort",),
            )
        ),
        "resources": _RESOURCES,
        "securityContext": _fields(
            {
                "capabilities": _fields({"add": _each(_text(r"[A-Z_]+")), "drop": _each(_text(r"[A-Z_]+"))}),
                "privileged": _flag,
                "runAsUser": _whole(0),
            }
        ),
        "volumeMounts": _each(_MOUNT, key="mountPath"),
    },
    needs=("name",),
)
_VOLUME = _fields(
    {
        "name": _LABEL,
        "emptyDir": _fields({"medium": _one_of("", "Memory"), "sizeLimit": _quantity}),
        "persistentVolumeClaim": _fields({"claimName": _text(r"\S+", 253), "readOnly": _flag}, needs=("claimName",)),
        "hostPath": _fields({"path": _text(r"/.*"), "type": _text()}, needs=("path",)),
        "configMap": _fields({"name": _text()}),
        "secret": _fields({"secretName": _text()}),
    },
    needs=("name",),
)
_TOLERATION = _fields(
    {
        "key": _text(),
        "operator": _one_of("Exists", "Equal"),
        "value": _text(),
        "effect": _one_of("NoSchedule", "PreferNoSchedule", "NoExecute", ""),
    }
)
_SELECTOR = _fields({"matchLabels": _map_of(_text())})
_POD = _fields(
    {
        "activeDeadlineSeconds": _whole(1),
        "affinity": _fields(
            {
                "podAntiAffinity": _fields(
                    {
                        "requiredDuringSchedulingIgnoredDuringExecution": _each(
                            _fields({"labelSelector": _SELECTOR, "topologyKey": _text(r".+")}, needs=("topologyKey",))
                        )
                    }
                )
            }
        ),
        "containers": _each(_CONTAINER, key="name"),
        "initContainers": _each(_CONTAINER, key="name"),
        "dnsPolicy": _one_of("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"),
        "hostIPC": _flag,
        "hostNetwork": _flag,
        "imagePullSecrets": _each(_fields({"name": _text()})),
        "nodeSelector": _map_of(_text()),
        "priorityClassName": _text(),
        # Of a Job's pods: `Always` is for others.
        "restartPolicy": _one_of("Never", "OnFailure"),
        "runtimeClassName": _text(),
        "schedulerName": _text(),
        "serviceAccountName": _text(),
        "terminationGracePeriodSeconds": _whole(0),
        "tolerations": _each(_TOLERATION),
        "volumes": _each(_VOLUME, key="name"),
    },
    needs=("containers", "restartPolicy"),
)
_JOB = _fields(
    {
        "activeDeadlineSeconds": _whole(1),
        "backoffLimit": _whole(0),
        "completionMode": _one_of("Indexed", "NonIndexed"),
        "completions": _whole(0, 100_000),
        "parallelism": _whole(0, 100_000),
        "template": _fields({"metadata": _METADATA, "spec": _POD}, needs=("spec",)),
    },
    needs=("template",),
)
_REPLICATED_JOB = _fields(
    {
        "name": _text(),
        "replicas": _whole(0),
        "groupName": _text(LABEL_1035.pattern, 63),
        "template": _fields({"metadata": _METADATA, "spec": _JOB}, needs=("spec",)),
    },
    needs=("name", "template"),
)
_JOB_SET = _fields(
    {
        "apiVersion": _one_of("jobset.x-k8s.io/v1alpha2"),
        "kind": _one_of("JobSet"),
        "metadata": _fields(
            {
                "name": _text(rf"{LABEL_1123.pattern}(\.{LABEL_1123.pattern})*", 253),
                "namespace": _LABEL,
                "labels": _map_of(_text()),
                "annotations": _map_of(_text()),
            },
            needs=("name",),
        ),
        "spec": _fields(
            {
                "failurePolicy": _fields(
                    {
                        "maxRestarts": _whole(),
                        "restartStrategy": _one_of("Recreate", "BlockingRecreate", "InPlaceRestart"),
                    }
                ),
                "network": _fields(
                    {
                        "enableDNSHostnames": _flag,
                        "publishNotReadyAddresses": _flag,
                        "subdomain": _text(LABEL_1035.pattern, 63),
                    }
                ),
                "replicatedJobs": _each(_REPLICATED_JOB, key="name"),
                "suspend": _flag,
                "ttlSecondsAfterFinished": _whole(0),
            },
            needs=("replicatedJobs",),
        ),
    },
    needs=("apiVersion", "kind", "metadata", "spec"),
)


def _rules(manifest: dict[str, Any]) -> Iterator[str]:
    """Yields what no single field says."""
    name = manifest["metadata"]["name"]
    for group in manifest["spec"]["replicatedJobs"]:
        job = group["template"]["spec"]
        last = group.get("replicas", 1) - 1
        if job.get("parallelism", 1) * group.get("replicas", 1) > 2**31 - 1:
            yield "replicas x parallelism: too many"
        made = [f"{name}-{group['name']}-{last}"]
        if job.get("completionMode") == "Indexed":
            if "completions" not in job:
                yield "an Indexed job needs `completions`"
            else:
                made.append(f"{made[0]}-{job['completions'] - 1}-abcde")
        for one in made:
            if LABEL_1035.fullmatch(one) is None or len(one) > 63:
                yield f"{one}: no label of a DNS name, of {len(one)} letters"
        yield from _pod_rules(job["template"]["spec"])


def _pod_rules(pod: dict[str, Any]) -> Iterator[str]:
    containers = [*pod["containers"], *pod.get("initContainers", [])]
    if not pod["containers"]:
        yield "a pod without a container"
    volumes = {volume["name"] for volume in pod.get("volumes", [])}
    for volume in pod.get("volumes", []):
        if len(volume) != 2:
            yield f"volume {volume['name']}: one source is needed, and no other"
    for container in containers:
        for mount in container.get("volumeMounts", []):
            if mount["name"] not in volumes:
                yield f"mount {mount['name']}: no such volume"
        for variable in container.get("env", []):
            if {"value", "valueFrom"} <= variable.keys():
                yield f"variable {variable['name']}: a value from two places"
        for port in container.get("ports", []):
            if pod.get("hostNetwork") and port.get("hostPort", port["containerPort"]) != port["containerPort"]:
                yield f"port {port['containerPort']}: another one on the node's network"
        yield from _resource_rules(container.get("resources", {}))


def _resource_rules(resources: dict[str, Any]) -> Iterator[str]:
    limits, requests = resources.get("limits", {}), resources.get("requests", {})
    for name, value in {**limits, **requests}.items():
        is_device = "/" in name and "kubernetes.io/" not in name
        if is_device and amount(value) != int(amount(value)):
            yield f"{name}: {value} is no whole number"
        if (is_device or name.startswith("hugepages-")) and name not in limits:
            yield f"{name}: a limit is needed"
        if name in limits and name in requests:
            if amount(requests[name]) > amount(limits[name]):
                yield f"{name}: more is requested than the limit"
            if (is_device or name.startswith("hugepages-")) and amount(requests[name]) != amount(limits[name]):
                yield f"{name}: request and limit differ"
        if not is_device and name not in ("cpu", "memory", "ephemeral-storage") and not name.startswith("hugepages-"):
            yield f"{name}: no resource of Kubernetes"
    names = {*limits, *requests}
    if any(name.startswith("hugepages-") for name in names) and not names & {"cpu", "memory"}:
        yield "huge pages need cores or memory"
