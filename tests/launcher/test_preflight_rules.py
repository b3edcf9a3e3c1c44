"""All hosts of a job are judged at once; what is alike is not told, and every fault has its hosts and a way out."""

from __future__ import annotations

from typing import Any

import pytest

from dsrun.errors import PreflightError
from dsrun.launcher.file_facts import PathFacts
from dsrun.launcher.preflight import Finding, Preflight, Wants
from dsrun.launcher.preflight_rules import judge
from dsrun.launcher.survey import Unable
from support.host_facts import GIB, cluster, gpus, script, specs

CPU = Wants(on_gpus=False)
GPU = Wants(on_gpus=True)


def judged(
    count: int,
    odd: dict[str, dict[str, Any]] | None = None,
    *,
    wants: Wants = CPU,
    slots: int = 1,
    fields: dict[str, Any] | None = None,
    **common: Any,
) -> list[Finding]:
    found = judge(specs(count, slots=slots, **(fields or {})), cluster(count, odd, **common), wants)
    assert all(finding.fix and finding.hosts for finding in found)
    return found


def only(found: list[Finding]) -> tuple[str, str, str, tuple[str, ...]]:
    (finding,) = found
    return finding.verdict, finding.name, finding.text, finding.hosts


def test_hosts_that_are_alike_have_nothing_to_tell() -> None:
    assert judged(16) == []
    assert judged(16, wants=GPU, slots=8, gpus=gpus(8)) == []
    assert judged(1) == []


def test_one_host_without_an_answer_does_not_hide_another_nor_what_else_is_wrong() -> None:
    seen = cluster(4, {"n3": {"torch": "2.11.0+cu130"}})
    refused = Unable("connection refused", "is sshd running?", unreached=True)
    seen = {**seen, "n2": refused, "n4": refused}
    found = judge(specs(4), seen, CPU)
    assert [(finding.name, finding.text, finding.fix) for finding in found] == [
        ("host", "n2 and n4: connection refused", "is sshd running?"),
        ("torch", "2.13.0+cu130 on n1, 2.11.0+cu130 on n3", "`pip install torch==2.13.0+cu130` on n3"),
    ]
    assert {finding.verdict for finding in found} == {"red"}


def test_hosts_of_which_none_answers_are_all_told() -> None:
    seen = {f"n{number}": Unable("no answer", unreached=True) for number in range(1, 7)}
    assert only(judge(specs(6), seen, CPU)) == ("red", "host", "all 6 hosts: no answer", tuple(seen))


@pytest.mark.parametrize(
    ("other", "verdict"), [("2.11.0", "red"), ("2.13.1", "amber"), ("2.13.0+cpu", "amber"), ("3.13.0", "red")]
)
def test_a_minor_version_of_torch_refuses_and_a_patch_warns(other: str, verdict: str) -> None:
    found = judged(16, {"n7": {"torch": other}}, torch="2.13.0")
    assert only(found) == (verdict, "torch", f"2.13.0 on 15 hosts, {other} on n7", ("n7",))


def test_of_two_the_first_is_taken_for_what_was_meant() -> None:
    assert only(judged(2, {"n1": {"torch": "2.11.0"}}))[2:] == ("2.11.0 on n1, 2.13.0+cu130 on n2", ("n2",))


def test_a_host_without_torch_is_refused_with_its_interpreter() -> None:
    (found,) = judged(3, {"n2": {"torch": None}}, torch="2.13.0")
    assert (found.verdict, found.text) == ("red", "not installed on n2 for /opt/py/bin/python there")
    assert found.fix.startswith("`pip install torch==2.13.0` there")
    assert judged(3, {"n2": {"torch": None}}, wants=Wants(is_python=False, on_gpus=False)) == []


def test_other_software_warns() -> None:
    odd = {"n3": {"dsrun": "0.2.0", "python": "3.10.1"}}
    assert [(finding.verdict, finding.text) for finding in judged(3, odd)] == [
        ("amber", "0.1.0 on n1 and n2, 0.2.0 on n3"),
        ("amber", "3.12 on n1 and n2, 3.10 on n3"),
    ]


def test_driver_nccl_and_models_are_compared_where_ranks_use_gpus() -> None:
    odd = {"n3": {"nccl": "2.27.0", "driver": "575.1", "gpus": gpus(8, model="A100")}}
    found = judged(3, odd, wants=GPU, slots=8, gpus=gpus(8))
    assert [(finding.verdict, finding.name, finding.text) for finding in found] == [
        ("amber", "NCCL", "2.28.3 on n1 and n2, 2.27.0 on n3"),
        ("amber", "driver", "580.65 on n1 and n2, 575.1 on n3"),
        ("amber", "GPUs", "8 x H100 on n1 and n2, 8 x A100 on n3"),
    ]
    same = {"n3": {**odd["n3"], "gpus": ()}}
    assert judged(3, same) == []


def test_torch_must_be_able_to_use_the_gpus() -> None:
    odd = {"n1": {"cuda": None}, "n2": {"driver": "550.1", "driver_cuda": "12.4"}}
    found = judged(4, odd, wants=GPU, gpus=gpus(1))
    assert [finding.text for finding in found if finding.verdict == "red"] == [
        "torch is built without CUDA on n1",
        "torch is built for CUDA 13.0, driver 550.1 runs up to 12.4 on n2",
    ]


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
    text = "n1: GPU 1 is held by pid 4242 of user bob, 19.0 GiB of 80.0 GiB free"
    assert only(judged(1, wants=GPU, slots=4, gpus=busy)) == ("amber", "GPUs", text, ("n1",))
    assert judged(1, wants=GPU, slots=1, gpus=busy) == []
    assert judged(1, wants=GPU, slots=2, fields={"gpus": (0, 3)}, gpus=busy) == []
    assert len(judged(1, wants=GPU, slots=1, fields={"gpus": (1,)}, gpus=busy)) == 1


def test_a_gpu_without_free_memory_is_refused() -> None:
    verdict, _, text, _ = only(judged(1, wants=GPU, gpus=gpus(1, free=0)))
    assert (verdict, text) == ("red", "n1: GPU 0 is full, 0 B of 80.0 GiB free")


def test_without_a_word_on_gpus_what_is_wrong_with_them_is_told_and_refuses_nothing() -> None:
    assert judged(2, wants=Wants(), slots=4) == []
    odd: dict[str, dict[str, Any]] = {"n1": {"cuda": None}, "n2": {"gpus": (), "place": "n1"}}
    found = judged(2, odd, wants=Wants(), gpus=gpus(1))
    assert [(finding.verdict, finding.text) for finding in found] == [
        ("amber", "torch is built without CUDA on n1"),
        ("amber", "n2: no GPU: no NVIDIA driver"),
        ("amber", "both hosts: one machine, and their ranks would share GPUs"),
    ]


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


def test_a_folder_or_script_that_is_missing_is_named_with_its_host() -> None:
    missing = script(digest=None, fault="/data/train.py: no such file or directory")
    odd: dict[str, dict[str, Any]] = {
        "n2": {"folder_fault": "/data: no such file or directory", "files": missing},
        "n3": {"files": missing},
    }
    found = judged(3, odd, files=script())
    assert [(finding.verdict, finding.name, finding.text) for finding in found] == [
        ("red", "folder", "n2: /data: no such file or directory"),
        ("red", "script", "n3: /data/train.py: no such file or directory"),
    ]


def test_another_content_of_the_script_or_config_is_refused() -> None:
    found = judged(5, {"n4": {"files": script(digest="9:bbbbbbbbbb")}}, files=script())
    text = "/data/train.py: content aaaaaaaa on n1, n2, n3 and n5, content bbbbbbbb on n4"
    assert only(found) == ("red", "script", text, ("n4",))
    config = {"config": script()["script"]}
    assert only(judged(2, {"n2": {"files": {"config": script(digest="1:c")["script"]}}}, files=config))[1] == "config"


def test_python_files_that_differ_or_are_missing_are_named() -> None:
    wants = Wants(folder="/data", script="/data/train.py", on_gpus=False)
    usual = {"train.py": "1", "net.py": "2", "data/load.py": "3", "a.py": "4", "b.py": "5"}
    odd = {
        "n3": {"code": {**usual, "net.py": "9", "train.py": "9"}},
        "n4": {"code": {"train.py": "1", "net.py": "2"}},
        "n5": {"code": None},
    }
    found = judged(5, odd, wants=wants, code=usual)
    assert [(finding.verdict, finding.text) for finding in found] == [
        ("amber", "a.py, b.py, data/load.py: not the same on n4 as on the other hosts"),
        ("amber", "net.py: not the same on n3 as on the other hosts"),
    ]


def a_path(there: str = "/nvme/0", *, free: int = 900 * GIB, fault: str | None = None) -> tuple[PathFacts, ...]:
    return (PathFacts(path="/nvme/0", there=there, free_bytes=free, fault=fault),)


@pytest.mark.parametrize(
    ("paths", "verdict", "text"),
    [
        (a_path(free=0), "red", "n2: no space left for /nvme/0"),
        (a_path(free=3 * GIB), "amber", "n2: 3.0 GiB free for /nvme/0"),
        (a_path("/"), "amber", "n2: /nvme/0 is not there, as it is on n1 and n3"),
        (
            a_path(fault="cannot be written to"),
            "red",
            "n2: /nvme/0: cannot be written to, and the job writes to /nvme/0",
        ),
    ],
)
def test_a_disk_that_is_full_missing_or_locked_is_told(paths: Any, verdict: str, text: str) -> None:
    assert only(judged(3, {"n2": {"paths": paths}}, paths=a_path())) == (verdict, "disk", text, ("n2",))


@pytest.mark.parametrize(
    ("change", "verdict", "name", "text"),
    [
        ({"shm_bytes": None}, "red", "/dev/shm", "n2: not there; ranks and data loaders exchange tensors by it"),
        ({"shm_bytes": 64 << 20}, "amber", "/dev/shm", "n2: 64.0 MiB, small for data loaders"),
        ({"shm_free_bytes": 0}, "amber", "/dev/shm", "n2: full"),
        (
            {"memlock_bytes": 65536, "has_infiniband": True},
            "amber",
            "memlock",
            "n2: 64.0 KiB may be locked: RDMA fails with so little",
        ),
        ({"nofile": 256}, "amber", "nofile", "n2: 256 open files, few for many ranks and data loaders"),
        ({"memory_bytes": 256 * GIB}, "amber", "memory", "256.0 GiB on n2, 512.0 GiB on the usual host"),
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
        {"memory_bytes": 480 * GIB},
        {"memory_bytes": 1024 * GIB},
        {"offset_s": 0.4},
        {"offset_s": 2.0, "doubt_s": 1.6},
        {"nofile": None},
        {"shm_free_bytes": None},
    ],
)
def test_what_is_within_bounds_or_not_known_is_not_told(change: dict[str, Any]) -> None:
    assert judged(3, {"n2": change}) == []


def test_the_same_fault_on_all_hosts_is_told_once() -> None:
    found = judged(64, shm_bytes=64 << 20)
    assert only(found)[2] == "all 64 hosts: 64.0 MiB, small for data loaders"


def test_a_refusal_carries_every_red_finding_and_the_warnings_stay_apart() -> None:
    odd = {"n2": {"torch": "2.11.0", "shm_bytes": None, "nofile": 256}}
    found = judged(2, odd, torch="2.13.0")
    preflight = Preflight(seen=cluster(2), findings=tuple(found), meeting=None, seconds=1.0)
    assert preflight.is_red
    error = preflight.error()
    assert isinstance(error, PreflightError)
    assert error.exit_code == 75
    assert error.render().splitlines() == [
        "error: torch: 2.13.0 on n1, 2.11.0 on n2",
        "hint: `pip install torch==2.13.0` on n2",
        "error: /dev/shm: n2: not there; ranks and data loaders exchange tensors by it",
        "hint: `mount -t tmpfs tmpfs /dev/shm`",
    ]
    assert preflight.warnings() == [
        "nofile: n2: 256 open files, few for many ranks and data loaders; "
        "`* - nofile 65536` in /etc/security/limits.conf there"
    ]
