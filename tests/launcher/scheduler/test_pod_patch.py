from __future__ import annotations

import copy
from typing import Any

import pytest

from dsrun.errors import UsageError
from dsrun.launcher.scheduler.pod_patch import patched

TEMPLATE: dict[str, Any] = {
    "spec": {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 30,
        "containers": [
            {
                "name": "dsrun",
                "image": "img",
                "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
                "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
                "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
            }
        ],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
}


def patch(spec: object) -> dict[str, Any]:
    before = copy.deepcopy(TEMPLATE)
    result = patched(TEMPLATE, {"spec": spec}, source="pod.yaml", container="dsrun")
    assert before == TEMPLATE, "the template itself stays as it was"
    return result["spec"]


def test_a_container_and_what_it_mounts_are_merged_by_their_names() -> None:
    mount = {"name": "data", "mountPath": "/data"}
    volume = {"name": "data", "persistentVolumeClaim": {"claimName": "data"}}
    spec = patch({"containers": [{"name": "dsrun", "volumeMounts": [mount]}], "volumes": [volume]})
    (container,) = spec["containers"]
    assert container["volumeMounts"] == [{"name": "shm", "mountPath": "/dev/shm"}, mount]
    assert container["image"] == "img"
    assert spec["volumes"] == [*TEMPLATE["spec"]["volumes"], volume]


def test_a_field_of_an_entry_is_changed_in_its_place() -> None:
    spec = patch({"containers": [{"name": "dsrun", "env": [{"name": "A", "value": "9"}]}]})
    assert spec["containers"][0]["env"] == [{"name": "A", "value": "9"}, {"name": "B", "value": "2"}]
    assert patch({"volumes": [{"name": "shm", "emptyDir": {"sizeLimit": "8Gi"}}]})["volumes"] == [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}
    ]


def test_null_takes_a_field_away() -> None:
    spec = patch({"terminationGracePeriodSeconds": None, "containers": [{"name": "dsrun", "securityContext": None}]})
    assert "terminationGracePeriodSeconds" not in spec
    assert "securityContext" not in spec["containers"][0]


def test_other_lists_are_replaced() -> None:
    capabilities = {"securityContext": {"capabilities": {"add": ["SYS_NICE"]}}}
    spec = patch({"containers": [{"name": "dsrun", **capabilities}]})
    assert spec["containers"][0]["securityContext"] == capabilities["securityContext"]


def test_another_container_comes_behind() -> None:
    spec = patch({"containers": [{"name": "metrics", "image": "m:1"}]})
    assert [container["name"] for container in spec["containers"]] == ["dsrun", "metrics"]


@pytest.mark.parametrize(
    ("whole", "said"),
    [
        (["a"], "expected the fields of a pod's template, got a list"),
        ({"nodeSelector": {}}, "`nodeSelector` is no field of a pod's template"),
        ({"spec": None}, "`spec` is nothing"),
        ({"spec": {"containers": {"name": "dsrun"}}}, "`spec` has a mapping as `containers`"),
        ({"spec": {"containers": [{"image": "x"}]}}, "`spec`: an entry of `containers` has no `name`"),
        ({"spec": {"volumes": [{"$patch": "replace", "name": "x"}]}}, "'$patch', which is not known here"),
        ({"spec": {"nodeSelector": {1: "x"}}}, "the field 1, which is not known here"),
        ({"spec": {"restartPolicy": "OnFailure"}}, "`restartPolicy` is OnFailure"),
        ({"spec": {"containers": None}}, "the container `dsrun` is gone"),
        (
            {"spec": {"containers": [{"name": "dsrun", "resources": {"requests": {"rdma/hca": 1}}}]}},
            "container dsrun: 1 of rdma/hca are requested, and the limit is missing",
        ),
    ],
)
def test_what_is_no_patch_or_would_be_refused_is_told_with_its_file(whole: object, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        patched(TEMPLATE, whole, source="pod.yaml", container="dsrun")
    assert said in caught.value.problems[0].message
    assert caught.value.problems[0].message.startswith("pod.yaml: ")
