"""What a forward multiplies, and what its backward will: counted once, while the forward runs as it does anyway.

[Note: derived backward] Backward is not watched. An operand that needs a gradient is one more product of the size of
the forward's. So frozen weights, and a first layer whose input needs no gradient, come out by themselves. Attention
has two products forward and four backward; a fused kernel, which keeps no scores, makes five: the fifth is in the
hardware's FLOPs and not in the model's.

[Note: custom functions] In the forward of a custom autograd function no tensor needs a gradient. There, whatever is
made of the function's inputs that need one counts as needing one, so its backward is taken to be that of the same
operations outside of a function. A function that makes gradients in its forward, by a backward in
there, has made those products then: what is made of these gradients is not counted again.

[Note: computed again] The hardware's FLOPs have an operation once more for each second run that it is part of: of
blocks that this runtime runs again (`second_runs`), and of torch.utils.checkpoint. A second run ends with the last
tensor that was saved, so the last product of a block is not made twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ...compat import EnclosingCalls, OperationObserver, enclosing_calls, in_backward, named_arguments
from ...second_runs import SecondRun, second_runs
from .products import Work, is_uncounted, work_of

#: Functions of libraries that write gradients over the result of their product, without a backward that shows it:
#: what is multiplied with that result is backward's.
_MAKES_GRADIENTS = frozenset(("LigerFusedLinearCrossEntropyFunction",))


@dataclass(frozen=True, slots=True)
class Flops:
    """FLOPs of one kind of operation.

    Attributes:
        forward: FLOPs of the forward.
        model: FLOPs of forward and backward, each operation once.
        hardware: FLOPs with all that is computed again.
    """

    forward: float = 0
    model: float = 0
    hardware: float = 0

    def scaled(self, factor: float) -> Flops:
        """Returns these times a factor."""
        return Flops(self.forward * factor, self.model * factor, self.hardware * factor)

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.forward + other.forward, self.model + other.model, self.hardware + other.hardware)


@dataclass(frozen=True, slots=True)
class FlopCount:
    """What one forward and its backward multiply.

    Attributes:
        products: FLOPs of all but attention, which grow with the tokens.
        attention: FLOPs of fused attention, which grow with tokens and length.
        not_counted: Names of operations that may multiply much and are in no table.
        is_estimated: Whether the numbers come from shapes of layers and not from operations.
    """

    products: Flops = field(default_factory=Flops)
    attention: Flops = field(default_factory=Flops)
    not_counted: tuple[str, ...] = ()
    is_estimated: bool = False

    @property
    def total(self) -> Flops:
        """FLOPs of all operations."""
        return self.products + self.attention


class FlopCounter(OperationObserver):
    """Counts what runs inside of it, in this thread; see [Note: derived backward].

    Attributes:
        forward: FLOPs that have run so far.
        repeats: Ranks that make the operations which run now, the same on each: the model's FLOPs have them once.

    Args:
        is_causal_half: Whether of a causal mask only the pairs that it leaves count; else attention counts whole.
    """

    def __init__(self, *, is_causal_half: bool = True) -> None:
        super().__init__(self._note)
        self.forward = 0
        self.repeats = 1
        self._is_causal_half = is_causal_half
        self._counted: list[_Counted] = []
        self._not_counted: dict[str, None] = {}
        self._need: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._gradients: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def count(self) -> FlopCount:
        """Returns what was counted; for second runs, once the calls that they repeat have ended."""
        sums = {False: Flops(), True: Flops()}
        for each in self._counted:
            again = sum(run.times(saved) for run, saved in each.again) * each.forward
            hardware = each.here + each.again_in_backward + again
            sums[each.is_attention] += Flops(each.forward, each.model, hardware)
        return FlopCount(sums[False], sums[True], tuple(self._not_counted))

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Counts an operation that has run; whatever is wrong with counting is no matter of the model's."""
        name = "an operation"
        try:
            name = str(func.name()).partition(".")[0]
            self._count(name, func, args, kwargs, out)
        except Exception as error:  # anything but the training step itself may fail
            self._not_counted[f"{name} ({type(error).__name__})"] = None

    def _count(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        calls = enclosing_calls(func)
        in_function = calls.function is not None
        if in_backward() and not torch.is_grad_enabled():
            self._mark(self._gradients, out)
            return
        operands = list(_tensors((args, kwargs)))
        if in_function and any(tensor in self._gradients for tensor in operands):
            self._mark(self._gradients, out)
            return
        follows = in_function and any(self._needs(tensor) for tensor in _tensors(calls.function_inputs))
        if follows and any(self._needs(tensor) for tensor in operands):
            self._mark(self._need, out)
        work = work_of(name, self._whole_pairs(named_arguments(func, args, kwargs)), out)
        if work is not None:
            may_need = follows or torch.is_grad_enabled()
            self._add(work, calls, self._needs if may_need else _never)
            if calls.function in _MAKES_GRADIENTS:
                self._mark(self._gradients, out)
        elif is_uncounted(name):
            self._not_counted[name] = None

    def _whole_pairs(self, given: dict[str, Any]) -> dict[str, Any]:
        if self._is_causal_half:
            return given
        return {name: value for name, value in given.items() if name not in ("is_causal", "causal", "custom_mask_type")}

    def _add(self, work: Work, calls: EnclosingCalls, needs: Callable[[Tensor], bool]) -> None:
        backward = sum(flops for tensors, flops in work.gradients if any(needs(tensor) for tensor in tensors))
        runs = [(run, run.saved) for run in second_runs()]
        runs += [_of_torch(saved) for saved in calls.checkpoints]
        self.forward += work.forward
        self._counted.append(
            _Counted(
                work.forward,
                (work.forward + backward) / self.repeats,
                here=work.forward + backward,
                again_in_backward=work.again if backward else 0,
                again=() if calls.is_kept else tuple(runs),
                is_attention=work.is_attention,
            )
        )

    def _needs(self, tensor: Tensor) -> bool:
        return tensor.requires_grad or tensor in self._need

    @staticmethod
    def _mark(marks: WeakTensorKeyDictionary, out: Any) -> None:
        for tensor in _tensors(out):
            marks[tensor] = True


@dataclass(frozen=True, slots=True)
class _Counted:
    """An operation that was counted; `again` has its second runs, and the tensors saved in each before it."""

    forward: int
    model: float
    here: int
    again_in_backward: int
    again: tuple[tuple[SecondRun | _TorchRun, int], ...]
    is_attention: bool


class _TorchRun:
    """The second run of a torch.utils.checkpoint."""

    __slots__ = ("_saved",)

    def __init__(self, saved: Callable[[], int] | None) -> None:
        self._saved = saved

    def times(self, saved: int) -> int:
        """Returns how often an operation runs again, before which so many tensors were saved."""
        return int(self._saved is None or saved < self._saved())


def _of_torch(saved: Callable[[], int] | None) -> tuple[_TorchRun, int]:
    return _TorchRun(saved), 0 if saved is None else saved()


def _never(_tensor: Tensor) -> bool:
    return False


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:  # pyright: ignore[reportUnknownVariableType]
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():  # pyright: ignore[reportUnknownVariableType]
            yield from _tensors(item)
