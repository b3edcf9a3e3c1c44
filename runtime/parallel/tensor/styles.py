"""How a module is cut over the ranks of the tensor axis, as a value, and which boxes of a weight each rank has.

Knows no model and no collectives: whoever reads a plan makes styles of it, and whoever cuts a model asks for boxes.

[Note: styles]
Ranks hold an activation whole, each the same, or each a part of its last dim. A `COLUMN` takes whole inputs and gives
parts, a `ROW` takes parts and gives whole outputs, which are sums over the ranks. What stands between a column and a
row works on parts: heads of attention, gates. Weights are named as torch's Linear has them: [outputs, inputs].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate, pairwise, product
from math import prod

from dsrun.checkpoint_files.index.region import Region, TensorBoxes


class Form(Enum):
    """What a module does with what its ranks have, see [Note: styles]."""

    #: Outputs are cut; gradients of inputs are summed over the ranks.
    COLUMN = "column"
    #: Inputs are cut; outputs are summed over the ranks, and the bias is added behind the sum.
    ROW = "row"
    #: An embedding of which each rank has some tokens; outputs are summed.
    VOCABULARY = "vocabulary"
    #: An embedding of which each rank has some columns; outputs are parts.
    HIDDEN = "hidden"
    #: Experts that are all cut alike by their parameters' own styles: outputs are summed, and so are the gradients of
    #: hidden states and of routing weights.
    EXPERTS = "experts"
    #: Whole weights that work on parts (a norm of this rank's heads): their gradients are summed over the ranks.
    PARTIAL_GRADIENT = "partial gradient"
    #: A whole module with an output of which the last columns go to cut heads at once: their gradient is summed.
    SHARED_TAIL = "shared tail"
    #: A whole module between a column and a row whose outputs are parts of a sum.
    SUMMED_OUTPUT = "summed output"
    #: A whole module inside of `EXPERTS`, whose output would be counted once a rank: its input is divided by the ranks.
    DIVIDED_INPUT = "divided input"
    #: Cut nowhere.
    WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class Style:
    """How one module, or one parameter of a module that is cut by its parameters, is cut.

    Attributes:
        form: form of the module.
        gathers_output: whether the parts that a column gives are put together behind it.
        splits_input: whether a row gets whole inputs, and takes its part of them.
        parts: pieces that stand side by side in the dim that is cut, each cut by itself: so many of equal length, or
            their lengths. Gate and up in one weight are 2; queries, keys and values 3 lengths.
        tail: last columns of a `SHARED_TAIL`.
    """

    form: Form
    gathers_output: bool = False
    splits_input: bool = False
    parts: int | tuple[int, ...] = 1
    tail: int = 0


COLUMN, ROW = Style(Form.COLUMN), Style(Form.ROW)
GATHERED_COLUMN, SPLIT_ROW = Style(Form.COLUMN, gathers_output=True), Style(Form.ROW, splits_input=True)
WHOLE = Style(Form.WHOLE)


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """The styles of one model's modules and parameters.

    Attributes:
        source: origin of the plan, as messages name it: `tensor_parallel.partition_config`, or a class's plan.
        modules: styles by the module's qualified name in the model.
        parameters: styles by the parameter's qualified name, of those that go by another one than their module's.
        attributes: numbers of a module that count what it has on this rank, to be divided by the ranks: names of its
            attributes (`num_heads`), by the module's qualified name.
    """

    source: str
    modules: Mapping[str, Style]
    parameters: Mapping[str, Style] = field(default_factory=dict[str, Style])
    attributes: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])


@dataclass(frozen=True, slots=True)
class Deal:
    """How the length of a dim that is cut is dealt to the ranks.

    Attributes:
        parts: pieces that are each dealt by themselves, see `Style`.
        groups: equal lengths that each part is made of, none of which is ever cut: groups of heads. None: as many as
            there are elements.
    """

    parts: int | tuple[int, ...] = 1
    groups: int | None = None

    def runs(self, numel: int, *, rank: int, size: int) -> list[tuple[int, int]]:
        """Returns the runs [start, stop) of a dim that a rank has: one in each part of which it has something.

        The first ranks have a group more where these are uneven.

        Args:
            numel: length of the dim.
            rank: the rank.
            size: ranks.
        """
        parts = self.parts
        lengths = [numel // parts] * parts if isinstance(parts, int) else list(parts)
        assert sum(lengths) == numel, f"parts {lengths} of {numel}"
        found: list[tuple[int, int]] = []
        for start, stop in pairwise(accumulate(lengths, initial=0)):
            groups = stop - start if self.groups is None else self.groups
            length, rest = divmod(stop - start, max(groups, 1))
            assert rest == 0, f"a part of {stop - start} is no {groups} groups"
            low, more = divmod(groups, size)
            first = rank * low + min(rank, more)
            last = first + low + (rank < more)
            if first < last and length:
                found.append((start + first * length, start + last * length))
        return found


EVEN = Deal()


def cut_dim(form: Form, dims: int, *, is_embedding: bool = False) -> int | None:
    """Returns the dim of a parameter that is cut; None where each rank has the whole of it.

    Args:
        form: form of its module, or its own.
        dims: dims of the parameter: 2 for a weight, 1 for a bias, 3 for the weights of experts.
        is_embedding: whether its module is an embedding.
    """
    match form:
        case Form.COLUMN:
            return 1 if is_embedding else max(dims - 2, 0)
        case Form.ROW:
            return 0 if is_embedding else (dims - 1 if dims > 1 else None)
        case Form.VOCABULARY:
            return 0
        case Form.HIDDEN:
            return 1
        case _:
            return None


def boxes(shape: Sequence[int], dim: int, found: Sequence[tuple[int, int]]) -> TensorBoxes:
    """Returns the boxes of a tensor whose dim `dim` is cut to some runs, in the order of the part's elements.

    Dims before the one that is cut are walked through where there are several runs: one box for each run and index.

    Args:
        shape: shape of the whole tensor.
        dim: dim that is cut.
        found: its runs on this rank, see `Deal.runs`.
    """
    if len(found) == 1 or dim == 0 or prod(shape[:dim]) == 1:
        outer: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((0,) * dim, tuple(shape[:dim]))]
    else:
        outer = [(index, (1,) * dim) for index in product(*map(range, shape[:dim]))]
    after = tuple(shape[dim + 1 :])
    cut = (
        Region((*offset, start, *(0,) * len(after)), (*lengths, stop - start, *after))
        for offset, lengths in outer
        for start, stop in found
    )
    return TensorBoxes(tuple(shape), tuple(box for box in cut if box.numel))
