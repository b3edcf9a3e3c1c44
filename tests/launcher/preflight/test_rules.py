"""All hosts of a job are judged at once; what is alike is not told, and every fault has its hosts and a way out."""

from __future__ import annotations

from typing import Any

import pytest

from dsrun.launcher.machine.devices.unusable import UnusableGpus
from dsrun.launcher.machine.gpus.left_out import LeftOut, left_out_gpus
from dsrun.launcher.preflight.findings import Requirements
from dsrun.launcher.preflight.rules import judge
from dsrun.launcher.survey.client import NoAnswer
from support.host_facts import CPU, GIB, GPU, cluster, gpus, judged, only, rdma, specs


def test_hosts_that_are_alike_have_nothing_to_tell() -> None:
    assert judged(16) == []
    assert judged(16, wants=GPU, slots=8, gpus=gpus(8)) == []
    assert judged(1) == []


def test_one_host_without_an_answer_does_not_hide_another_nor_what_else_is_wrong() -> None:
    seen = cluster(4, {"n3": {"torch": "2.11.0+cu130"}})
    refused = NoAnswer("connection refused", "is sshd running?", unreached=True)
    seen = {**seen, "n2": refused, "n4": refused}
    found = judge(specs(4), seen, CPU)
    assert [(finding.name, finding.text, finding.fix) for finding in found] == [
        ("host", "n2 and n4: connection refused", "is sshd running?"),
        ("torch", "2.13.0+cu130 on n1, 2.11.0+cu130 on n3", "`pip install torch==2.13.0+cu130` on n3"),
    ]
    assert {finding.verdict for finding in found} == {"red"}


def test_hosts_of_which_none_answers_are_all_told() -> None:
    seen = {f"n{number}": NoAnswer("no answer", unreached=True) for number in range(1, 7)}
    assert only(judge(specs(6), seen, CPU)) == ("red", "host", "all 6 hosts: no answer", tuple(seen))


@pytest.mark.parametrize(
    ("there", "chosen", "slots", "text"),
    [
        (gpus(4), None, 8, "n1: 4 GPUs for 8 ranks"),
        (gpus(1), None, 2, "n1: 1 GPU for 2 ranks"),
        ((), None, 1, "n1: no GPU: no NVIDIA driver"),
        (gpus(4), (0, 7), 2, "n1: no GPU 7; it has GPUs 0 to 3"),
        (gpus(1), (0, 1), 2, "n1: no GPU 1; it has GPU 0 only"),
    ],
)
def test_a_host_with_too_few_gpus_is_refused(there: Any, chosen: Any, slots: int, text: str) -> None:
    found = judged(1, wants=GPU, gpus=there, slots=slots, fields={"gpus": chosen})
    assert only(found) == ("red", "GPUs", text, ("n1",))


def test_who_is_on_a_gpu_that_the_job_takes_is_named() -> None:
    busy = gpus(4, used_by={1: "pid 4242 of user bob"}, free=19)
    text = "n1: GPU 1 used by pid 4242 of user bob, 19.0 GiB of 80.0 GiB free"
    assert only(judged(1, wants=GPU, slots=4, gpus=busy)) == ("amber", "GPU use", text, ("n1",))
    assert judged(1, wants=GPU, slots=1, gpus=busy) == []
    assert judged(1, wants=GPU, slots=2, fields={"gpus": (0, 3)}, gpus=busy) == []
    assert len(judged(1, wants=GPU, slots=1, fields={"gpus": (1,)}, gpus=busy)) == 1


def test_a_gpu_without_free_memory_is_refused() -> None:
    verdict, _, text, _ = only(judged(1, wants=GPU, gpus=gpus(1, free=0)))
    assert (verdict, text) == ("red", "n1: GPU 0 full, 0 B of 80.0 GiB free")
    one_of_two = (*gpus(1, free=0), gpus(2)[1])
    assert only(judged(1, wants=GPU, gpus=one_of_two))[0] == "amber"
    assert only(judged(1, wants=GPU, gpus=one_of_two, fields={"gpus": (0,)}))[0] == "red"
    assert only(judged(1, wants=GPU, gpus=one_of_two, slots=2))[0] == "red"


def test_without_a_word_on_gpus_what_is_wrong_with_them_is_told_and_refuses_nothing() -> None:
    assert judged(2, wants=Requirements(), slots=4) == []
    assert only(judged(1, wants=Requirements(), gpus=gpus(1, free=0)))[:2] == ("amber", "GPU use")
    odd: dict[str, dict[str, Any]] = {"n1": {"cuda": None}, "n2": {"gpus": (), "place": "n1"}}
    found = judged(2, odd, wants=Requirements(), gpus=gpus(1))
    assert [(finding.verdict, finding.text) for finding in found] == [
        ("amber", "n1: torch 2.13.0+cu130 is built without CUDA"),
        ("amber", "n2: no GPU: no NVIDIA driver"),
        ("amber", "both hosts: one machine, and their ranks would share GPUs"),
    ]


FAULT = {
    "gpus": (),
    "no_gpus": "the NVIDIA driver does not answer: Unknown Error",
    "gpus_unusable": UnusableGpus(
        text="the GPUs of this machine cannot be used: Unknown Error", fix="reboot; `--no-gpu` trains on the CPU"
    ),
}


@pytest.mark.parametrize("wants", [Requirements(), GPU])
@pytest.mark.parametrize("others", [(), gpus(1)])
def test_a_host_whose_driver_fails_is_refused_though_no_host_has_a_gpu(wants: Requirements, others: Any) -> None:
    found = judged(2, {"n2": FAULT}, wants=wants, gpus=others)
    (fault,) = [finding for finding in found if finding.name == "GPU driver"]
    assert (fault.verdict, fault.text) == ("red", "n2: the GPUs of this machine cannot be used: Unknown Error")
    assert fault.fix == "reboot; `--no-gpu` trains on the CPU"
    assert not [finding for finding in found if "n2: no GPU" in finding.text]


def test_a_job_that_is_meant_for_the_cpu_asks_no_host_for_its_driver() -> None:
    assert judged(2, {"n2": FAULT}, wants=CPU) == []


def test_a_gpu_that_a_host_leaves_out_is_told() -> None:
    left_out = tuple(left_out_gpus([LeftOut(index=3, reason="GPU is lost", is_forbidden=False)], uncut=(), unlisted=0))
    (lost,) = judged(1, wants=GPU, slots=3, gpus=gpus(3), left_out=left_out)
    text = "n1: GPU 3 left out: the driver counts it and cannot reach it (GPU is lost)"
    assert (lost.verdict, lost.name, lost.text) == ("amber", "GPU driver", text)
    assert lost.fix.endswith("; or leave the host out with `--exclude` if its ranks need all GPUs")


def test_two_names_of_one_machine_are_told_and_refused_where_they_share_gpus() -> None:
    assert only(judged(2, place="same")) == ("amber", "machine", "both hosts: one machine", ("n1", "n2"))
    verdict, _, text, _ = only(judged(2, place="same", wants=GPU, gpus=gpus(8), slots=2))
    assert (verdict, text) == ("red", "both hosts: one machine, and their ranks would share GPUs")
    halves = [*specs(2, slots=2)]
    halves = [
        halves[0],
        type(halves[0])(name="n2", slots=2, source="hosts:2", gpus=(2, 3)),
    ]
    (found,) = judge(halves, cluster(2, place="same", gpus=gpus(8)), GPU)
    assert found.verdict == "amber"


@pytest.mark.parametrize(
    ("change", "verdict", "name", "text"),
    [
        (
            {"shm_total_bytes": None},
            "red",
            "/dev/shm",
            "n2: /dev/shm is not there; ranks and data loaders exchange tensors by it",
        ),
        ({"shm_total_bytes": 64 << 20}, "amber", "/dev/shm", "n2: /dev/shm of 64.0 MiB, small for data loaders"),
        ({"shm_free_bytes": 0}, "amber", "/dev/shm", "n2: /dev/shm is full"),
        (
            {"memlock_bytes": 65536, **rdma(0)},
            "amber",
            "memlock",
            "n2: 64.0 KiB may be locked: RDMA fails with so little",
        ),
        ({"nofile": 256}, "amber", "nofile", "n2: 256 open files, few for many ranks and data loaders"),
        ({"nofile": 4095}, "amber", "nofile", "n2: 4095 open files, few for many ranks and data loaders"),
        ({"total_bytes": 256 * GIB}, "amber", "memory", "256.0 GiB on n2, 512.0 GiB on the usual host"),
        ({"cgroup_limit_bytes": 8 * GIB}, "amber", "memory", "8.0 GiB on n2, 512.0 GiB on the usual host"),
        ({"cores_usable": 2}, "amber", "cores", "2 on n2, 64 on the usual host"),
        ({"offset_s": 2.0}, "amber", "clock", "n2: 2.0s ahead of this machine (give or take 1 ms)"),
        ({"offset_s": -7200.0}, "red", "clock", "n2: 2h 0m 0s behind this machine (give or take 1 ms)"),
    ],
)
def test_what_a_host_lacks_is_told(change: dict[str, Any], verdict: str, name: str, text: str) -> None:
    assert only(judged(3, {"n2": change})) == (verdict, name, text, ("n2",))


@pytest.mark.parametrize(
    "change",
    [
        {"memlock_bytes": 65536},
        {"total_bytes": 480 * GIB},
        {"total_bytes": 1024 * GIB},
        {"offset_s": 0.4},
        {"offset_s": 2.0, "doubt_s": 1.6},
        {"nofile": None},
        {"nofile": 4096},
        {"shm_free_bytes": None},
    ],
)
def test_what_is_within_bounds_or_not_known_is_not_told(change: dict[str, Any]) -> None:
    assert judged(3, {"n2": change}) == []


def test_the_same_fault_on_all_hosts_is_told_once() -> None:
    found = judged(64, shm_total_bytes=64 << 20)
    assert only(found)[2] == "all 64 hosts: /dev/shm of 64.0 MiB, small for data loaders"
