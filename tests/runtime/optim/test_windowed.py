"""Through a window an optimizer does to each range what it does to fp32 copies of all of them at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn, optim

from dsrun.errors import ModelError
from dsrun.runtime.layout.unit_layout import lay_out
from dsrun.runtime.optim.algorithms.lamb import Lamb
from dsrun.runtime.optim.registry import check_range_by_range
from dsrun.runtime.optim.structure.runs import Run, cut_runs
from dsrun.runtime.optim.windowed import step_range_by_range
from dsrun.runtime.protocols import OwnedRange, Window

SHAPES = ([("a", (16, 64)), ("b", (128,))], [("c", (64, 32))])


def ranges(masters: torch.dtype) -> list[OwnedRange]:
    generator = torch.Generator().manual_seed(3)
    layouts = [lay_out(f"unit{n}", shapes, world_size=1) for n, shapes in enumerate(SHAPES)]
    most = max(layout.padded_numel for layout in layouts)
    window = Window(torch.full((most,), 7.0), None if masters == torch.float32 else torch.full((most,), 7.0))
    made: list[OwnedRange] = []
    for layout in layouts:
        values = [torch.zeros(layout.padded_numel) for _ in range(2)]
        for value in values:
            value[: layout.numel].normal_(generator=generator)
        groups = (0,) * len(layout.extents)
        made.append(OwnedRange(layout, 0, values[0].to(masters), values[1].bfloat16(), groups, window))
    return made


@pytest.mark.parametrize("masters", [torch.float32, torch.bfloat16, torch.float16])
def test_a_step_is_that_of_fp32_copies_rounded_once(masters: torch.dtype) -> None:
    owned = ranges(masters)
    runs = [run for one in owned for run in cut_runs(one)]
    optimizer = optim.AdamW([run.param for run in runs], lr=1e-2, fused=True)
    copies = [nn.Parameter(one.master.float().clone()) for one in owned]
    plain = optim.AdamW(copies, lr=1e-2, fused=True)
    seen: list[Tensor] = []
    for factor in (1.0, 0.3):
        for one, copy in zip(owned, copies, strict=True):
            copy.data.copy_(one.master)
            copy.grad = one.grad_sum.float() * factor
        plain.step()
        step_range_by_range(runs, optimizer, factor=factor, after=lambda run: seen.append(run.param.detach().clone()))
        for one, copy in zip(owned, copies, strict=True):
            assert torch.equal(one.master, copy.detach().to(masters))
    assert [value.numel() for value in seen] == [run.numel for run in runs] * 2
    assert {value.dtype for value in seen} == {torch.float32}


def test_leaves_keep_no_gradient_and_sums_stay_as_they_are_also_when_a_step_raises() -> None:
    owned = ranges(torch.bfloat16)
    before = [one.grad_sum.clone() for one in owned]
    runs = [run for one in owned for run in cut_runs(one)]

    class Raises(optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            raise ValueError("no step")

    with pytest.raises(ValueError, match="no step"):
        step_range_by_range(runs, Raises([run.param for run in runs], lr=1.0), factor=0.5)
    step_range_by_range(runs, optim.SGD([run.param for run in runs], lr=1.0), factor=0.5)
    assert [run.param.grad for run in runs] == [None] * len(runs)
    assert all(torch.equal(one.grad_sum, sums) for one, sums in zip(owned, before, strict=True))


def test_what_is_not_known_to_step_leaf_by_leaf_is_refused() -> None:
    leaf = nn.Parameter(torch.zeros(4))
    check_range_by_range(optim.SGD([leaf], lr=0.1))
    with pytest.raises(ModelError, match="Lamb is not known to step leaf by leaf"):
        check_range_by_range(Lamb([leaf]))


def test_a_run_sees_the_range_itself_where_there_is_no_window() -> None:
    (first, _) = ranges(torch.float32)
    plain = OwnedRange(first.layout, 0, first.master, first.master.clone(), first.groups)
    (run,) = cut_runs(plain)
    assert isinstance(run, Run)
    assert run.param.data_ptr() == plain.master.data_ptr()
    assert run.grad.data_ptr() == plain.grad_sum.data_ptr()
