"""Modules of which each rank computes a part: a module keeps its own forward, and gets operators before and behind it.

Which module is cut how, and what its parameters become, is decided in `cut.py`.

[Note: cut classes]
A cut module is of a class made for it: its own class behind one of those here, by the same name. So whoever asks
whether it is a Linear gets the answer of before, and nothing that hangs on the module (hooks, a `forward` of a subclass
that scales its outputs) is lost. What the class needs to know lies in one attribute, `CutState`.

[Note: inputs of siblings]
Queries, keys and values are columns of one input, and so are gate and up. The gradient of that input is the sum of all
of theirs, so it is summed over the ranks once: columns with one parent that are given the same tensor share the
operator.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...mesh.collectives import Collectives
from ..linear_products import AsksForProduct, plain_product, product_of
from .fronts import is_plain, own_class, uncompiled, with_front
from .operators import gather_last, share_input, split_last, sum_outputs
from .overlap import OverlappedInput
from .part_randomness import Entrance, PartRandomness
from .sequence.operators import scatter_sums, split_sequence
from .styles import EVEN, Deal, Form, Style

_STATE = "_dsrun_tensor_cut"


class SiblingInputs:
    """One operator for the columns of one parent that are given the same tensor, see [Note: inputs of siblings].

    Attributes:
        summed: tensor with a gradient that the parent itself sums over the ranks; None for none.
        columns: the columns, in order.

    Args:
        axis: ranks of the tensor axis.
        columns: modules that share, see the attribute.
        overlaps: whether weight gradients are computed while the input's is summed, see `overlap.py`.
    """

    def __init__(self, axis: Collectives, columns: Sequence[nn.Module], *, overlaps: bool = False) -> None:
        self.summed: Tensor | None = None
        self.columns = list(columns)
        self._overlaps = overlaps
        self._axis = axis
        self._called: set[int] = set()
        self._kept: list[tuple[Tensor, int, Tensor | OverlappedInput]] = []

    def __call__(self, column: nn.Module, x: Tensor, forward: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns what a column gives for `x`.

        Args:
            column: the column.
            x: its input.
            forward: function that computes it, given what the columns share.
        """
        if id(column) in self._called:  # another forward has begun, and the one before has left columns out
            self._forget()
        self._called.add(id(column))
        is_whole = x is self.summed or not x.requires_grad or not torch.is_grad_enabled()
        shared = x if is_whole else self._shared_of(x)
        if len(self._called) == len(self.columns):  # or an activation would be kept until the next forward
            self._forget()
        if isinstance(shared, OverlappedInput):
            return shared.column(self.columns.index(column), _rows(column, "bias"))
        return forward(shared)

    def _shared_of(self, x: Tensor) -> Tensor | OverlappedInput:
        for given, version, shared in self._kept:
            if given is x and version == x._version:  # pyright: ignore[reportPrivateUsage]
                return shared
        if self._overlaps and not torch.is_autocast_enabled(x.device.type):
            weights = [_rows(one, "weight") for one in self.columns]
            shared = OverlappedInput(x, self._axis, [weight for weight in weights if weight is not None])
        else:
            shared = share_input(x, self._axis)
        self._kept.append((x, x._version, shared))  # pyright: ignore[reportPrivateUsage]
        return shared

    def _forget(self) -> None:
        self._called.clear()
        self._kept.clear()

    def for_twin(self, columns: Sequence[nn.Module]) -> SiblingInputs:
        """Returns one for other columns."""
        return SiblingInputs(self._axis, columns, overlaps=self._overlaps)

    def __deepcopy__(self, memo: dict[int, Any]) -> SiblingInputs:
        """Returns one for the copy's columns."""
        made = memo[id(self)] = SiblingInputs(self._axis, [])
        made.columns = copy.deepcopy(self.columns, memo)
        made._overlaps = self._overlaps
        return made


@dataclass(slots=True, kw_only=True)
class CutState:
    """What a cut module knows of its cut.

    Attributes:
        style: style of the module.
        axis: ranks of the tensor axis.
        deal: rule by which the dim of its outputs (a column's) or inputs (a row's) is dealt.
        whole: length of that dim in the whole module.
        inputs: inputs that it shares with its siblings; of columns alone.
        entrance: columns behind which ranks draw their own numbers, and the position of this one among them; None:
            ranks go on as they do.
        randomness: random numbers between columns and rows of its block; None: nothing is drawn there.
        rows: rows of whole weights that this rank uses, of a column whose heads are fewer than the ranks.
        vocabulary: tokens [start, stop) that this rank has, of an embedding.
        params: (dim, deal, length) of each parameter that is cut, by its name in the module, for the exact mode.
        exact: whether whole matrices are multiplied, see `cut.py`.
        slices: whether a row's outputs are slices of the sequence, see `sequence/operators.py`.
    """

    style: Style
    axis: Collectives
    deal: Deal = EVEN
    whole: int = 0
    inputs: SiblingInputs | None = None
    entrance: tuple[Entrance, int] | None = None
    randomness: PartRandomness | None = None
    rows: tuple[int, int] | None = None
    vocabulary: tuple[int, int] = (0, 0)
    params: Mapping[str, tuple[int, Deal, int]] = field(default_factory=dict[str, tuple[int, Deal, int]])
    exact: bool = False
    slices: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> CutState:
        """Returns the same cut for the copy; ranks are no part of a model."""
        inputs, entrance, randomness = copy.deepcopy((self.inputs, self.entrance, self.randomness), memo)
        return replace(self, inputs=inputs, entrance=entrance, randomness=randomness)


class _Cut:
    """What all cut modules have; stands before their own class."""

    _dsrun_tensor_cut: CutState

    def __init_subclass__(cls) -> None:
        """Has a compiled block be compiled around its cut modules."""
        if "forward" in vars(cls):
            cls.forward = uncompiled(cls.forward)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """See the classes of forms."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        """The module's own, and how it is cut."""
        own: str = super().extra_repr()  # type: ignore[misc] # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]
        cut = self._dsrun_tensor_cut
        said = f"{cut.style.form.value} {cut.axis.rank} of {cut.axis.size}"
        return f"{own}, {said}" if own else said

    def _own(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's own forward."""
        return super().forward(*args, **kwargs)  # type: ignore[misc] # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]


class _LinearCut(_Cut, AsksForProduct):
    """A cut module whose product somebody else may make, see `linear_products.py`."""

    def _own(self, *args: Any, **kwargs: Any) -> Any:
        product = product_of(self)
        return super()._own(*args, **kwargs) if product is None else product(*args, **kwargs)


class _Column(_LinearCut):
    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        cut = self._dsrun_tensor_cut
        if cut.exact:
            with _whole_parameters(self, cut):
                y = self._own(input, *args, **kwargs)
            if not cut.style.gathers_output:
                y = split_last(y, cut.axis, deal=cut.deal)
        else:
            assert cut.inputs is not None, "a column shares its inputs"
            own: Any = self
            y = cut.inputs(own, input, lambda shared: self._own(shared, *args, **kwargs))
            if cut.style.gathers_output:
                y = gather_last(y, cut.axis, whole=cut.whole, deal=cut.deal)
        _pass_column(cut)
        return y


class _RepeatedColumn(_Cut):
    """Heads fewer than ranks: every rank has all of them, and uses one."""

    def forward(self, input: Tensor) -> Tensor:
        cut = self._dsrun_tensor_cut
        assert cut.inputs is not None, "a column shares its inputs"
        assert cut.rows is not None, "it is used in part"
        own: Any = self
        y = cut.inputs(own, input, lambda shared: F.linear(shared, _rows(own, "weight"), _rows(own, "bias")))  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
        _pass_column(cut)
        return y


class _Row(_LinearCut):
    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        cut = self._dsrun_tensor_cut
        if cut.randomness is not None and not cut.style.splits_input:
            cut.randomness.leave()
        if cut.exact:
            if not cut.style.splits_input:
                input = gather_last(input, cut.axis, whole=cut.whole, deal=cut.deal)
            with _whole_parameters(self, cut):
                y = self._own(input, *args, **kwargs)
            return split_sequence(y, cut.axis) if cut.slices else y
        if cut.style.splits_input:
            input = split_last(input, cut.axis, deal=cut.deal)
        own: Any = self
        bias: Tensor | None = getattr(own, "bias", None)
        if bias is None:
            y = self._own(input, *args, **kwargs)
        else:
            y = (product_of(self) or partial(plain_product, self))(input, has_bias=False)
        # A Linear of a class of its own may have kept what it returns.
        is_own = bias is not None or is_plain(own_class(own))
        y = scatter_sums(y, cut.axis, is_own=is_own) if cut.slices else sum_outputs(y, cut.axis, in_place=is_own)
        return y if bias is None else y + bias.to(y.dtype)  # under autocast a bias is of another one


class _Vocabulary(_Cut):
    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        cut = self._dsrun_tensor_cut
        if cut.exact:
            with _whole_parameters(self, cut):
                return self._own(input, *args, **kwargs)
        start, stop = cut.vocabulary
        elsewhere = (input < start) | (input >= stop)
        # Tokens of no rank are left as they are, so that all ranks refuse them as the whole embedding does.
        y = self._own((input - start).masked_fill(elsewhere & (input >= 0) & (input < cut.whole), 0), *args, **kwargs)
        return sum_outputs(y.masked_fill(elsewhere.unsqueeze(-1), 0), cut.axis)


class _Hidden(_Cut):
    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        cut = self._dsrun_tensor_cut
        if cut.exact:
            with _whole_parameters(self, cut):
                y = self._own(input, *args, **kwargs)
            return y if cut.style.gathers_output else split_last(y, cut.axis, deal=cut.deal)
        y = self._own(input, *args, **kwargs)
        return gather_last(y, cut.axis, whole=cut.whole, deal=cut.deal) if cut.style.gathers_output else y


class _Experts(_Cut):
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        cut = self._dsrun_tensor_cut
        if cut.exact:
            with _whole_parameters(self, cut):
                return self._own(x, *args, **kwargs)
        shared = [_shared_where_trained(arg, cut.axis) for arg in args]
        named = {name: _shared_where_trained(arg, cut.axis) for name, arg in kwargs.items()}
        return sum_outputs(self._own(share_input(x, cut.axis), *shared, **named), cut.axis)


class _SharedTail(_Cut):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        cut = self._dsrun_tensor_cut
        y: Tensor = self._own(*args, **kwargs)
        head, tail = y.split([y.shape[-1] - cut.style.tail, cut.style.tail], -1)
        return torch.cat([head, share_input(tail, cut.axis)], -1)


class _SummedOutput(_Cut):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        cut = self._dsrun_tensor_cut
        y = self._own(*args, **kwargs)
        return y if y is None else sum_outputs(y, cut.axis)


class _DividedInput(_Cut):
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        cut = self._dsrun_tensor_cut
        return self._own(x if cut.exact else x / cut.axis.size, *args, **kwargs)


_CLASSES: Mapping[Form, type[_Cut]] = {
    Form.COLUMN: _Column,
    Form.ROW: _Row,
    Form.VOCABULARY: _Vocabulary,
    Form.HIDDEN: _Hidden,
    Form.EXPERTS: _Experts,
    Form.SHARED_TAIL: _SharedTail,
    Form.SUMMED_OUTPUT: _SummedOutput,
    Form.DIVIDED_INPUT: _DividedInput,
}


def make_cut(module: nn.Module, state: CutState) -> None:
    """Makes a module one of which each rank computes a part, in place; see [Note: cut classes].

    Args:
        module: module whose parameters are this rank's parts already.
        state: the cut.
    """
    front = _RepeatedColumn if state.rows is not None else _CLASSES[state.style.form]
    setattr(module, _STATE, state)
    module.__class__ = with_front(front, type(module))


def give_own_inputs(module: nn.Module) -> SiblingInputs | None:
    """Has the columns among a twin's children share inputs with each other, and not with those it is the twin of.

    Args:
        module: a module of a twin.

    Returns:
        what they share; None where the module has no columns.
    """
    columns = [
        (child, state)
        for child in module.children()
        if (state := cut_state_of(child)) is not None and state.inputs is not None
    ]
    if not columns:
        return None
    before = columns[0][1].inputs
    assert before is not None, "looked at"
    inputs = before.for_twin([child for child, _ in columns])
    for child, state in columns:
        setattr(child, _STATE, replace(state, inputs=inputs))
    return inputs


def cut_state_of(module: nn.Module) -> CutState | None:
    """Returns how a module is cut; None where it is whole."""
    return getattr(module, _STATE, None)


def _pass_column(cut: CutState) -> None:
    if cut.entrance is not None:
        entrance, position = cut.entrance
        entrance.pass_column(position)


def _rows(column: Any, name: str) -> Tensor | None:
    """Returns what this rank uses of a column's weight or bias; None where it has none."""
    value: Tensor | None = getattr(column, name)
    rows = column._dsrun_tensor_cut.rows
    return value if value is None or rows is None else value[rows[0] : rows[1]]


def _shared_where_trained(value: Any, axis: Collectives) -> Any:
    trains = isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()
    return share_input(value, axis) if trains else value


@contextmanager
def _whole_parameters(module: Any, cut: CutState) -> Generator[None]:
    """Inside, the module has its whole parameters; each rank's part gets its part of the gradient."""
    held: dict[str, Any] = module._parameters
    own = {name: held[name] for name in cut.params}
    for name, (dim, deal, length) in cut.params.items():
        whole = gather_last(own[name].movedim(dim, -1), cut.axis, whole=length, deal=deal)
        held[name] = whole.movedim(-1, dim).contiguous()  # another layout would have other bits
    try:
        yield
    finally:
        held.update(own)
