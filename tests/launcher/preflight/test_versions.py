"""What most hosts have is what was meant: another minor version of torch refuses a job, other software warns."""

from __future__ import annotations

from typing import Any

import pytest

from dsrun.launcher.preflight.findings import Requirements
from support.host_facts import GPU, gpus, judged, only


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
    assert (found.verdict, found.text) == ("red", "n2: torch is not installed beside Python at /opt/py/bin/python")
    assert found.fix.startswith("`/opt/py/bin/python -m pip install torch==2.13.0` there, or name another interpreter")
    assert judged(3, {"n2": {"torch": None}}, wants=Requirements(is_python=False, on_gpus=False)) == []


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
        "n1: torch 2.13.0+cu130 is built without CUDA",
        "n2: torch is built for CUDA 13.0, driver 550.1 runs up to 12.4",
    ]


def test_a_newer_libcuda_refuses_no_host_of_data_centre_gpus() -> None:
    """NGC's images on an older driver, and the same image on a host with GeForce."""
    old = {"driver": "535.216.03", "driver_cuda": "13.0", "libcuda": "580.65.06"}
    assert judged(2, {"n2": {"driver_cuda": "12.2"}}, wants=GPU, gpus=gpus(1), **old) == []
    found = judged(2, {"n2": {"gpus": gpus(1, model="NVIDIA GeForce RTX 4090")}}, wants=GPU, gpus=gpus(1), **old)
    assert [finding.text for finding in found if finding.verdict == "red"] == [
        "n2: libcuda 580.65.06 is newer than driver 535.216.03: CUDA does not start on NVIDIA GeForce RTX 4090 "
        "(error 804)"
    ]


def test_an_old_gpu_that_the_hostfile_leaves_out_refuses_no_job() -> None:
    """A second card for the screen, which CUDA 13 has no kernels for."""
    cards: dict[str, Any] = {
        "gpus": gpus(2, capability=("8.9", "6.1")),
        "cuda": "13.0",
        "driver": "580.65",
        "driver_cuda": "13.0",
    }
    assert judged(2, wants=GPU, fields={"gpus": (0,)}, **cards) == []
    (found,) = judged(2, wants=GPU, fields={"gpus": (1,)}, **cards)
    assert (found.verdict, found.name) == ("red", "CUDA")
