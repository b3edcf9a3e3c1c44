"""FLOPs that really run, in forward and backward: what counts of a forward are held to."""

from __future__ import annotations

from typing import Any

from dsrun.runtime.compat import OperationObserver, named_arguments
from dsrun.runtime.observe.flops.attention import visible_pairs
from dsrun.runtime.observe.flops.products import work_of


class RanFlops(OperationObserver):
    """Adds up what runs inside, with backwards of causal attention, in this thread.

    Attributes:
        flops: FLOPs so far.
    """

    def __init__(self) -> None:
        super().__init__(self._add)
        self.flops = 0

    def _add(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = func.name().partition(".")[0]
        if name == "aten::_scaled_dot_product_flash_attention_for_cpu_backward":
            q, k = args[1], args[2]
            assert q.shape[-2] == k.shape[-2], "of a causal mask"
            pairs = visible_pairs(q.shape[-2], k.shape[-2], right=0)
            self.flops += 5 * 2 * q.shape[0] * q.shape[1] * pairs * q.shape[-1]
            return
        work = work_of(name, named_arguments(func, args, kwargs), out)
        self.flops += 0 if work is None else work.forward
