"""Parameters that several chunks of a pipeline use: one unit over their stages, and one memory on each rank.

[Note: uses of a parameter]
Each use of a parameter sums up its gradients apart, over all micro batches. The sums of the uses on one rank are added
up there, first chunk first, and then those of the stages, by the unit's reduction. So the bits do not depend on which
chunks are on one rank. Where parameters are slices between their uses, or ranks reduce gradients after every micro
step, autograd sums the uses on one rank up together. On a rank the parameter of the first use is the one that is
trained; the others are leaves of autograd that view its memory, and no parameters of the model any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dsrun.errors import ModelError

from ...layout.cuts import EVERYWHERE, CutParameter, Cuts
from ...mesh.agree.same import check_agreement
from ...mesh.join.groups import ProcessGroupMesh
from ...mesh.sums import add_scaled, set_scaled
from ...parallel.pipeline.stages import Stages
from ...zero.partition_parameters import home_of, memory_of
from ...zero.units.trained import is_trained
from ...zero.units.unit import ParamUnit

_ALIKE = (
    "give all of its names rules of `tensor_parallel.partition_config` that cut the same dim alike, or `skip` them all"
)


@dataclass(slots=True)
class _Use:
    """A further use of a parameter on this rank.

    Attributes:
        name: name that its parameter had.
        first_name: name of the first use in the whole model.
        first: parameter of the first use here, which is trained.
        places: module and attribute that read it.
        leaf: leaf that the module reads, once there is memory to view.
        index: number of the parameter's unit, once there is one.
        offset: first element of the parameter in the unit's buffer.
        total: fp32 sum of its gradients in this global batch, flat; None where the parameter is not trained.
        has_any: whether the sum holds any.
    """

    name: str
    first_name: str
    first: nn.Parameter
    places: list[tuple[nn.Module, str]]
    leaf: Tensor | None = None
    index: int = -1
    offset: int = 0
    total: Tensor | None = None
    has_any: bool = False


class LocalTies:
    """Uses of parameters beside the first one on this rank, see [Note: uses of a parameter].

    Args:
        uses: further uses.
        frozen: names of frozen parameters here whose first use another stage has, each with the name of that.
    """

    def __init__(self, uses: Sequence[_Use], frozen: Mapping[str, str]) -> None:
        self._uses = list(uses)
        #: Names of further uses, each with the name of the first one in the whole model.
        self.names = {use.name: use.first_name for use in uses}
        #: The same of frozen parameters that another stage has too; trained ones are known by the first name.
        self.frozen = dict(frozen)

    @classmethod
    def of(cls, stages: Stages, *, is_shared: bool) -> LocalTies:
        """Takes further uses out of a model's parameters; until `bind` the model cannot run.

        Args:
            stages: chunks of this rank.
            is_shared: whether all uses share one parameter, whose gradients autograd sums up together. So they do where
                it is frozen.
        """
        names = {id(param): name for name, param in stages.module.named_parameters()}
        uses: list[_Use] = []
        firsts: dict[str, nn.Parameter] = {}
        frozen: dict[str, str] = {}
        for tied in sorted(stages.tied, key=lambda tied: tied.chunk):
            first = firsts.setdefault(tied.name, tied.param)
            if first is tied.param:
                if not is_trained(first) and tied.chunks[0] not in stages.own:
                    frozen[names[id(first)]] = tied.name
                continue
            places = [
                (module, name)
                for module in stages.module.modules()
                for name, param in module.named_parameters(recurse=False)
                if param is tied.param
            ]
            is_one = is_shared or not is_trained(first)
            for module, name in places:
                if is_one:
                    module.register_parameter(name, first)
                else:
                    del module._parameters[name]  # pyright: ignore[reportPrivateUsage]
            if not is_one:
                uses.append(_Use(names[id(tied.param)], tied.name, first, places))
        return cls(uses, frozen)

    def bind(self, units: Sequence[ParamUnit]) -> None:
        """Makes further uses views of the first one's memory, which is where it will stay.

        Args:
            units: units of trained parameters.
        """
        places = {id(param): (unit, number) for unit in units for number, param in enumerate(unit.params)}
        for use in self._uses:
            memory = memory_of(use.first)
            trained = places.get(id(use.first))
            use.leaf = memory.detach().requires_grad_(trained is not None)
            for module, name in use.places:
                module.__dict__[name] = use.leaf
            if trained is not None:
                unit, number = trained
                use.index, use.offset = unit.index, unit.layout.extents[number].offset
                use.total = torch.zeros_like(memory, dtype=torch.float32).view(-1)

    @property
    def units(self) -> set[int]:
        """Numbers of the units whose sums get those of further uses."""
        return {use.index for use in self._uses if use.total is not None}

    @property
    def has_any(self) -> bool:
        """See `FurtherUses`."""
        return any(use.has_any for use in self._uses)

    def take(self, factor: float) -> None:
        """See `FurtherUses`."""
        for use in self._uses:
            if use.leaf is None or use.leaf.grad is None:
                continue
            assert use.total is not None, "a leaf that gets gradients is trained"
            (add_scaled if use.has_any else set_scaled)(use.total, use.leaf.grad.reshape(-1), factor)
            use.has_any = True
            use.leaf.grad = None

    def give(self) -> list[tuple[int, int, Tensor]]:
        """See `FurtherUses`."""
        given = [(use.index, use.offset, use.total) for use in self._uses if use.has_any and use.total is not None]
        self.forget()
        return given

    def add_to(self, index: int, start: int, part_N: Tensor) -> None:
        """See `FurtherUses`."""
        stop = start + part_N.numel()
        for use in self._uses:
            if not use.has_any or use.total is None or use.index != index:
                continue
            first, last = max(start, use.offset), min(stop, use.offset + use.total.numel())
            if first < last:
                part_N[first - start : last - start] += use.total[first - use.offset : last - use.offset]

    def drop_strays(self) -> None:
        """See `FurtherUses`."""
        for use in self._uses:
            if use.leaf is not None:
                use.leaf.grad = None

    def forget(self) -> None:
        """See `FurtherUses`."""
        for use in self._uses:
            use.has_any = False

    def buffers(self) -> list[Tensor]:
        """Returns the memory of the sums; not to be written to."""
        return [use.total for use in self._uses if use.total is not None]


def cuts_of(stages: Stages, parts: Cuts) -> Cuts:
    """Returns what became of a rank's parameters, as units ask of them: of those that several stages use, too.

    Args:
        stages: chunks of this rank.
        parts: parameters that an axis has changed, further uses among them.

    Raises:
        ModelError: naming a parameter of which two uses on this rank were cut in different ways.
    """
    found = dict(parts)
    firsts: dict[str, CutParameter | None] = {}
    for tied in sorted(stages.tied, key=lambda tied: tied.chunk):
        own = found.pop(id(tied.param), None)
        if tied.name in firsts:
            if own != firsts[tied.name]:
                raise ModelError(
                    f"model: `{tied.name}` is used in several places, and is not cut alike in all of them",
                    hint=_ALIKE,
                )
            continue
        firsts[tied.name] = own
        users = tuple(sorted({stages.rank_of[chunk] for chunk in tied.chunks}))
        # Also where one stage has all uses: in a unit of its own wherever the model is cut.
        here = EVERYWHERE if own is None else own.placement
        lies = replace(here, stages=users if len(users) > 1 else ())
        found[id(tied.param)] = CutParameter(lies, None if own is None else own.whole, tied.name)
    return found


def check_uses(stages: Stages, cuts: Cuts, mesh: ProcessGroupMesh) -> None:
    """Refuses a parameter that stages use, and have cut in different ways: no sum of its gradients would fit.

    Compares it among the stages, before any rank takes it for what others do not: one all-gather for each set of
    stages that use the same parameters.

    Args:
        stages: chunks of this rank.
        cuts: parameters of this rank that axes have changed.
        mesh: ranks in their stages.

    Raises:
        ModelError: naming the parameters, on every rank of the stages.
    """
    facts: dict[tuple[int, ...], dict[str, object]] = {}
    for tied in stages.tied:
        cut = cuts.get(id(tied.param))
        if cut is not None and cut.placement.stages:
            how = {
                "shape": list(tied.param.shape),
                "cut": str(cut.whole),
                "summed over": cut.placement.summed_over,
                "is_meta": tied.param.is_meta,
                "home": type(home_of(tied.param)).__name__,
            }
            facts.setdefault(cut.placement.stages, {})[tied.name] = how
    for users, own in sorted(facts.items()):  # in one order on all ranks, for a rank may be in several sets
        peers = mesh.spec.peers(mesh.info.rank, mesh.spec.role_axes("pipe"))
        check_agreement(
            {"the parameters that they share": sorted(own.items())},
            mesh.ties_over(users),
            device=mesh.device,
            ranks=[rank for rank in peers if mesh.spec.stage_of(rank) in users],
            whose=f" of stages {' and '.join(map(str, users))}",
        )
