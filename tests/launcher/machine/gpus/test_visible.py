from __future__ import annotations

import pytest

from dsrun.launcher.machine.gpus.visible import listed_devices, visible_devices


@pytest.mark.parametrize(
    ("value", "devices"),
    [
        (None, (0, 1, 2)),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("2,0", (2, 0)),
        (" 1 , 2 ", (1, 2)),
        ("0,9,1", (0,)),
        ("0,-1,1", (0,)),
        ("1,1", ()),
        ("GPU-b", (1,)),
        ("GPU-a", ()),
        ("GPU-aa1,GPU-aa0", (2, 0)),
        ("MIG-x,MIG-y", (None, None)),
        ("MIG-x,1", (None, 1)),
        ("MIG-x,MIG-x", ()),
        ("0,x", (0,)),
    ],
)
def test_visible_devices_follow_cudas_rules_and_a_job_may_have_several_slices(
    value: str | None, devices: tuple[int | None, ...]
) -> None:
    assert visible_devices(value, ["GPU-aa0", "GPU-bb0", "GPU-aa1"]) == devices


@pytest.mark.parametrize(
    ("value", "devices"),
    [
        ("MIG-00000000-0000-0000-0000-000000000001,0", ("MIG-00000000-0000-0000-0000-000000000001", 0)),
        # One that was made anew has another name; CUDA reads no further.
        ("0,MIG-00000000-0000-0000-0000-000000000009,1", (0,)),
        ("MIG-GPU-aa0/1/0", ("MIG-GPU-aa0/1/0",)),
    ],
)
def test_a_list_ends_at_a_slice_that_is_not_there(value: str, devices: tuple[int | str, ...]) -> None:
    known = ["MIG-00000000-0000-0000-0000-000000000001"]
    assert listed_devices(value, ["GPU-aa0", "GPU-bb0"], slices=known) == devices
    assert len(listed_devices(value, ["GPU-aa0", "GPU-bb0"])) == len(value.split(","))
