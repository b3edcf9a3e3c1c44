from __future__ import annotations

from typing import Any

import pytest

from dsrun.errors import UsageError
from dsrun.launcher.scheduler.jobset import JobSetSettings, check_settings, job_set, name_after

SETTINGS = JobSetSettings(
    name="train", image="img:1", nodes=4, gpus=8, namespace="lab", max_restarts=3, grace_s=30
)  # fmt: skip


def pod_of(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


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
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    assert pod["terminationGracePeriodSeconds"] > SETTINGS.grace_s


def test_pods_without_gpus_ask_for_none() -> None:
    settings = JobSetSettings(name="train", image="img", nodes=1, gpus=0)
    manifest = job_set(["train.py"], settings)
    assert "resources" not in pod_of(manifest)["containers"][0]
    assert manifest["metadata"] == {"name": "train"}


@pytest.mark.parametrize(
    ("script", "name"),
    [("train.py", "train"), ("src/My_Train.v2.py", "my-train-v2"), ("7b.py", "dsrun-7b"), ("é.py", "dsrun")],
)
def test_a_set_is_called_after_its_script(script: str, name: str) -> None:
    assert name_after(script) == name
    check_settings(JobSetSettings(name=name, image="img", nodes=1, gpus=0))


def test_a_long_name_leaves_room_for_those_of_pods() -> None:
    name = name_after(f"{'x' * 80}.py")
    assert len(f"{name}-workers-0-99999") == 63


def test_all_that_kubernetes_would_not_take_is_said_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        check_settings(JobSetSettings(name="My Job", image="", nodes=1, gpus=0, namespace="-a"))
    named = [problem.message.split("`")[1] for problem in caught.value.problems]
    assert named == ["--name", "--namespace", "--image"]
