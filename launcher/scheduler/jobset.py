"""A Kubernetes JobSet that runs one `dsrun run` on several pods, as a value. Nothing here talks to a cluster.

One Indexed Job of a pod for each host. The pod of index r starts the ranks of host r only; all meet at the pod of index
0, by the name that JobSet's headless service gives it. See https://jobset.sigs.k8s.io/docs/.

[Note: dollars] The kubelet reads `$(NAME)` in a container's words, and `$$` as `$`. Dollars of the user are doubled, so
that they arrive as they are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from dsrun.contract import NONCE_ENV
from dsrun.errors import Problem, UsageError

API_VERSION = "jobset.x-k8s.io/v1alpha2"
#: Of the one job in the set; part of the pods' names.
_WORKERS = "workers"
_PORT = 29500
#: From the pod's SIGTERM to its SIGKILL, beyond the time that ranks have to end.
_MORE_GRACE_S = 20
#: The label of a pod that says which job of which attempt it belongs to: one for all pods, another after a restart.
_UID_LABEL = "batch.kubernetes.io/controller-uid"
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
#: A pod's name is the set's, `-workers-0-`, and an index of up to 5 digits, and no longer than a part of a DNS name.
_LONGEST_NAME = 63 - len(f"-{_WORKERS}-0-") - 5


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSetSettings:
    """What a cluster has to know.

    Attributes:
        name: of the set.
        image: container image, with dsrun and the script in it.
        nodes: pods.
        gpus: of each pod; 0 for none.
        namespace: None leaves it to kubectl.
        max_restarts: how often all pods are started again after a failure.
        grace_s: seconds that ranks have to end.
    """

    name: str
    image: str
    nodes: int
    gpus: int
    namespace: str | None = None
    max_restarts: int = 0
    grace_s: float = 10.0


def name_after(script: str) -> str:
    """Returns a name for the set made of the script's: `train` of `src/Train.py`."""
    stem = re.sub(r"[^a-z0-9]+", "-", PurePath(script).stem.lower()).strip("-")
    name = stem if stem[:1].isalpha() else f"dsrun-{stem}".rstrip("-")
    return name[:_LONGEST_NAME].rstrip("-")


def check_settings(settings: JobSetSettings) -> None:
    """Looks whether Kubernetes would take the names.

    Raises:
        UsageError: carries each that it would not.
    """
    problems: list[Problem] = []
    if settings.nodes < 1:
        problems.append(Problem(f"`--nodes` is {settings.nodes}; expected 1 or more", "a pod is a host of the job"))
    for option, text, longest in (("--name", settings.name, _LONGEST_NAME), ("--namespace", settings.namespace, 63)):
        if text is not None and (_NAME.fullmatch(text) is None or len(text) > longest):
            way_out = f"up to {longest} small letters, digits and `-`, from a letter to a letter or digit"
            problems.append(Problem(f"`{option}` is {text[:200]!r}, which Kubernetes does not take", way_out))
    if not settings.image or any(char.isspace() for char in settings.image):
        problems.append(Problem(f"`--image` is {settings.image!r}; expected the name of an image", "registry/name:tag"))
    if problems:
        raise UsageError.of(problems)


def pod_command(words: Sequence[str], settings: JobSetSettings) -> list[str]:
    """Returns the words of each pod's container. See [Note: dollars].

    Args:
        words: what stands behind `dsrun run`.
        settings: of the set.
    """
    first = f"{settings.name}-{_WORKERS}-0-0.{settings.name}"
    ours = ["--nodes", str(settings.nodes), "--node-rank", "$(JOB_COMPLETION_INDEX)"]
    ours += ["--master-addr", first, "--master-port", str(_PORT)]
    return ["dsrun", "run", *ours, *(word.replace("$", "$$") for word in words)]


def job_set(words: Sequence[str], settings: JobSetSettings) -> dict[str, Any]:
    """Returns the manifest.

    Args:
        words: what stands behind `dsrun run`.
        settings: of the set; checked.
    """
    container: dict[str, Any] = {
        "name": "dsrun",
        "image": settings.image,
        "command": pod_command(words, settings),
        "env": [
            # Pods of an earlier attempt may still be there: they must not meet those of this one.
            {"name": NONCE_ENV, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{_UID_LABEL}']"}}},
            {"name": "PYTHONUNBUFFERED", "value": "1"},
        ],
        "ports": [{"containerPort": _PORT}],
        # The 64 MiB that containers have by default are too few for NCCL and for data loaders.
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    if settings.gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": settings.gpus}}
    pod = {
        # The set starts all pods again, or none: a rank cannot come back alone.
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": round(settings.grace_s) + _MORE_GRACE_S,
        "containers": [container],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
    job = {
        "completionMode": "Indexed",
        "completions": settings.nodes,
        "parallelism": settings.nodes,
        "backoffLimit": 0,
        "template": {"spec": pod},
    }
    metadata = {"name": settings.name}
    if settings.namespace is not None:
        metadata["namespace"] = settings.namespace
    return {
        "apiVersion": API_VERSION,
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": settings.name},
            "failurePolicy": {"maxRestarts": settings.max_restarts},
            "replicatedJobs": [{"name": _WORKERS, "replicas": 1, "template": {"spec": job}}],
        },
    }
