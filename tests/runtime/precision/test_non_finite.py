"""The first parameter whose gradient is not finite is found on whichever rank it lies, and all ranks say the same."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dsrun.runtime.layout.unit_layout import lay_out
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.precision.non_finite import first_non_finite

#: Two units; the second one's last parameter lies on two ranks.
UNITS = ("first", [("a", (100,)), ("empty", (0, 3)), ("b", (80,))]), ("second", [("c", (70,)), ("d", (600,))])


def find(bad: dict[str, tuple[int, float]], *, size: int, spread: bool) -> list[str | None]:
    """What each rank finds with these values at these elements of parameters."""

    def body(collectives: LoopbackCollectives) -> str | None:
        ranges: list[tuple[object, int, Tensor]] = []
        for name, params in UNITS:
            layout = lay_out(name, [(n, torch.Size(s)) for n, s in params], world_size=size if spread else 1)
            flat = torch.ones(layout.padded_numel)
            for extent in layout.extents:
                if extent.name in bad:
                    element, value = bad[extent.name]
                    flat[extent.offset + element] = value
            start, stop = layout.shard_range(collectives.rank) if spread else (0, layout.padded_numel)
            ranges.append((layout, start, flat[start:stop]))
        return first_non_finite(ranges, collectives, spread=spread, device=torch.device("cpu"))  # type: ignore[arg-type]

    return LoopbackWorld(size).run(body)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(("size", "spread"), [(1, True), (2, True), (3, True), (2, False)])
def test_the_first_one_in_the_units_order_is_named_by_every_rank(size: int, spread: bool, value: float) -> None:
    assert find({"a": (99, value)}, size=size, spread=spread) == ["a"] * size
    assert find({"d": (599, value), "b": (0, value)}, size=size, spread=spread) == ["b"] * size
    assert find({"d": (599, value)}, size=size, spread=spread) == ["d"] * size
    assert find({"d": (0, value), "c": (69, value)}, size=size, spread=spread) == ["c"] * size


@pytest.mark.parametrize(("size", "spread"), [(1, True), (3, True), (2, False)])
def test_none_is_named_where_all_are_finite_and_only_their_squares_are_not(size: int, spread: bool) -> None:
    assert find({"a": (0, 3e38)}, size=size, spread=spread) == [None] * size


@pytest.mark.parametrize(("bad", "expected"), [((1,), "late"), ((0, 1), "early"), ((), None)])
def test_a_parameter_of_the_first_stage_that_has_one_is_named_on_the_ranks_of_all_stages(
    bad: tuple[int, ...], expected: str | None
) -> None:
    def body(collectives: LoopbackCollectives) -> str | None:
        stage = collectives.rank // 2
        layout = lay_out("unit", [(["early", "late"][stage], torch.Size((300,)))], world_size=2)
        flat = torch.full((layout.padded_numel,), math.inf if stage in bad else 1.0)
        start, stop = layout.shard_range(collectives.rank % 2)
        ranges = [(layout, start, flat[start:stop])]
        return first_non_finite(ranges, collectives, spread=True, device=torch.device("cpu"), stage=(stage, 2))

    assert LoopbackWorld(4).run(body) == [expected] * 4
