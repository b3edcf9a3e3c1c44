"""Every element is one rank's to write, what all hold is shared out, and neighbours in memory are one copy."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsrun.checkpoint_files.folder.publish import BOXES_KEY
from dsrun.runtime.checkpoint.format.plan import Planner, coalesce, plan_file
from dsrun.runtime.protocols import StateEntry


def whole(name: str, numel: int, *, dtype: torch.dtype = torch.float32, replicated: bool = True) -> StateEntry:
    return StateEntry(name, "param", (numel,), 0, numel, torch.arange(numel).to(dtype), replicated)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_what_all_ranks_hold_is_written_once_and_by_all(size: int) -> None:
    entries = [whole(f"p{number}", 100_000 + 7 * number) for number in range(40)]
    written: Counter[tuple[int, int]] = Counter()
    plans = [plan_file(entries, rank=rank, size=size) for rank in range(size)]
    for plan in plans:
        for piece in plan.pieces:
            written.update((piece.entry, element) for element in range(piece.start, piece.stop, 1000))
    sizes = [plan.nbytes for plan in plans]
    assert max(sizes) <= sum(sizes) / size + (1 << 20) + 20_000
    spans: dict[int, list[tuple[int, int]]] = {}
    for plan in plans:
        for piece in plan.pieces:
            spans.setdefault(piece.entry, []).append((piece.start, piece.stop))
    for number, entry in enumerate(entries):
        ordered = sorted(spans[number])
        assert [ordered[0][0], *(stop for _, stop in ordered)] == [*(start for start, _ in ordered), entry.stop]


def test_a_little_that_all_ranks_hold_is_the_first_ones() -> None:
    entries = [whole("a", 3), whole("b", 5, replicated=False)]
    assert [len(plan_file(entries, rank=rank, size=2).pieces) for rank in range(2)] == [2, 1]
    assert plan_file(entries[:1], rank=1, size=2).nbytes == 0


def test_tensors_without_elements_are_said_to_be_there() -> None:
    entry = StateEntry("none", "param", (0, 3), 0, 0, torch.empty(0), True)
    plan = plan_file([entry], rank=0, size=2)
    header = json.loads(plan.header[8:])
    assert json.loads(header["__metadata__"][BOXES_KEY])[0] == {
        "key": None, "name": "none", "role": "param", "shape": [0, 3], "dtype": "F32"}  # fmt: skip
    assert plan_file([entry], rank=1, size=2).nbytes == 0


def test_data_begins_at_a_page_and_elements_at_their_size() -> None:
    dtypes = (torch.bool, torch.float32, torch.bfloat16, torch.int64, torch.uint8)
    entries = [whole(str(dtype), 3, dtype=dtype) for dtype in dtypes]
    plan = plan_file(entries, rank=0, size=1)
    assert len(plan.header) % 4096 == 0
    for piece in plan.pieces:
        assert piece.first % entries[piece.entry].tensor.element_size() == 0


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(0, 7))
def test_neighbours_in_memory_are_one_copy(numels: list[int], gap_after: int) -> None:
    flat = torch.arange(sum(numels) + 5, dtype=torch.float32)
    entries: list[StateEntry] = []
    offset = 0
    for number, numel in enumerate(numels):
        entries.append(StateEntry(f"p{number}", "param", (numel,), 0, numel, flat[offset : offset + numel], False))
        offset += numel + (5 if number == gap_after else 0)
    plan = plan_file(entries, rank=0, size=1)
    copies = coalesce(plan, entries)
    assert len(copies) == (2 if gap_after < len(numels) - 1 else 1)
    assert [first for first, _ in copies] == sorted({copies[0][0], *(first for first, _ in copies)})
    assert torch.equal(torch.cat([values for _, values in copies]), torch.cat([entry.tensor for entry in entries]))


def test_a_plan_is_kept_until_something_else_is_saved() -> None:
    planner = Planner()
    first = planner.plan([whole("a", 3)], rank=0, size=1)
    assert planner.plan([whole("a", 3)], rank=0, size=1) is first
    assert planner.plan([whole("a", 4)], rank=0, size=1) is not first
    assert planner.plan([whole("a", 4, dtype=torch.int64)], rank=0, size=1).pieces != first.pieces
