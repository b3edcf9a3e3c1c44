"""How a dim is dealt to ranks, and which boxes of a weight that makes."""

from __future__ import annotations

from itertools import accumulate, pairwise
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsrun.runtime.parallel.tensor.styles import EVEN, Deal, Form, boxes, cut_dim


@pytest.mark.parametrize(
    ("deal", "numel", "size", "expected"),
    [
        pytest.param(EVEN, 12, 3, [[(0, 4)], [(4, 8)], [(8, 12)]], id="even"),
        pytest.param(EVEN, 10, 4, [[(0, 3)], [(3, 6)], [(6, 8)], [(8, 10)]], id="uneven: first ranks have more"),
        pytest.param(EVEN, 5, 1, [[(0, 5)]], id="one rank"),
        pytest.param(EVEN, 2, 3, [[(0, 1)], [(1, 2)], []], id="more ranks than elements"),
        pytest.param(EVEN, 0, 2, [[], []], id="nothing"),
        pytest.param(Deal(groups=6), 12, 4, [[(0, 4)], [(4, 8)], [(8, 10)], [(10, 12)]], id="six heads over four"),
        pytest.param(Deal(groups=2), 12, 3, [[(0, 6)], [(6, 12)], []], id="fewer groups than ranks"),
        pytest.param(Deal(2), 12, 2, [[(0, 3), (6, 9)], [(3, 6), (9, 12)]], id="gate and up"),
        pytest.param(Deal(2), 10, 2, [[(0, 3), (5, 8)], [(3, 5), (8, 10)]], id="gate and up, uneven"),
        pytest.param(
            Deal((8, 4, 4), groups=4),
            16,
            2,
            [[(0, 4), (8, 10), (12, 14)], [(4, 8), (10, 12), (14, 16)]],
            id="queries, keys and values",
        ),
        pytest.param(
            Deal((12, 6, 6), groups=3),
            24,
            2,
            [[(0, 8), (12, 16), (18, 22)], [(8, 12), (16, 18), (22, 24)]],
            id="three heads of keys over two, with their queries",
        ),
        pytest.param(Deal((4, 0, 2)), 6, 2, [[(0, 2), (4, 5)], [(2, 4), (5, 6)]], id="an empty part"),
        pytest.param(Deal((4, 1)), 5, 2, [[(0, 2), (4, 5)], [(2, 4)]], id="a part that one rank alone has of"),
    ],
)
def test_lengths_are_dealt(deal: Deal, numel: int, size: int, expected: list[list[tuple[int, int]]]) -> None:
    assert [deal.runs(numel, rank=rank, size=size) for rank in range(size)] == expected


@pytest.mark.parametrize(
    ("deal", "numel", "message"),
    [
        (Deal(2), 5, r"parts \[2, 2\] of 5"),
        (Deal((2, 2)), 5, r"parts \[2, 2\] of 5"),
        (Deal(groups=4), 6, "a part of 6 is no 4 groups"),
        (Deal((4, 6), groups=4), 10, "a part of 6 is no 4 groups"),
    ],
)
def test_lengths_that_cannot_be_dealt_are_a_fault_of_the_caller(deal: Deal, numel: int, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        deal.runs(numel, rank=0, size=2)


@st.composite
def dealt(draw: st.DrawFn) -> tuple[Deal, int]:
    """Returns a deal, and a length that it fits."""
    groups = draw(st.one_of(st.none(), st.integers(1, 6)))
    unit = 1 if groups is None else groups
    if draw(st.booleans()):
        parts = draw(st.integers(1, 3))
        return Deal(parts, groups), parts * unit * draw(st.integers(0, 4))
    lengths = tuple(unit * length for length in draw(st.lists(st.integers(0, 4), min_size=1, max_size=3)))
    return Deal(lengths, groups), sum(lengths)


@given(dealt(), st.integers(1, 6))
def test_every_element_is_dealt_to_one_rank_and_no_group_is_cut(case: tuple[Deal, int], size: int) -> None:
    deal, numel = case
    ranks = [deal.runs(numel, rank=rank, size=size) for rank in range(size)]
    assert sorted(i for runs in ranks for start, stop in runs for i in range(start, stop)) == list(range(numel))
    lengths = [numel // deal.parts] * deal.parts if isinstance(deal.parts, int) else list(deal.parts)
    for start, stop in pairwise(accumulate(lengths, initial=0)):
        group = (stop - start) // deal.groups if deal.groups else 1
        inside = [[run for run in runs if start <= run[0] and run[1] <= stop] for runs in ranks]
        assert all(len(found) <= 1 for found in inside), "one run in each part"
        assert all((end - start) % max(group, 1) == 0 for found in inside for run in found for end in run)
        numels = [sum(high - low for low, high in found) for found in inside]
        assert numels == sorted(numels, reverse=True)
        assert max(numels) - min(numels) <= group
    assert all(runs == sorted(runs) and all(low < high for low, high in runs) for runs in ranks)


@pytest.mark.parametrize(
    ("form", "dims", "is_embedding", "dim"),
    [
        (Form.COLUMN, 1, False, 0),  # bias
        (Form.COLUMN, 2, False, 0),
        (Form.COLUMN, 3, False, 1),  # experts: [E, outputs, inputs]
        (Form.COLUMN, 2, True, 1),
        (Form.ROW, 1, False, None),  # a bias that is added behind the sum
        (Form.ROW, 2, False, 1),
        (Form.ROW, 3, False, 2),
        (Form.ROW, 2, True, 0),
        (Form.VOCABULARY, 2, True, 0),
        (Form.HIDDEN, 2, True, 1),
        *((form, 2, False, None) for form in Form if form not in {Form.COLUMN, Form.ROW, Form.VOCABULARY, Form.HIDDEN}),
    ],
)
def test_the_dim_that_is_cut(form: Form, dims: int, is_embedding: bool, dim: int | None) -> None:
    assert cut_dim(form, dims, is_embedding=is_embedding) == dim


@given(dealt(), st.integers(0, 2), st.lists(st.integers(0, 3), min_size=2, max_size=2), st.integers(1, 4))
def test_boxes_are_the_elements_of_the_part_in_its_order(
    case: tuple[Deal, int], dim: int, others: list[int], size: int
) -> None:
    deal, numel = case
    shape = [*others[:dim], numel, *others[dim:]]
    whole = torch.arange(prod(shape), dtype=torch.float64).view(shape)
    rebuilt = torch.full_like(whole, -1)
    for rank in range(size):
        runs = deal.runs(numel, rank=rank, size=size)
        part = torch.cat([whole.narrow(dim, 0, 0), *(whole.narrow(dim, low, high - low) for low, high in runs)], dim)
        found = boxes(shape, dim, runs)
        assert found.shape == tuple(shape)
        assert found.numel == part.numel()
        flat = torch.cat([whole.new_empty(0), *(whole[box.slices].reshape(-1) for box in found.boxes)])
        assert torch.equal(flat, part.reshape(-1))
        position = 0
        for box in found.boxes:
            assert (rebuilt[box.slices] == -1).all(), "two ranks have one element"
            rebuilt[box.slices] = part.reshape(-1)[position : position + box.numel].view(box.shape)
            position += box.numel
    assert torch.equal(rebuilt, whole)


@pytest.mark.parametrize(
    ("shape", "dim", "runs", "number"),
    [
        ((8, 5), 0, [(0, 2), (4, 6)], 2),
        ((7, 8), 1, [(2, 4)], 1),  # one run: one box, however many rows
        ((7, 8), 1, [(0, 2), (4, 6)], 14),
        ((1, 8, 3), 1, [(0, 2), (4, 6)], 2),
        ((3, 8, 3), 1, [(0, 2), (4, 6)], 6),  # gate and up of three experts
        ((8, 5), 0, [], 0),
    ],
)
def test_there_are_no_more_boxes_than_the_order_asks_for(
    shape: tuple[int, ...], dim: int, runs: list[tuple[int, int]], number: int
) -> None:
    assert len(boxes(shape, dim, runs).boxes) == number
