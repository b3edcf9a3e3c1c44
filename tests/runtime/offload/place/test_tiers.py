"""What the device has room for stays there, and a step's time follows from bytes and speeds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsrun.runtime.offload.place.tiers import AllowedTiers, Budgets, Buses, ElementBytes, UnitSize, place

BF16 = ElementBytes(parameter=2, gradient=2, master=4, master_here=4, states=8, sum=4, adds_up=False)
FP32 = ElementBytes(parameter=4, gradient=4, master=4, master_here=0, states=8, sum=4, adds_up=False)
MIB = 1 << 20
UNITS = [UnitSize(f"blocks.{i}", MIB, True) for i in range(4)] + [UnitSize("rest", MIB, False)]
#: A PCIe link, a server's memory and one drive, as in the floors' example.
BUSES = Buses(out=52e9, back=52e9, host=150e9, disk_read=3.5e9, disk_write=8e9)
OPTIMIZER = AllowedTiers(("device",), ("device", "host"))


def test_what_has_no_limit_stays() -> None:
    placement = place(UNITS, BF16, Budgets(device=None), BUSES, allowed=AllowedTiers(("device",), ("host",)))
    assert [one.masters for one in placement.places] == ["host"] * 5
    assert placement.ratio == 1.0


@pytest.mark.parametrize(("room", "staying"), [(0, []), (16, ["rest"]), (40, ["blocks.0", "rest"]), (80, None)])
def test_room_for_sixteen_bytes_an_element_keeps_the_first_of_the_forward(room: int, staying: list[str] | None) -> None:
    placement = place(UNITS, BF16, Budgets(device=room * MIB), BUSES, allowed=OPTIMIZER)
    stay = [one.unit.name for one in placement.places if one.masters == "device"]
    assert stay == ([unit.name for unit in UNITS] if staying is None else staying)
    assert {one.gradients for one in placement.places if one.masters == "host"} <= {"host"}


def test_sums_that_are_there_anyway_and_masters_that_are_parameters_take_no_room() -> None:
    for each, element_bytes in ((replace(BF16, adds_up=True), 12), (FP32, 12), (replace(FP32, adds_up=True), 8)):
        placement = place(UNITS, each, Budgets(device=element_bytes * MIB), BUSES, allowed=OPTIMIZER)
        assert [one.unit.name for one in placement.places if one.masters == "device"] == ["rest"]
        assert placement.bytes_in("host") == 4 * MIB * (12 + (0 if each.adds_up else each.gradient))


def test_what_has_no_room_in_host_memory_goes_to_the_disk() -> None:
    allowed = AllowedTiers(("device",), ("device", "host", "disk"))
    placement = place(UNITS, BF16, Budgets(device=16 * MIB, host=25 * MIB), BUSES, allowed=allowed)
    assert [one.masters for one in placement.places] == ["host", "host", "disk", "disk", "device"]
    assert [one.gradients for one in placement.places] == ["host"] * 4 + ["device"]
    assert placement.bytes_in("disk") == 2 * MIB * 12


def test_the_kind_that_saves_more_for_a_byte_has_room_first() -> None:
    allowed = AllowedTiers(("device", "host"), ("device", "host"))
    budgets = Budgets(device=16 * MIB)
    by_default = place(UNITS, BF16, budgets, BUSES, allowed=allowed)
    # 38e-12 s for a byte of parameters; (32 / 150 + 4 / 52) / 16 = 18e-12 s for one of masters, states and sums.
    assert [one.parameters for one in by_default.places] == ["device"] * 5
    assert [one.masters for one in by_default.places] == ["host"] * 5
    slow_host = place(UNITS, BF16, budgets, replace(BUSES, host=30e9), allowed=allowed)
    assert [one.masters for one in slow_host.places] == ["host"] * 4 + ["device"]
    assert [one.parameters for one in slow_host.places] == ["host"] * 5


def test_seven_billion_parameters_take_the_time_of_the_table_of_floors() -> None:
    # reference: 7B, 32k tokens a step: 1.75 s of computing, 1.49 s of host memory; S2 is 0.66 of no offload.
    units = [UnitSize(f"blocks.{i}", 70_000_000, True) for i in range(100)]
    placement = place(units, BF16, Budgets(device=0), BUSES, allowed=OPTIMIZER, compute_s=1.75)
    step = placement.step
    assert step.host == pytest.approx(1.49, abs=0.01)
    assert step.out == step.back == pytest.approx(14e9 / 52e9)
    assert 1.75 / step.seconds == pytest.approx(0.66, abs=0.01)
    half = place(units, BF16, Budgets(device=56_000_000_000), BUSES, allowed=OPTIMIZER, compute_s=1.75).step
    assert half.host == pytest.approx(step.host / 2)
    assert half.exposed == pytest.approx(half.host - 1.75 / 3)


def test_parameters_that_stream_cross_twice_a_micro_batch() -> None:
    allowed = AllowedTiers(("host",), ("host",))
    step = place(UNITS, BF16, Budgets(device=0), BUSES, allowed=allowed, micro_batches=4).step
    assert step.stream == pytest.approx(5 * MIB * 2 * 2 * 4 / 52e9)
    assert step.back == 0


def test_a_drive_is_read_and_written_once_a_step() -> None:
    step = place(UNITS, BF16, Budgets(device=0), BUSES, allowed=AllowedTiers(("device",), ("disk",))).step
    assert step.disk == pytest.approx(5 * MIB * 12 * (1 / 3.5e9 + 1 / 8e9))


def test_neighbours_that_live_alike_share_a_line() -> None:
    placement = place(UNITS, BF16, Budgets(device=40 * MIB), BUSES, allowed=OPTIMIZER, compute_s=0.01)
    assert placement.lines() == [
        "units                     elements  parameters  gradients  masters, states  bytes of these  step on the host",
        "blocks.0                  1.05M     device      device     device           12.0 MiB",
        "blocks.1 .. blocks.3 (3)  3.15M     device      host       host             36.0 MiB        0.671 ms",
        "rest                      1.05M     device      device     device           12.0 MiB",
        "a step: 10 ms predicted (computing 10 ms, gradients out 0.121 ms, step on the host 0.671 ms, parameters back "
        "0.121 ms)",
    ]


def test_without_speeds_no_time_is_told() -> None:
    lines = place(UNITS, BF16, Budgets(device=0), Buses(), allowed=OPTIMIZER).lines()
    assert len(lines) == 2
    assert "step" not in lines[0]
