"""Every element is one rank's to write, what all hold is shared out, and neighbours in memory are one copy."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsrun.checkpoint_files.folder.publish import BOXES_KEY
from dsrun.runtime.checkpoint.format.plan import Planner, coalesce, plan_file
from dsrun.runtime.protocols import SOLE_HOLDER, Holders, StateEntry
from support.entries import all_of, column, entry_of


def whole(name: str, numel: int, *, dtype: torch.dtype = torch.float32, holders: Holders = SOLE_HOLDER) -> StateEntry:
    return entry_of(name, torch.arange(numel).to(dtype), holders=holders)


def held_by_all(numels: Sequence[int], *, rank: int, size: int) -> list[StateEntry]:
    return [whole(f"p{number}", numel, holders=all_of(size, rank)) for number, numel in enumerate(numels)]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_what_all_ranks_hold_is_written_once_and_by_all(size: int) -> None:
    numels = [100_000 + 7 * number for number in range(40)]
    written: Counter[tuple[int, int]] = Counter()
    plans = [plan_file(held_by_all(numels, rank=rank, size=size)) for rank in range(size)]
    for plan in plans:
        for piece in plan.pieces:
            written.update((piece.entry, element) for element in range(piece.start, piece.stop, 1000))
    sizes = [plan.nbytes for plan in plans]
    assert max(sizes) <= sum(sizes) / size + (1 << 20) + 20_000
    spans: dict[int, list[tuple[int, int]]] = {}
    for plan in plans:
        for piece in plan.pieces:
            spans.setdefault(piece.entry, []).append((piece.start, piece.stop))
    for number, numel in enumerate(numels):
        ordered = sorted(spans[number])
        assert [ordered[0][0], *(stop for _, stop in ordered)] == [*(start for start, _ in ordered), numel]


def test_a_little_that_all_ranks_hold_is_the_first_ones() -> None:
    entries = [[whole("a", 3, holders=all_of(2, rank)), whole("b", 5)] for rank in range(2)]
    assert [len(plan_file(of_rank).pieces) for of_rank in entries] == [2, 1]
    assert plan_file(entries[1][:1]).nbytes == 0


def test_tensors_without_elements_are_said_to_be_there() -> None:
    first, second = (entry_of("none", torch.empty(0, 3), holders=all_of(2, rank)) for rank in range(2))
    plan = plan_file([first])
    header = json.loads(plan.header[8:])
    assert json.loads(header["__metadata__"][BOXES_KEY])[0] == {
        "key": None, "name": "none", "role": "param", "shape": [0, 3], "dtype": "F32"}  # fmt: skip
    assert plan_file([second]).nbytes == 0


def test_data_begins_at_a_page_and_elements_at_their_size() -> None:
    dtypes = (torch.bool, torch.float32, torch.bfloat16, torch.int64, torch.uint8)
    entries = [whole(str(dtype), 3, dtype=dtype) for dtype in dtypes]
    plan = plan_file(entries)
    assert len(plan.header) % 4096 == 0
    for piece in plan.pieces:
        assert piece.first % entries[piece.entry].tensor.element_size() == 0


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(0, 7))
def test_neighbours_in_memory_are_one_copy(numels: list[int], gap_after: int) -> None:
    flat = torch.arange(sum(numels) + 5, dtype=torch.float32)
    entries: list[StateEntry] = []
    offset = 0
    for number, numel in enumerate(numels):
        entries.append(entry_of(f"p{number}", flat[offset : offset + numel]))
        offset += numel + (5 if number == gap_after else 0)
    plan = plan_file(entries)
    copies = coalesce(plan, entries)
    assert len(copies) == (2 if gap_after < len(numels) - 1 else 1)
    assert [first for first, _ in copies] == sorted({copies[0][0], *(first for first, _ in copies)})
    assert torch.equal(torch.cat([values for _, values in copies]), torch.cat([entry.tensor for entry in entries]))


def test_a_plan_is_kept_until_something_else_is_saved() -> None:
    planner = Planner()
    first = planner.plan([whole("a", 3)])
    assert planner.plan([whole("a", 3)]) is first
    assert planner.plan([whole("a", 4)]) is not first
    assert planner.plan([whole("a", 4, dtype=torch.int64)]).pieces != first.pieces


def test_a_plan_is_made_anew_where_the_cut_or_the_holders_are_others() -> None:
    planner, values = Planner(), torch.arange(12.0)
    first = planner.plan([entry_of("w", values, whole=column((6, 4), 0, 2), holders=all_of(2))])
    assert planner.plan([entry_of("w", values, whole=column((6, 4), 0, 2), holders=all_of(2))]) is first
    assert planner.plan([entry_of("w", values, whole=column((6, 4), 1, 2), holders=all_of(2))]).header != first.header
    planner.plan([entry_of("w", values, whole=column((6, 4), 0, 2), holders=all_of(2))])
    other = planner.plan([entry_of("w", values, whole=column((6, 4), 0, 2), holders=all_of(2, rank=1))])
    assert other.nbytes == 0
