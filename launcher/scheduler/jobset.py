"""A Kubernetes JobSet that runs one `dsrun run` on several pods, as a value. Nothing here talks to a cluster.

One Indexed Job of a pod for each host. The pod of index r starts the ranks of host r only; all meet at the pod of index
0, by the name that JobSet's headless service gives it. See https://jobset.sigs.k8s.io/docs/.

[Note: dollars] The kubelet reads `$(NAME)` in a container's words, and `$$` as `$`. Dollars of the user are doubled, so
that they arrive as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from dsrun.contract.environment import NONCE_ENV
from dsrun.errors import Problem, UsageError

from .pod_patch import patched
from .pod_resources import GPU, Quantity, amount, read_cpus, read_resource, read_size

API_VERSION = "jobset.x-k8s.io/v1alpha2"
#: Of the one job in the set; part of the pods' names.
_WORKERS = "workers"
_PORT = 29500
#: From the pod's SIGTERM to its SIGKILL, beyond the time that ranks have to end.
_MORE_GRACE_S = 20
#: The label of a pod that says which job of which attempt it belongs to: one for all pods, another after a restart.
_UID_LABEL = "batch.kubernetes.io/controller-uid"
#: Of dsrun's container in a pod.
_CONTAINER = "dsrun"
#: A part of a DNS name, which those of services and jobs begin with a letter. Namespaces may begin with a digit.
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_LONGEST_LABEL = 63
#: Kubernetes takes no Indexed Job with more pods at once.
_MOST_NODES = 100_000
#: Resources that options of their own ask for.
_OPTIONS_OF = {"cpu": "--cpus N", "memory": "--memory SIZE", GPU: "--gpus N"}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSetSettings:
    """What a cluster has to know.

    Attributes:
        name: name of the JobSet.
        image: container image, with dsrun and the script in it.
        nodes: pods.
        gpus: number of GPUs of each pod; 0 for none.
        namespace: None leaves it to kubectl.
        max_restarts: number of times that all pods are started again after a failure.
        grace_s: seconds that ranks have to end.
        cpus: cores of each pod, as a request and as the limit; None asks for none.
        memory: memory of each pod, as a request and as the limit; None asks for none.
        shm: most that a pod may put into /dev/shm; None leaves that to the memory that it may have.
        resources: further ones of each pod, `NAME=N`.
        ipc_lock: the container may lock memory, which RDMA needs, however low the limit of its node is.
        host_network: pods use the network of their nodes.
        patch: changes to the pods' template, as they were read; None for none.
        patch_source: source of the changes in `patch`, for messages.
    """

    name: str
    image: str
    nodes: int
    gpus: int
    namespace: str | None = None
    max_restarts: int = 0
    grace_s: float = 10.0
    cpus: str | None = None
    memory: str | None = None
    shm: str | None = None
    resources: tuple[str, ...] = ()
    ipc_lock: bool = False
    host_network: bool = False
    patch: object = None
    patch_source: str = ""


def longest_name(nodes: int) -> int:
    """Returns how long a set's name may be: with what makes it a pod's it is one part of a DNS name.

    Args:
        nodes: pods.
    """
    return _LONGEST_LABEL - len(f"-{_WORKERS}-0-{max(nodes, 1) - 1}-abcde")


def name_after(script: str, nodes: int) -> str:
    """Returns a name for the set made of the script's: `train` of `src/Train.py`."""
    stem = re.sub(r"[^a-z0-9]+", "-", PurePath(script).stem.lower()).strip("-")
    name = stem if stem[:1].isalpha() else f"dsrun-{stem}".rstrip("-")
    return name[: longest_name(nodes)].rstrip("-")


def check_settings(settings: JobSetSettings) -> None:
    """Looks whether Kubernetes would take names and resources.

    Raises:
        UsageError: carries each that it would not.
    """
    problems = [*_name_problems(settings), *_resource_problems(settings)]
    if problems:
        raise UsageError.of(problems)


def _name_problems(settings: JobSetSettings) -> Iterator[Problem]:
    if not 1 <= settings.nodes <= _MOST_NODES:
        yield Problem(f"`--nodes` is {settings.nodes}; expected 1 to {_MOST_NODES}", "a pod is a host of the job")
    longest = longest_name(settings.nodes)
    for option, text, pattern, most in (
        ("--name", settings.name, _NAME, longest),
        ("--namespace", settings.namespace, _NAMESPACE, _LONGEST_LABEL),
    ):
        if text is None:
            continue
        if pattern.fullmatch(text) is None:
            first = "letter" if pattern is _NAME else "letter or digit"
            yield Problem(
                f"`{option}` is {text[:200]!r}, which Kubernetes does not take",
                f"up to {most} small letters, digits and `-`, from a {first} to a letter or digit",
            )
        elif len(text) > most:
            pods = f"; pods are called NAME-{_WORKERS}-0-{settings.nodes - 1}-abcde, with {_LONGEST_LABEL} at most"
            yield Problem(
                f"`{option}` is {text[:200]!r}, {len(text)} letters; {most} at most{pods if pattern is _NAME else ''}",
                "a shorter one",
            )
    if not settings.image or any(char.isspace() for char in settings.image):
        yield Problem(f"`--image` is {settings.image!r}; expected the name of an image", "registry/name:tag")


def _resource_problems(settings: JobSetSettings) -> Iterator[Problem]:
    if settings.cpus is not None and read_cpus(settings.cpus) is None:
        yield Problem(f"`--cpus` is {settings.cpus!r}; expected a number of cores", "`--cpus 96`, 7.5 or 7500m")
    for option, text in (("--memory", settings.memory), ("--shm", settings.shm)):
        if text is not None and read_size(text) is None:
            yield Problem(f"`{option}` is {text!r}; expected a size", f"`{option} 900Gi`, with Mi, Gi, Ti, M, G or T")
    shm, memory = (None if text is None else amount(read_size(text)) for text in (settings.shm, settings.memory))
    if shm is not None and memory is not None and shm > memory:
        yield Problem(
            f"`--shm` is {settings.shm}, and `--memory` {settings.memory}: what lies in /dev/shm is the pod's memory",
            "less for `--shm`, or more for `--memory`",
        )
    names: set[str] = set()
    for text in settings.resources:
        name = text.partition("=")[0]
        if name in _OPTIONS_OF:
            yield Problem(f"`--resource {text}`: {name} has an option of its own", f"`{_OPTIONS_OF[name]}`")
        elif name in names:
            yield Problem(f"`--resource` names {name} twice", "once, with all that a pod needs")
        elif read_resource(text) is None:
            yield Problem(
                f"`--resource` is {text!r}; expected NAME=N",
                "`rdma/hca=1` or `vpc.amazonaws.com/efa=32`, as `kubectl describe node` shows it; `hugepages-2Mi=5Gi`",
            )
        names.add(name)


def words_for_gpus(gpus: int, *, ranks_per_host: int | None, backend: str | None) -> list[str]:
    """Returns options of `dsrun run` by which a pod says what is wrong with its GPUs, and does not train without them.

    Args:
        gpus: number of GPUs of each pod.
        ranks_per_host: number of ranks on each host as the user gave it; None where it was not given.
        backend: backend by which ranks talk, as the user gave it; None where it was not given.
    """
    if not gpus or backend == "gloo" or (ranks_per_host is not None and ranks_per_host > gpus):
        return []
    ranks = ["--ranks-per-host", str(gpus)] if ranks_per_host is None else []
    return ranks + (["--backend", "nccl"] if backend is None else [])


def pod_command(words: Sequence[str], settings: JobSetSettings) -> list[str]:
    """Returns the words of each pod's container. See [Note: dollars].

    Args:
        words: words that will stand after `dsrun run`.
        settings: settings of the JobSet.
    """
    first = f"{settings.name}-{_WORKERS}-0-0.{settings.name}"
    ours = ["--nodes", str(settings.nodes), "--node-rank", "$(JOB_COMPLETION_INDEX)"]
    ours += ["--master-addr", first, "--master-port", str(_PORT)]
    return ["dsrun", "run", *ours, *(word.replace("$", "$$") for word in words)]


def job_set(words: Sequence[str], settings: JobSetSettings) -> dict[str, Any]:
    """Returns the manifest.

    Args:
        words: words that will stand after `dsrun run`.
        settings: settings of the JobSet, already checked.

    Raises:
        UsageError: carries what is wrong with the patch.
    """
    container: dict[str, Any] = {
        "name": _CONTAINER,
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
    resources = _resources(settings)
    if resources:
        # Requests that are equal to limits: Guaranteed, where cores and memory are named.
        container["resources"] = {"requests": resources, "limits": dict(resources)}
    if settings.ipc_lock or any("rdma" in name for name in resources):
        # A container may lock 64 KiB or 8 MiB otherwise, and NCCL registers all that it sends from.
        container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
    shm = {"medium": "Memory"} if settings.shm is None else {"medium": "Memory", "sizeLimit": read_size(settings.shm)}
    # Names of services are not found from a node's network without the policy.
    network = {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"} if settings.host_network else {}
    pod = {
        # The set starts all pods again, or none: a rank cannot come back alone.
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": round(settings.grace_s) + _MORE_GRACE_S,
        **network,
        "containers": [container],
        "volumes": [{"name": "shm", "emptyDir": shm}],
    }
    template: dict[str, Any] = {"spec": pod}
    if settings.patch is not None:
        template = patched(template, settings.patch, source=settings.patch_source, container=_CONTAINER)
    job = {
        "completionMode": "Indexed",
        "completions": settings.nodes,
        "parallelism": settings.nodes,
        "backoffLimit": 0,
        "template": template,
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


def pod_of(manifest: dict[str, Any]) -> dict[str, Any]:
    """Returns the spec of a set's pods."""
    return manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def _resources(settings: JobSetSettings) -> dict[str, Quantity]:
    """Returns what each pod asks for."""
    cpus = None if settings.cpus is None else read_cpus(settings.cpus)
    memory = None if settings.memory is None else read_size(settings.memory)
    named: list[tuple[str, Quantity | None]] = [("cpu", cpus), ("memory", memory), (GPU, settings.gpus or None)]
    further = (read_resource(text) for text in settings.resources)
    return {name: value for name, value in (*named, *filter(None, further)) if value is not None}
