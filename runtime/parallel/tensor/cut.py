"""A model cut over the ranks of the tensor axis, as a plan says: parameters become parts, modules work on parts.

Where plans come from stands in `sources/`; that a plan is right is compared in the first forward (`comparison/`).

[Note: exact mode]
A sum over ranks has another order of additions than one matrix product, so results differ in their last bits from those
of one rank. In the exact mode each rank gathers the whole weights and inputs of a module, multiplies them as one rank
does, and takes its part of the product: the bits are those of one rank, and what is left of the plan (which parts, of
what, in which order) is the same. It saves nothing, and is there to be compared with. Norms of gradients, which are
sums over blocks of the parts, and elementwise kernels at lengths that no vector width divides still round otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from dsrun.errors import ModelError

from ...generators import generators_of
from ...layout.cuts import CutParameter, Cuts, RankPlacement
from ...mesh.collectives import Collectives
from ...stacks import find_stacks, note_whole_numel
from .fronts import is_plain
from .modules import CutState, SiblingInputs, cut_state_of, make_cut
from .operators import runs_of
from .part_randomness import Entrance, PartRandomness, draws, leave_behind
from .sequence.blocks import slice_sequence
from .styles import Form, ModelPlan, Style, boxes
from .survey import ModuleCut, Survey, module_at, parent_of

#: Name of the axis in the mesh.
AXIS = "tensor"
_CUT = RankPlacement(cut_over=(AXIS,))
_PARTIAL = RankPlacement(summed_over=(AXIS,))


def cut_layers(
    model: nn.Module,
    plan: ModelPlan,
    axis: Collectives,
    whole_values: Callable[[nn.Parameter], Tensor],
    *,
    device: torch.device,
    exact: bool = False,
    slices: bool = False,
    overlaps: bool = False,
) -> Cuts:
    """Leaves each rank its parts of a model, in place; every rank of the axis must call, with the same model and plan.

    Parts are of the first rank's values, and generators of all ranks stand as the first rank's do. Enters broadcasts.

    Args:
        model: model with whole parameters.
        plan: styles of its modules.
        axis: ranks of the tensor axis.
        whole_values: function that returns a parameter's whole values, the same on all ranks, in memory of their own,
            and leaves it an ordinary parameter; called for one after the other.
        device: device that collectives work on.
        exact: whether results have the bits of one rank, see [Note: exact mode].
        slices: whether blocks work on slices of the sequence, see `sequence/operators.py`.
        overlaps: whether columns compute gradients of weights while that of their input is summed, see `overlap.py`.

    Returns:
        what became of the parameters that are no plain replicas over the ranks any more.

    Raises:
        ModelError: naming every module that cannot be cut as the plan says.
    """
    _check_whole(model, plan)
    survey = Survey(model, plan, axis, exact=exact)
    if survey.problems:
        raise ModelError.of(survey.problems)
    cuts: dict[int, CutParameter] = {}
    for one in survey.params.values():
        shape = tuple(one.param.shape)
        found = runs_of(one.deal, shape[one.dim], axis)
        cuts[id(one.param)] = CutParameter(_CUT, boxes(shape, one.dim, found))
        _keep_part(one.param, one.dim, found, whole_values)
    for param in survey.partial:
        cuts[id(param)] = CutParameter(_PARTIAL)
    randomness = _Randomness(model, axis, device)
    entrances = {} if slices else randomness.entrances(survey.modules)
    inputs = {
        parent: SiblingInputs(axis, columns, overlaps=overlaps and all(is_plain(type(column)) for column in columns))
        for parent, columns in survey.columns_by_parent().items()
    }
    for one in survey.modules:
        make_cut(
            one.module,
            CutState(
                style=one.style,
                axis=axis,
                deal=one.deal,
                whole=_whole_length(one),
                inputs=inputs.get(parent_of(one.name)) if one.style.form is Form.COLUMN else None,
                entrance=entrances.get(one.name),
                randomness=None if slices else randomness.of(one.name),
                rows=one.rows,
                vocabulary=_tokens(one, axis),
                params=one.params,
                exact=exact,
                slices=slices and randomness.block_of(one.name) is not None,
            ),
        )
        _set_lengths(one, axis)
    survey.set_attributes()
    for name, own in randomness.by_block().items():
        leave_behind(model.get_submodule(name), own)
    if slices:
        for param in slice_sequence(
            model, axis, partial={id(param) for param in survey.partial}, randomness=randomness.by_block()
        ):
            cuts[id(param)] = CutParameter(_PARTIAL)
    _share_generators(axis, device)
    return cuts


def of_first_rank(ranks: Collectives, device: torch.device) -> Callable[[nn.Parameter], Tensor]:
    """Returns what takes whole values that each rank has: those of the first one, by a broadcast.

    Args:
        ranks: ranks that have the model.
        device: device that collectives work on.
    """

    def take(param: nn.Parameter) -> Tensor:
        whole = param.detach().to(device, copy=True, memory_format=torch.contiguous_format)
        ranks.broadcast(whole.view(-1), source=0, label="values of a layer").wait()
        return whole

    return take


def is_cut(model: nn.Module) -> bool:
    """Whether some module of a model has been cut."""
    return any(cut_state_of(part) is not None for part in model.modules())


def _check_whole(model: nn.Module, plan: ModelPlan) -> None:
    if is_cut(model):
        raise ModelError(
            "model: an earlier engine has cut it over the tensor axis, and each rank has its parts alone",
            hint="build it anew for another engine",
        )
    absent = [name for name in plan.modules if module_at(model, name) is None]
    params = dict(model.named_parameters(remove_duplicate=False))
    absent += [name for name in plan.parameters if name not in params]
    assert not absent, f"{plan.source} names what is not in the model: {absent}"


class _Randomness:
    """The random numbers of the blocks that draw some."""

    def __init__(self, model: nn.Module, axis: Collectives, device: torch.device) -> None:
        self._own = PartRandomness(axis.rank, device)
        self._draws = {
            name: draws(block) for stack in find_stacks(model, skip=lambda _: False) for name, block in stack.blocks
        }

    def block_of(self, name: str) -> str | None:
        """Returns the name of the block that a module is in; None where it is in none."""
        return next((one for one in _outer_names(name) if one in self._draws), None)

    def of(self, name: str) -> PartRandomness | None:
        """Returns those of the block that a module is in; None where nothing is drawn there."""
        block = self.block_of(name)
        return self._own if block is not None and self._draws[block] else None

    def by_block(self) -> dict[str, PartRandomness]:
        """Returns those of all blocks that draw, by the block's name."""
        return {name: self._own for name, has_dropout in self._draws.items() if has_dropout}

    def entrances(self, modules: Sequence[ModuleCut]) -> dict[str, tuple[Entrance, int]]:
        """Returns behind which columns parts begin, by the name of each, and which of them it is.

        Args:
            modules: modules that are cut, in the model's order.
        """
        rows = Counter(parent_of(one.name) for one in modules if _takes_parts(one.style))
        before: Counter[str] = Counter()
        groups: dict[tuple[str, int], list[str]] = {}
        for one in modules:
            parent, style = parent_of(one.name), one.style
            if _takes_parts(style):
                before[parent] += 1
            elif style.form is Form.COLUMN and not style.gathers_output and self.of(one.name) is not None:
                number = before[parent] if rows[parent] > 1 else 0
                groups.setdefault((parent, number), []).append(one.name)
        found: dict[str, tuple[Entrance, int]] = {}
        for names in groups.values():
            entrance = Entrance(self._own, len(names))
            found.update((name, (entrance, position)) for position, name in enumerate(names))
        return found


def _takes_parts(style: Style) -> bool:
    return style.form is Form.ROW and not style.splits_input


def _keep_part(
    param: nn.Parameter, dim: int, found: Sequence[tuple[int, int]], whole_values: Callable[[nn.Parameter], Tensor]
) -> None:
    """Leaves a parameter its part of the whole values, where its values are."""
    before = param.device
    whole = whole_values(param)
    part = torch.cat([whole.narrow(dim, start, stop - start) for start, stop in found], dim).contiguous()
    note_whole_numel(param, whole.numel())
    param.data = part if before.type == "meta" else part.to(before)


def _share_generators(axis: Collectives, device: torch.device) -> None:
    """Has the generators of all ranks stand as the first rank's do."""
    for generator in generators_of(device):
        state = generator.get_state()
        sent: Tensor = state.to(device, copy=True)
        axis.broadcast(sent, source=0, label="state of random numbers").wait()
        generator.set_state(sent.cpu())


def _whole_length(cut: ModuleCut) -> int:
    dims = next(iter(cut.params.values()), None)
    return 0 if dims is None else dims[2]


def _tokens(cut: ModuleCut, axis: Collectives) -> tuple[int, int]:
    if cut.style.form is not Form.VOCABULARY:
        return 0, 0
    ((start, stop),) = runs_of(cut.deal, _whole_length(cut), axis)
    return start, stop


def _set_lengths(cut: ModuleCut, axis: Collectives) -> None:
    """Has a Linear or an Embedding say how long its part is."""
    module, form = cut.module, cut.style.form
    if cut.rows is not None:
        return
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, nn.Embedding):
        module.num_embeddings, module.embedding_dim = module.weight.shape
        if form is Form.VOCABULARY and module.padding_idx is not None:
            start, stop = _tokens(cut, axis)
            is_here = start <= module.padding_idx < stop
            module.padding_idx = module.padding_idx - start if is_here else None


def _outer_names(name: str) -> Iterator[str]:
    """Yields a name and those of the modules around it, innermost first."""
    while name:
        yield name
        name = parent_of(name)
