from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from dsrun.errors import UsageError
from dsrun.launcher.scheduler.jobset import (
    JobSetSettings,
    check_settings,
    job_set,
    longest_name,
    name_after,
    pod_of,
    words_for_gpus,
)
from support.manifests import manifest_errors

SETTINGS = JobSetSettings(
    name="train", image="img:1", nodes=4, gpus=8, namespace="lab", max_restarts=3, grace_s=30
)  # fmt: skip


FULL = JobSetSettings(
    name="train",
    image="registry/train:1",
    nodes=12,
    gpus=8,
    cpus="96",
    memory="900GiB",
    shm="64Gi",
    resources=("rdma/hca=1", "hugepages-2Mi=5Gi"),
    host_network=True,
    patch={
        "metadata": {"labels": {"team": "vision"}},
        "spec": {
            "nodeSelector": {"gpu": "h100"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
            "containers": [{"name": "dsrun", "volumeMounts": [{"name": "data", "mountPath": "/data"}]}],
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
        },
    },
)


def container_of(manifest: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod_of(manifest)["containers"]
    return container


@pytest.mark.parametrize(
    "settings",
    [
        JobSetSettings(name="a", image="img", nodes=1, gpus=0),
        SETTINGS,
        FULL,
        JobSetSettings(name="x" * longest_name(1), image="img", nodes=1, gpus=8),
        JobSetSettings(name="x" * longest_name(1000), image="img", nodes=1000, gpus=8, namespace="7b-lab", cpus="7.5"),
        JobSetSettings(name="a", image="img", nodes=2, gpus=0, resources=("nvidia.com/mig-1g.5gb=1",), memory="1.5T"),
    ],
)
def test_a_cluster_takes_what_the_check_lets_through(settings: JobSetSettings) -> None:
    check_settings(settings)
    assert manifest_errors(job_set(["-n", "8", "train.py"], settings)) == []


def set_field(manifest: dict[str, Any], path: str, value: object) -> None:
    """Changes one field; `pod` is the pods' spec, `job` that of their job, `set` the whole."""
    root, *way, last = path.split()
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    at: Any = {"set": manifest, "job": job, "pod": pod_of(manifest)}[root]
    for step in way:
        at = at[int(step)] if step.isdecimal() else at[step]
    at[last] = value


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("set spec networks", {}, "unknown field 'networks'"),
        ("set spec failurePolicy maxRestart", 1, "unknown field 'maxRestart'"),
        ("set spec network subdomain", "9lives", "9lives"),
        ("set metadata name", "x" * 50, "no label of a DNS name, of 69 letters"),
        ("job completionmode", "Indexed", "unknown field 'completionmode'"),
        ("job completions", "12", "'12'"),
        ("job completions", 200_000, "200000"),
        ("pod restartPolicy", "Always", "Always"),
        ("pod containers 0 volumeMount", [], "unknown field 'volumeMount'"),
        ("pod containers 0 resources limits cpu", 7.5, "7.5 is no quantity"),
        ("pod containers 0 resources requests nvidia.com/gpu", 4, "nvidia.com/gpu: request and limit differ"),
        ("pod containers 0 resources limits", {}, "nvidia.com/gpu: a limit is needed"),
        ("pod containers 0 env 0 value", "x", "a value from two places"),
        ("pod volumes 0 emptyDir medium", "memory", "memory"),
        ("pod volumes 0 name", "other", "mount shm: no such volume"),
    ],
)
def test_a_manifest_that_a_cluster_refuses_would_fail_these_tests(path: str, value: object, said: str) -> None:
    manifest = job_set(["train.py"], FULL)
    set_field(manifest, path, value)
    assert any(said in error for error in manifest_errors(manifest)), manifest_errors(manifest)


def test_a_set_has_one_job_with_a_pod_for_each_host() -> None:
    manifest = job_set(["train.py"], SETTINGS)
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert manifest["metadata"] == {"name": "train", "namespace": "lab"}
    (group,) = manifest["spec"]["replicatedJobs"]
    job = group["template"]["spec"]
    assert (group["name"], group["replicas"]) == ("workers", 1)
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 4, 4)


def test_pods_find_the_first_by_the_name_that_the_headless_service_gives_it() -> None:
    manifest = job_set(["train.py"], SETTINGS)
    assert manifest["spec"]["network"] == {"enableDNSHostnames": True, "subdomain": "train"}
    (container,) = pod_of(manifest)["containers"]
    words = container["command"]
    assert words[words.index("--master-addr") + 1] == "train-workers-0-0.train"
    assert container["ports"] == [{"containerPort": int(words[words.index("--master-port") + 1])}]


def test_each_pod_starts_the_ranks_of_its_own_index_with_the_same_words() -> None:
    words = ["-n", "2", "train.py", "--name", "$HOME and $(JOB_COMPLETION_INDEX)", "a b"]
    (container,) = pod_of(job_set(words, SETTINGS))["containers"]
    assert container["command"] == [
        *("dsrun", "run", "--nodes", "4", "--node-rank", "$(JOB_COMPLETION_INDEX)"),
        *("--master-addr", "train-workers-0-0.train", "--master-port", "29500"),
        *("-n", "2", "train.py", "--name", "$$HOME and $$(JOB_COMPLETION_INDEX)", "a b"),
    ]
    assert container["image"] == "img:1"


def test_a_failure_starts_all_pods_again_or_none_as_often_as_asked() -> None:
    manifest = job_set(["train.py"], SETTINGS)
    assert manifest["spec"]["failurePolicy"] == {"maxRestarts": 3}
    assert manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["backoffLimit"] == 0
    assert pod_of(manifest)["restartPolicy"] == "Never"


def test_pods_of_one_attempt_have_a_nonce_in_common() -> None:
    (container,) = pod_of(job_set(["train.py"], SETTINGS))["containers"]
    (nonce,) = [variable for variable in container["env"] if variable["name"] == "DSRUN_NONCE"]
    path = "metadata.labels['batch.kubernetes.io/controller-uid']"
    assert nonce["valueFrom"] == {"fieldRef": {"fieldPath": path}}


def test_ranks_have_shared_memory_gpus_and_time_to_end() -> None:
    pod = pod_of(job_set(["train.py"], SETTINGS))
    (container,) = pod["containers"]
    (volume,) = pod["volumes"]
    assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": "/dev/shm"}]
    assert volume["emptyDir"] == {"medium": "Memory"}
    assert container["resources"] == {"requests": {"nvidia.com/gpu": 8}, "limits": {"nvidia.com/gpu": 8}}
    assert pod["terminationGracePeriodSeconds"] > SETTINGS.grace_s


def test_what_is_asked_for_is_reserved_and_the_limit() -> None:
    manifest = job_set(["train.py"], replace(SETTINGS, cpus="96", memory="900GiB", shm="64Gi"))
    asked = {"cpu": 96, "memory": "900Gi", "nvidia.com/gpu": 8}
    assert container_of(manifest)["resources"] == {"requests": asked, "limits": asked}
    assert pod_of(manifest)["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}


def test_pods_without_gpus_ask_for_none() -> None:
    settings = JobSetSettings(name="train", image="img", nodes=1, gpus=0)
    manifest = job_set(["train.py"], settings)
    assert "resources" not in container_of(manifest)
    assert "securityContext" not in container_of(manifest)
    assert manifest["metadata"] == {"name": "train"}


@pytest.mark.parametrize(
    ("more", "locks"),
    [
        ({"resources": ("rdma/hca_shared_devices_a=1",)}, True),
        ({"resources": ("networking.gke.io.networks/rdma-0=1",)}, True),
        ({"resources": ("vpc.amazonaws.com/efa=32",)}, False),
        ({"ipc_lock": True}, True),
    ],
)
def test_ranks_may_lock_memory_where_rdma_needs_it(more: dict[str, Any], locks: bool) -> None:
    container = container_of(job_set(["train.py"], replace(SETTINGS, **more)))
    assert container.get("securityContext") == ({"capabilities": {"add": ["IPC_LOCK"]}} if locks else None)
    for text in more.get("resources", ()):
        name, _, count = text.partition("=")
        assert container["resources"]["limits"][name] == container["resources"]["requests"][name] == int(count)


def test_names_of_services_are_found_from_the_nodes_network_too() -> None:
    pod = pod_of(job_set(["train.py"], replace(SETTINGS, host_network=True)))
    assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert "dnsPolicy" not in pod_of(job_set(["train.py"], SETTINGS))


def test_a_patch_changes_the_pods_and_keeps_the_rest() -> None:
    manifest = job_set(["train.py"], FULL)
    pod, container = pod_of(manifest), container_of(manifest)
    assert pod["nodeSelector"] == {"gpu": "h100"}
    assert [volume["name"] for volume in pod["volumes"]] == ["shm", "data"]
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/dev/shm", "/data"]
    assert container["command"][:2] == ["dsrun", "run"]
    template = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    assert template["metadata"] == {"labels": {"team": "vision"}}


@pytest.mark.parametrize(
    ("gpus", "ranks", "backend", "words"),
    [
        (8, None, None, ["--ranks-per-host", "8", "--backend", "nccl"]),
        (8, 8, None, ["--backend", "nccl"]),
        (8, 4, "nccl", []),
        (8, 16, None, []),
        (8, None, "gloo", []),
        (0, None, None, []),
    ],
)
def test_a_pod_is_told_of_its_gpus_so_that_it_says_what_is_wrong_with_them(
    gpus: int, ranks: int | None, backend: str | None, words: list[str]
) -> None:
    assert words_for_gpus(gpus, ranks_per_host=ranks, backend=backend) == words


@pytest.mark.parametrize(
    ("script", "name"),
    [("train.py", "train"), ("src/My_Train.v2.py", "my-train-v2"), ("7b.py", "dsrun-7b"), ("é.py", "dsrun")],
)
def test_a_set_is_called_after_its_script(script: str, name: str) -> None:
    assert name_after(script, 1) == name
    check_settings(JobSetSettings(name=name, image="img", nodes=1, gpus=0))


@pytest.mark.parametrize("nodes", [1, 2, 10, 11, 100_000])
def test_a_long_name_leaves_room_for_those_of_pods_and_no_more(nodes: int) -> None:
    name = name_after(f"{'x' * 80}.py", nodes)
    assert len(f"{name}-workers-0-{nodes - 1}-abcde") == 63
    settings = JobSetSettings(name=name, image="img", nodes=nodes, gpus=0)
    check_settings(settings)
    assert manifest_errors(job_set(["train.py"], settings)) == []
    longer = replace(settings, name=f"{name}x")
    assert manifest_errors(job_set(["train.py"], longer)) != []
    with pytest.raises(UsageError, match=rf"{len(name) + 1} letters; {len(name)} at most"):
        check_settings(longer)


def test_a_namespace_may_begin_with_a_digit_and_a_set_may_not() -> None:
    check_settings(replace(SETTINGS, namespace="7b-lab"))
    with pytest.raises(UsageError):
        check_settings(replace(SETTINGS, name="7b-lab"))


def test_all_that_kubernetes_would_not_take_is_said_at_once() -> None:
    settings = JobSetSettings(
        name="My Job",
        image="",
        nodes=200_000,
        gpus=0,
        namespace="-a",
        cpus="many",
        memory="400m",
        shm="64",
        resources=("cpu=3", "rdma=1", "rdma/hca=0", "rdma/hca=1"),
    )
    with pytest.raises(UsageError) as caught:
        check_settings(settings)
    named = [problem.message.split("`")[1] for problem in caught.value.problems]
    assert named == [
        *("--nodes", "--name", "--namespace", "--image", "--cpus", "--memory", "--shm"),
        *("--resource cpu=3", "--resource", "--resource", "--resource"),
    ]


def test_shared_memory_is_part_of_the_pods_memory() -> None:
    check_settings(replace(SETTINGS, memory="64Gi", shm="64Gi"))
    with pytest.raises(UsageError, match="what lies in /dev/shm is the pod's memory"):
        check_settings(replace(SETTINGS, memory="64G", shm="64Gi"))


def test_a_manifest_shares_no_part_with_its_settings() -> None:
    before = copy.deepcopy(FULL)
    pod_of(job_set(["train.py"], FULL))["tolerations"][0]["key"] = "changed"
    assert before == FULL
