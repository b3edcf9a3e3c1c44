"""One range to step on the host, and who can: the types in which the step and its driver meet.

No arithmetic, and nothing of where ranges come from or when they are stepped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ...optim.states.format import FP32_STATES, StateFormat
from .split_master import SplitMaster


@dataclass(frozen=True, slots=True)
class RangeWork:
    """One step of one range: consecutive elements of one optimizer group, all in host memory, all flat and contiguous.

    `states` and `scalars` together are what the optimizer keeps for the range in its `state`, by torch's names.

    Attributes:
        master_N: fp32, [N], or its halves; updated in place. One of 16 bits is fp32 while the step is taken, and then
            rounded.
        grads_N: fp32, bf16 or fp16, [N], summed over ranks and micro batches; left as they are.
        states: one value an element, [N] each, or its codes and scales; updated in place. Those that the first step
            makes are added, in `form`. What is in fewer bits is fp32 while the step is taken.
        scalars: all other state (the count of steps); entries are replaced or updated in place.
        options: options of the group as they stand when the step begins (lr, betas, ...); the same for all ranges of a
            step.
        grad_scale: gradients are multiplied by it first, in fp32: the clip coefficient over the loss scale.
        params_out_N: compute dtype, [N]: the new masters, rounded; None: nobody wants them. May be `grads_N`, of which
            each element is read before it is written.
        place: (name, dtype) to a buffer as large as the range asks for, for a tensor of a state that the first step
            makes; None: torch's own memory.
        form: format of the states that the first step makes.
        head: elements of the first block of codes that lie before the range; 0 where no state is coded.
        origins: (to, from) pairs of flat tensors, [N] each: a block of the first gets the block of the second before it
            is stepped, and the second stays as it is. Masters and states of a step that may not count.
        changed: options that the optimizer's own code has set anew; the driver writes them to the group when all
            ranges of the step are done.
    """

    master_N: Tensor | SplitMaster
    grads_N: Tensor
    states: MutableMapping[str, Tensor]
    scalars: MutableMapping[str, Any]
    options: Mapping[str, Any]
    grad_scale: float = 1.0
    params_out_N: Tensor | None = None
    place: Callable[[str, torch.dtype], Tensor] | None = None
    origins: Sequence[tuple[Tensor, Tensor]] = ()
    form: StateFormat = FP32_STATES
    head: int = 0
    changed: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def numel(self) -> int:
        """Elements of the range."""
        return self.grads_N.numel()

    def add_state(self, name: str, dtype: torch.dtype, *, numel: int | None = None) -> Tensor:
        """Returns a new tensor of zeros, which is in `states` from here on; as long as the range, or `numel`."""
        numel = self.numel if numel is None else numel
        state = torch.empty(numel, dtype=dtype) if self.place is None else self.place(name, dtype)
        assert state.shape == (numel,), f"state {name}: a place of {tuple(state.shape)} for {numel} elements"
        self.states[name] = state.zero_()
        return state

    def settle(self) -> None:
        """Ends the step: halves of masters are whole."""
        if isinstance(self.master_N, SplitMaster):
            self.master_N.settle()


class BlockStep(Protocol):
    """Steps ranges on the host, each in one pass over memory. One range at a time: it has one set of scratch."""

    def step(self, work: RangeWork) -> None:
        """Updates one range. Enters no collective."""
        ...
