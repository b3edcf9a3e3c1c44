"""GPUs that no job can use are told with their numbers, the driver's words and a way out; those alike share a line."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from dsrun.launcher.machine.gpus.left_out import LeftOut, LeftOutGpus, gpus_in_words, left_out_gpus


def lost(index: int, reason: str = "GPU is lost") -> LeftOut:
    return LeftOut(index=index, reason=reason, is_forbidden=False)


def closed(index: int) -> LeftOut:
    return LeftOut(index=index, reason="Insufficient Permissions", is_forbidden=True)


def test_gpus_of_one_reason_share_a_line_and_each_reason_has_one() -> None:
    found = [*left_out_gpus([lost(1), closed(2), lost(3), lost(4, "Unknown Error")], uncut=[5, 6], unlisted=0)]
    assert [(one.kind, one.gpus, one.text) for one in found] == [
        ("lost", (1, 3), "GPUs 1,3 left out: the driver counts them and cannot reach them (GPU is lost)"),
        ("closed", (2,), "GPU 2 left out: this process may not open it (Insufficient Permissions)"),
        ("lost", (4,), "GPU 4 left out: the driver counts it and cannot reach it (Unknown Error)"),
        ("uncut", (5, 6), "GPUs 5-6 left out: in MIG mode without slices, CUDA sees nothing of them"),
    ]
    assert all(one.fix for one in found)
    assert "`sudo nvidia-smi -i 5,6 -mig 0`" in found[-1].fix


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (1, "a GPU left out: the driver does not list it, for it could not start it"),
        (2, "2 GPUs left out: the driver does not list them, for it could not start them"),
    ],
)
def test_gpus_that_the_driver_does_not_list_have_no_number(count: int, text: str) -> None:
    (found,) = left_out_gpus([], uncut=[], unlisted=count)
    assert (found.kind, found.gpus, found.text) == ("unlisted", (), text)


def test_a_machine_that_gives_all_its_gpus_leaves_none_out() -> None:
    assert list(left_out_gpus([], uncut=[], unlisted=0)) == []


def test_what_is_said_travels_as_json() -> None:
    (found,) = left_out_gpus([lost(1)], uncut=[], unlisted=0)
    assert LeftOutGpus.from_json(json.loads(json.dumps(asdict(found)))) == found


@pytest.mark.parametrize(("indices", "words"), [([3], "GPU 3"), ([0, 1, 2, 4, 6, 7], "GPUs 0-2,4,6-7")])
def test_many_gpus_are_named_as_ranges(indices: list[int], words: str) -> None:
    assert gpus_in_words(indices) == words
