"""Parameters that a script may write to by itself while they are copied: seen by torch's own count of changes.

[Note: versions] torch counts in-place changes of each tensor (`Tensor._version`), where they go through that tensor.
What goes through `.data`, or through NumPy, is counted by nobody. A change whose operation has not returned yet when a
copy ends is counted after it; so the count is asked for once, behind all copies.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from torch import Tensor

from ..staging.sources import Copy


class StateChangedError(Exception):
    """A tensor was changed while it was being copied; the text names it."""


class Watch:
    """Notices changes of tensors that share memory with what is copied.

    Args:
        tensors: (name, tensor) of all that a script may write to.
        copies: copies that are still to be made.
    """

    def __init__(self, tensors: Iterable[tuple[str, Tensor]], copies: Sequence[Copy]) -> None:
        spans = sorted((copy.values.data_ptr(), copy.values.data_ptr() + copy.values.nbytes) for copy in copies)
        ends = [end for _, end in spans]
        self._seen: list[tuple[str, Tensor, int]] = []
        for name, tensor in tensors:
            start = tensor.data_ptr()
            place = bisect_left(ends, start + 1)  # the first that ends behind it
            if tensor.numel() and place < len(spans) and spans[place][0] < start + tensor.nbytes:
                self._seen.append((name, tensor, tensor._version))

    def check(self) -> None:
        """Raises where one has been changed since.

        Raises:
            StateChangedError: naming the tensors.
        """
        changed = [f"`{name}`" for name, tensor, version in self._seen if tensor._version != version]
        if changed:
            raise StateChangedError(
                f"{', '.join(changed[:3])}{' and others' if changed[3:] else ''} changed while being copied: the "
                "script writes to it between save_checkpoint and the next step; set `checkpoint.when_copied` to "
                "at_once, or write inside dsrun.zero.GatheredParameters(..., modifier_rank=...)"
            )
