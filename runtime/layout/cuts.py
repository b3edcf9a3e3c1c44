"""How an axis beside data has changed a model's parameters: what whoever cuts a model says of each, and units ask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from dsrun.checkpoint_files.index.region import TensorBoxes
from dsrun.units import format_names


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """The axes of ranks that a parameter is no plain replica along.

    Attributes:
        cut_over: axes along which ranks hold different elements of it; an axis with one rank cuts nothing, and is not
            named.
        summed_over: axes along which ranks hold the same elements and compute parts of their gradient, which add up;
            along the other ones each computes the whole gradient of its samples, and the mean is taken.
        stages: pipeline stages that use it, ascending, where these are several: their ranks hold the same elements,
            and compute parts of the gradient, which add up.
    """

    cut_over: tuple[str, ...] = ()
    summed_over: tuple[str, ...] = ()
    stages: tuple[int, ...] = ()


#: A parameter that all ranks hold alike.
EVERYWHERE = RankPlacement()


@dataclass(frozen=True, slots=True)
class CutParameter:
    """A parameter as an axis has left it on this rank.

    Attributes:
        placement: axes that it is no plain replica along.
        whole: boxes of the whole tensor that this rank has; None: all of it, of a parameter that no axis cuts.
        name: name that all ranks give a parameter which several parts of a pipeline use, be they of one stage: that of
            its first use in the whole model. None: one part alone uses it, by the name that it has there.
    """

    placement: RankPlacement
    whole: TensorBoxes | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        assert self.whole is not None or not self.placement.cut_over, (
            f"a parameter cut over {_joined(self.placement.cut_over)} says which boxes of the whole this rank has: "
            "without them, each rank would save its part as the whole"
        )
        assert self.name is not None or not self.placement.stages, "stages know a parameter by one name"


#: By id of the parameter; those that no axis has changed are not in it.
Cuts = Mapping[int, CutParameter]
NO_CUTS: Cuts = {}


def placement_of(param: object, cuts: Cuts) -> RankPlacement:
    """Returns the axes that a parameter is no plain replica along."""
    cut = cuts.get(id(param))
    return EVERYWHERE if cut is None else cut.placement


def is_shared(param: object, cuts: Cuts) -> bool:
    """Whether several parts of a pipeline use a parameter, on this rank or on others."""
    cut = cuts.get(id(param))
    return cut is not None and cut.name is not None


def name_of(name: str, param: object, cuts: Cuts) -> str:
    """Returns the name that all ranks give a parameter, which is called `name` in this rank's model."""
    cut = cuts.get(id(param))
    return name if cut is None or cut.name is None else cut.name


def boxes_of(params: Sequence[tuple[str, object]], cuts: Cuts) -> dict[str, TensorBoxes]:
    """Returns the boxes of the parameters of which this rank has a part, by name."""
    found = {name: cuts[id(param)].whole for name, param in params if id(param) in cuts}
    return {name: whole for name, whole in found.items() if whole is not None}


def whole_numel(param: Tensor, cuts: Cuts) -> int:
    """Returns the elements of a whole parameter: the same number on every rank, whatever part of it each has."""
    cut = cuts.get(id(param))
    return param.numel() if cut is None or cut.whole is None else prod(cut.whole.shape)


def are_cut(names: Sequence[str], placement: RankPlacement) -> str:
    """Returns that parameters are cut, and over which axes, as messages say it.

    Args:
        names: names of one or more parameters.
        placement: axes that they are cut over, one or more.
    """
    return f"{format_names(names, 1)} {'are' if names[1:] else 'is'} cut over {_joined(placement.cut_over)}"


def in_cut(placement: RankPlacement) -> str:
    """Returns what follows the name of a unit or an arena of parameters that are no plain replicas."""
    cut = f" cut over {_joined(placement.cut_over)}" if placement.cut_over else ""
    cut += f" summed over {_joined(placement.summed_over)}" if placement.summed_over else ""
    return cut + (f" of stages {_joined([str(stage) for stage in placement.stages])}" if placement.stages else "")


def _joined(axes: Sequence[str]) -> str:
    return " and ".join(axes)
