from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from dsrun.launcher.scheduler.pod_resources import (
    amount,
    quality_of,
    read_cpus,
    read_resource,
    read_size,
    resource_problems,
)


@pytest.mark.parametrize(
    ("text", "cores"),
    [("96", 96), ("7.5", "7.5"), ("7500m", "7500m"), ("0", None), ("-1", None), ("8 cores", None), ("", None)],
)
def test_cores_are_read_as_kubernetes_reads_them(text: str, cores: object) -> None:
    assert read_cpus(text) == cores


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *(("900Gi", "900Gi"), ("900GiB", "900Gi"), ("1.5Ti", "1.5Ti"), ("64G", "64G"), ("64GB", "64G")),
        # A thousandth of a byte, and bytes that nobody means.
        *(("400m", None), ("900", None), ("0Gi", None), ("9 Gi", None)),
    ],
)
def test_a_size_has_a_unit_and_thousandths_are_none(text: str, size: object) -> None:
    assert read_size(text) == size


@pytest.mark.parametrize(
    ("text", "resource"),
    [
        ("rdma/hca_shared_devices_a=1", ("rdma/hca_shared_devices_a", 1)),
        ("vpc.amazonaws.com/efa=32", ("vpc.amazonaws.com/efa", 32)),
        ("hugepages-2Mi=5Gi", ("hugepages-2Mi", "5Gi")),
        ("ephemeral-storage=200Gi", ("ephemeral-storage", "200Gi")),
        *((text, None) for text in ("rdma/hca", "rdma/hca=", "rdma/hca=0", "rdma/hca=1.5", "hugepages-2Mi=4", "efa=1")),
        ("Rdma.Io/hca=1", None),
        (f"rdma/{'x' * 64}=1", None),
    ],
)
def test_a_resource_is_named_in_full_and_counted(text: str, resource: object) -> None:
    assert read_resource(text) == resource


@pytest.mark.parametrize(
    ("quantity", "value"),
    [(8, 8), ("7500m", Fraction(15, 2)), ("1Ki", 1024), ("1.5G", 1_500_000_000), ("2e3", 2000), ("5.", 5), (".5", 0.5)],
)
def test_quantities_are_compared_by_what_they_come_to(quantity: object, value: object) -> None:
    assert amount(quantity) == value


def pod(*resources: dict[str, Any]) -> dict[str, Any]:
    return {"containers": [{"name": f"c{number}", "resources": one} for number, one in enumerate(resources)]}


BOTH = {"cpu": 8, "memory": "1Gi"}


@pytest.mark.parametrize(
    ("spec", "quality"),
    [
        (pod({}), "BestEffort"),
        # GPUs do not count.
        (pod({"limits": {"nvidia.com/gpu": 8}}), "BestEffort"),
        (pod({"limits": BOTH}), "Guaranteed"),
        (pod({"limits": BOTH, "requests": {"cpu": "8000m", "memory": "1024Mi"}}), "Guaranteed"),
        (pod({"limits": BOTH, "requests": {"cpu": 4}}), "Burstable"),
        (pod({"requests": BOTH}), "Burstable"),
        (pod({"limits": {"cpu": 8}}), "Burstable"),
        # One more container that asks for nothing.
        (pod({"limits": BOTH}, {}), "Burstable"),
        ({**pod({"limits": BOTH}), "initContainers": [{"name": "first"}]}, "Burstable"),
    ],
)
def test_cores_and_memory_decide_about_a_pods_class(spec: dict[str, Any], quality: str) -> None:
    assert quality_of(spec) == quality


@pytest.mark.parametrize(
    ("resources", "said"),
    [
        ({"limits": {"rdma/hca": 1}}, []),
        ({"limits": {"rdma/hca": 1}, "requests": {"rdma/hca": 1}}, []),
        ({"requests": {"rdma/hca": 1}}, ["1 of rdma/hca are requested, and the limit is missing"]),
        ({"limits": {"rdma/hca": 2}, "requests": {"rdma/hca": 1}}, ["1 of rdma/hca are requested, and the limit is 2"]),
        ({"limits": {"cpu": 2}, "requests": {"cpu": 4}}, ["4 of cpu are requested, and 2 is the limit"]),
        ({"limits": {"memory": "lots"}}, ["`resources.limits` has 'lots' of memory; expected a quantity"]),
        # As YAML reads `cpu: 7.5`; JobSet's definition takes whole numbers and words.
        ({"limits": {"cpu": 7.5}}, ["`resources.limits` has 7.5 of cpu, a number with a point; expected a quantity"]),
        ({"limits": {"hugepages-2Mi": "4Gi"}}, ["huge pages are asked for, and neither cores nor memory"]),
    ],
)
def test_what_kubernetes_would_refuse_is_told(resources: dict[str, Any], said: list[str]) -> None:
    assert [problem.message for problem in resource_problems(pod(resources))] == [
        f"container c0: {one}" for one in said
    ]


def test_a_number_with_a_point_is_to_be_written_in_quotes() -> None:
    (problem,) = resource_problems(pod({"limits": {"cpu": 7.5}}))
    assert problem.hint == "write it in quotes, '7.5': JobSet takes whole numbers and words"
    assert resource_problems(pod({"limits": {"cpu": "7.5"}})) == []
