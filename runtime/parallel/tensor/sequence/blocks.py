"""A cut model whose blocks work on slices of the sequence: what blocks and their modules become. See `operators.py`.

[Note: who sums the gradient of a gathered input]
Where columns alone use it, each rank has a part of that gradient, and a reduce-scatter adds up and takes the slice in
one. A module with whole weights beside its columns (low-rank projections) has the gradient of its own use whole on
each rank. There columns sum theirs, as they do without slices, and the slice is taken of what is whole.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from dsrun.errors import ModelError, Problem

from ....compat import in_backward
from ....mesh.collectives import Collectives
from ....stacks import AbsentBlock, Stack, find_stacks
from ..fronts import with_front
from ..modules import SiblingInputs, cut_state_of, give_own_inputs
from ..part_randomness import PartRandomness
from ..styles import Form
from .operators import gather_for_columns, join_sequence, split_sequence, with_hidden

_BLOCK = "_dsrun_sliced_block"
_PARENT = "_dsrun_gathered_inputs"
_HINT = "leave `tensor_parallel.sequence_parallel` out for this model"
_REFUSED = {Form.EXPERTS, Form.SUMMED_OUTPUT, Form.DIVIDED_INPUT}


@dataclass(slots=True)
class SlicedBlock:
    """What a block of a stack knows of the slices.

    Attributes:
        axis: ranks of the tensor axis.
        splits: whether it is given whole sequences, and takes its slice of them: the first block of a stack, or of
            those in a row that a pipeline stage has.
        joins: whether it returns whole sequences: the last one of these.
        randomness: random numbers of its slices; None: it draws none.
        running: number of its forwards that run.
    """

    axis: Collectives
    splits: bool
    joins: bool
    randomness: PartRandomness | None = None
    running: int = 0

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a block on slices.

        Args:
            forward: the block's own forward.
            args: positional arguments.
            kwargs: keyword arguments.
        """
        if self.splits:
            args, kwargs = with_hidden(args, kwargs, lambda x: split_sequence(x, self.axis))
        self.running += 1
        if self.randomness is not None:
            self.randomness.enter()
        try:
            output = forward(*args, **kwargs)
        finally:
            self.running -= 1
            if self.randomness is not None:
                self.randomness.leave()
        return _with_hidden_output(output, lambda x: join_sequence(x, self.axis)) if self.joins else output

    def __deepcopy__(self, memo: object) -> SlicedBlock:
        """Returns the same for a copy; ranks are no part of a model."""
        return SlicedBlock(self.axis, self.splits, self.joins, self.randomness)


class _GatheredInputs:
    """What a module with columns knows of its input.

    Attributes:
        block: slices of the block that the module is in.
        inputs: inputs of its columns.
        sums: whether its columns alone use the input.
    """

    def __init__(self, block: SlicedBlock, inputs: SiblingInputs, *, sums: bool) -> None:
        self.block, self.inputs, self.sums = block, inputs, sums

    def gathered(self, x: Tensor) -> Tensor:
        """Returns the whole sequence.

        Raises:
            ModelError: the block does not run, so `x` is no slice; in backward a part of it may be computed again.
        """
        if not self.block.running and not in_backward():
            raise ModelError(
                "tensor_parallel.sequence_parallel: a module with cut layers is called outside of its block, which "
                "takes slices of the sequence and puts them together",
                hint=f"call the block itself, and not its parts; or {_HINT}",
            )
        if not self.sums:
            return join_sequence(x, self.block.axis)
        self.inputs.summed = whole = gather_for_columns(x, self.block.axis)
        return whole

    def __deepcopy__(self, memo: dict[int, Any]) -> _GatheredInputs:
        """Returns the same; ranks are no part of a model."""
        block, inputs = copy.deepcopy((self.block, self.inputs), memo)
        return _GatheredInputs(block, inputs, sums=self.sums)


class _GatheringModule:
    """Stands before the class of a module with columns."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own: _GatheredInputs = getattr(self, _PARENT)
        args, kwargs = with_hidden(args, kwargs, own.gathered)
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc] # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]
        finally:
            own.inputs.summed = None


class _OnSlices:
    """Stands before the class of a block."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        sliced: SlicedBlock = getattr(self, _BLOCK)
        return sliced.run(super().forward, args, kwargs)  # type: ignore[misc] # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownArgumentType]


def slice_sequence(
    model: nn.Module, axis: Collectives, *, partial: Collection[int], randomness: Mapping[str, PartRandomness]
) -> list[nn.Parameter]:
    """Has the blocks of a cut model work on slices of the sequence, in place.

    Args:
        model: model that has been cut.
        axis: ranks of the tensor axis.
        partial: ids of whole parameters with gradients that are parts on each rank already.
        randomness: random numbers of the blocks that draw some, by name of the block.

    Returns:
        whole parameters that work on slices: their gradients are parts.

    Raises:
        ModelError: naming every module that cannot work so.
    """
    stacks = find_stacks(model, skip=lambda _: False)
    _check(stacks)
    found: dict[int, nn.Parameter] = {}
    for stack in stacks:
        if not any(cut_state_of(part) for _, block in stack.blocks for part in block.modules()):
            continue
        blocks = [block for _, block in stack.blocks]
        meets = _neighbours(model.get_submodule(stack.name), blocks)
        for number, (name, block) in enumerate(stack.blocks):
            sliced = SlicedBlock(axis, not meets[number], not meets[number + 1], randomness.get(name))
            inside = _gather_inputs(block, sliced, partial)
            found |= {id(param): param for param in _on_slices(block, inside)}
            setattr(block, _BLOCK, sliced)
            block.__class__ = with_front(_OnSlices, type(block))
    return list(found.values())


def gets_slices(module: nn.Module) -> bool:
    """Whether a block, or a module with columns and rows inside of one, is given slices of the sequence."""
    sliced: SlicedBlock | None = getattr(module, _BLOCK, None)
    return _works_on_slices(module) if sliced is None else not sliced.splits


def on_whole_sequences(twin: nn.Module, axis: Collectives) -> nn.Module:
    """Has a twin of a cut module take and return whole sequences, and share nothing with the module; returns it."""
    if getattr(twin, _BLOCK, None) is None and _works_on_slices(twin):
        twin.__class__ = with_front(_OnSlices, type(twin))
        setattr(twin, _BLOCK, None)
    sliced = SlicedBlock(axis, splits=True, joins=True)
    if hasattr(twin, _BLOCK):
        setattr(twin, _BLOCK, sliced)
    for part in twin.modules():
        inputs = give_own_inputs(part)
        gathered: _GatheredInputs | None = getattr(part, _PARENT, None)
        if inputs is not None and gathered is not None:
            setattr(part, _PARENT, _GatheredInputs(sliced, inputs, sums=gathered.sums))
    return twin


def _neighbours(container: nn.Module, blocks: Sequence[nn.Module]) -> list[bool]:
    """Returns whether this rank runs the block before each one right before it, and at the end whether one follows.

    Args:
        container: module that holds the blocks, and `AbsentBlock`s for those of other pipeline stages.
        blocks: blocks of this rank, in order.
    """
    items = list(container.children())
    at = [items.index(block) for block in blocks]
    between = [items[one + 1 : other] for one, other in pairwise(at)]
    inner = [not any(isinstance(item, AbsentBlock) for item in passed) for passed in between]
    return [False, *inner, False]


def _works_on_slices(module: nn.Module) -> bool:
    """Whether rows in a module give slices."""
    return any((state := cut_state_of(part)) is not None and state.slices for part in module.modules())


def _with_hidden_output(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(output, Tensor):
        return change(output)
    changed, _ = with_hidden(tuple(output), {}, change)
    return changed


def _gather_inputs(block: nn.Module, sliced: SlicedBlock, partial: Collection[int]) -> list[nn.Module]:
    """Has modules with columns gather their inputs; returns them."""
    found: list[nn.Module] = []
    for module in list(block.modules()):
        states = [state for child in module.children() if (state := cut_state_of(child)) is not None]
        columns = [state for state in states if state.inputs is not None]
        if not columns:
            continue
        inputs, exact = columns[0].inputs, columns[0].exact
        assert inputs is not None, "looked at"
        setattr(
            module, _PARENT, _GatheredInputs(sliced, inputs, sums=not exact and not _has_whole_parts(module, partial))
        )
        module.__class__ = with_front(_GatheringModule, type(module))
        found.append(module)
    return found


def _has_whole_parts(module: nn.Module, partial: Collection[int]) -> bool:
    """Whether a part of a module has weights that are neither cut nor on this rank's heads."""
    for part in module.modules():
        state = cut_state_of(part)
        own = [param for param in part.parameters(recurse=False) if id(param) not in partial]
        if own and (state is None or state.style.form not in (Form.COLUMN, Form.ROW)) and part is not module:
            return True
    return False


def _on_slices(block: nn.Module, gathering: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Returns the whole parameters of a block that work on slices."""
    inside = {id(param) for module in gathering for param in module.parameters()}
    cut = {id(param) for part in block.modules() if (state := cut_state_of(part)) for param in _cut_params(part, state)}
    found = [param for param in block.parameters() if id(param) not in inside and id(param) not in cut]
    for part in block.modules():
        state = cut_state_of(part)
        bias: Any = getattr(part, "bias", None)
        is_added_to_slices = state is not None and state.style.form is Form.ROW and not state.exact
        if is_added_to_slices and bias is not None:
            found.append(bias)
    return found


def _cut_params(part: Any, state: Any) -> list[nn.Parameter]:
    return [part._parameters[key] for key in state.params]


def _check(stacks: Sequence[Stack]) -> None:
    problems: list[Problem] = []
    for stack in stacks:
        for name, block in stack.blocks:
            for key, part in block.named_modules():
                state = cut_state_of(part)
                where = f"model: `{name}{'.' if key else ''}{key}` ({type(part).__name__})"
                if state is not None and state.style.form in _REFUSED:
                    problems.append(Problem(f"{where} cannot work on slices of the sequence in this version", _HINT))
            if any((state := cut_state_of(child)) and state.inputs is not None for child in block.children()):
                problems.append(
                    Problem(
                        f"model: `{name}` ({type(block).__name__}) has columns of its own, and no module around them "
                        "that could gather its input",
                        _HINT,
                    )
                )
    if problems:
        raise ModelError.of(problems)
