"""Steps an optimizer takes range by range, where it computes in a wider dtype than gradients or masters are kept in.

Each range is copied into the window that all share, stepped there, and its masters are rounded back. Which dtypes those
are is decided in `precision`; a rounded sum is widened here and never scaled in its own dtype.

[Note: windows]
An elementwise optimizer's step over some of its leaves is the same as over all of them at once, and a leaf without a
gradient is left alone. So one window of the longest range is enough, and nothing of the model's size is ever held in
the wider dtype but what the optimizer itself keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from torch import optim

from .structure.runs import Run


def step_range_by_range(
    runs: Sequence[Run], optimizer: optim.Optimizer, *, factor: float, after: Callable[[Run], None] | None = None
) -> None:
    """Takes one step, see [Note: windows]; leaves keep no gradients.

    Args:
        runs: runs of ranges that have a window, with the runs of one range next to each other; their leaves are the
            optimizer's.
        optimizer: elementwise.
        factor: gradients are multiplied by it, in the optimizer's dtype.
        after: callback for each run after its step, while the run's leaf holds its values; None for none.
    """
    for run in runs:
        run.param.grad = None
    for _, group in groupby(runs, key=lambda run: id(run.owned)):
        members = list(group)
        owned = members[0].owned
        assert owned.window is not None, "the optimizer sees this range as it is"
        owned.seen_grad.copy_(owned.grad_sum)
        if factor != 1:
            owned.seen_grad.mul_(factor)
        if owned.window.master is not None:
            owned.seen_master.copy_(owned.master)
        for run in members:
            run.param.grad = run.grad
        try:
            optimizer.step()
        finally:
            for run in members:
                run.param.grad = None
        if after is not None:
            for run in members:
                after(run)
        if owned.window.master is not None:
            owned.master.copy_(owned.seen_master)
