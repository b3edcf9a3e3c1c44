"""What is staged, what is read from drives, and in which order a file is put together of both."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsrun.runtime.checkpoint.format.plan import plan_file
from dsrun.runtime.checkpoint.staging.sources import Segment, in_memory, in_order_of_updates, sources_of
from dsrun.runtime.protocols import FileStretch, StateEntry
from support.entries import entry_of


def entry(name: str, values: Tensor) -> StateEntry:
    return entry_of(name, values)


def test_state_in_memory_is_the_file_and_neighbours_of_one_unit_are_one_copy() -> None:
    flat = torch.arange(40.0)
    entries = [entry(f"p{n}", flat[10 * n : 10 * n + 10]) for n in range(4)]
    plan = plan_file(entries)
    sources = sources_of(plan, entries, [0, 0, 1, None], later=True, on_drive=in_memory)
    assert sources.segments == ()
    assert sources.image_bytes == plan.nbytes
    first = len(plan.header)
    assert [(c.at - first, c.values.tolist(), c.unit) for c in sources.copies] == [
        (0, flat[:20].tolist(), 0),
        (80, flat[20:30].tolist(), 1),
        (120, flat[30:].tolist(), None),
    ]
    assert sources.units == {0, 1}
    at_once = sources_of(plan, entries, [0, 0, 1, None], later=False, on_drive=in_memory)
    assert [copy.unit for copy in at_once.copies] == [None, None, None]
    assert at_once.units == set()
    assert [copy.unit for copy in sources_of(plan, entries, (), later=True, on_drive=in_memory).copies] == [None]


def test_what_lies_on_a_drive_is_not_staged_whenever_copies_are_made() -> None:
    tensors = [torch.arange(8.0), torch.arange(4.0), torch.arange(6.0)]
    entries = [entry(name, values) for name, values in zip("abc", tensors, strict=True)]
    plan = plan_file(entries)

    def on_drive(values: Tensor) -> Sequence[FileStretch] | None:
        if values.data_ptr() != tensors[1].data_ptr():
            return None
        return [FileStretch(7, 4096, 10), FileStretch(8, 0, 6)]

    header = len(plan.header)
    for later in (False, True):
        sources = sources_of(plan, entries, [0, 1, 2], later=later, on_drive=on_drive)
        assert sources.image_bytes == plan.nbytes - 16
        assert sources.segments == (
            Segment(0, header + 32),
            Segment(4096, 10, 7),
            Segment(0, 6, 8),
            Segment(header + 32, 24),
        )
        assert [copy.at for copy in sources.copies] == [header, header + 32]
        assert sources.last_byte == {1: header + 48}
        assert sources.units == ({0, 1, 2} if later else {1})


def test_what_is_waited_for_first_is_copied_first() -> None:
    assert in_order_of_updates([0, 1, None, 2, 0, 9], [2, 0, 1]) == [2, 3, 0, 4, 1, 5]
