"""Access to an engine's parameters from outside of forward and backward: made whole, and written back to their masters.

Pieces are `pieces.py`'s business, `safe_get_*` and `safe_set_*` those of `fragments.py`, and what a forward gathers
that of `zero/params/store.py`.

[Note: what a gather moves] If all parameters of a unit are asked for, its flat buffer is gathered at once: one
all-gather of `padded_numel` elements. Else each parameter alone: its pieces are broadcast by the ranks that own them,
`numel` elements in as many calls as ranks have a piece, mostly one or two. Where parameters are whole anyway nothing is
moved.

[Note: modifiers of parts]
A parameter that is cut over ranks is local: a context gathers the part that this rank has, over the ranks that have the
same part, and its shape is the part's. `modifier_rank` counts these ranks, so there is a modifier for each part, as in
DeepSpeed: with 0, all ranks of the first replica of the model. A script that writes on rank 0 alone would mix new parts
and old ones; so either all modifiers of a parameter have written to it, or no rank has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from dsrun.errors import ModelError
from dsrun.units import format_names

from ...compat import in_backward
from ...layout.cuts import EVERYWHERE, RankPlacement
from ...mesh.collectives import Collectives, Pending
from ...optim.sharded import ShardOptimizer
from ...protocols import ChangeFence
from ..grads.reducer import GradReducer
from ..params.store import ParamStore
from ..partition_parameters import (
    EngineParameter,
    OwnerGroup,
    ShardedParameter,
    UncutParameter,
    check_modifier,
    home_of,
    memory_of,
    set_memory,
    settle,
)
from ..units.plan import ZeroPlan
from ..units.released import ReleasedParameter
from ..units.tier import gather
from ..units.unit import ParamUnit
from ..units.write_watch import version_of
from .pieces import Pieces, UnitHome
from .script_writes import ScriptWrites, refuse_tied
from .torn import TornState


class ParamAccess(OwnerGroup):
    """Makes an engine's parameters whole and takes new values over.

    Args:
        units: all units, of frozen parameters too.
        plan: plan of what is sharded.
        collectives: ranks that have the same units.
        device: device of the parameters.
        store: parameter store, which knows where a unit is, and is told of new values.
        reducer: gradient reducer, which knows whether there are gradients.
        optimizer: sharded optimizer, which has the states.
        running: function that returns a unit that is inside its forward now; None where none is.
        read_released: function that returns the values of a parameter that is not gathered, with a gradient.
        settle: function that returns when no update works on masters, and nothing has been computed ahead of them.
        fence: fence that keeps state unchanged while a checkpoint copies it; None where nothing does.
        compares: refuse what is written in a `GatheredParameters` without `modifier_rank`, on every rank at once.

    Attributes:
        torn: record of the parts of the engine's state that a failed load has left part old, part new.
        told_of_parts: a script has been told that a state dict has parts of parameters.
        elsewhere: names of tensors that other pipeline stages have.
        loading: ranks that take values by name together: all that have a part of the model.
    """

    def __init__(
        self,
        units: Sequence[ParamUnit],
        plan: ZeroPlan,
        collectives: Collectives,
        *,
        device: torch.device,
        store: ParamStore,
        reducer: GradReducer,
        optimizer: ShardOptimizer,
        running: Callable[[], ParamUnit | None],
        read_released: Callable[[nn.Parameter], Tensor],
        settle: Callable[[], None],
        fence: ChangeFence | None = None,
        compares: bool = False,
    ) -> None:
        self.units = units
        self._compares = compares
        self.device = device
        self.pieces = Pieces(plan, collectives, store, fence)
        self.elsewhere: Collection[str] = frozenset()
        self.loading = collectives
        self.reducer = reducer
        self.optimizer = optimizer
        self._running = running
        self.torn = TornState()
        self.told_of_parts = False
        self._read_released = read_released
        self.writes = ScriptWrites(
            units, self.pieces, device=device, settle=settle, is_put_away=lambda: optimizer.put_away
        )

    @property
    def world_size(self) -> int:
        """See `OwnerGroup`."""
        return self.pieces.collectives.size

    def settle(self, model: nn.Module) -> None:
        """Gives every parameter of the model its home here."""
        places = {
            id(param): (unit, extent)
            for unit in self.units
            for param, extent in zip(unit.params, unit.layout.extents, strict=True)
        }
        for number, (name, param) in enumerate(model.named_parameters()):
            unit, extent = places.get(id(param), (None, None))
            home = UnitHome(self, param, number=number, name=name, unit=unit, extent=extent)
            kind = self._class_in(unit)
            settle(param, home, sharded=issubclass(kind, ShardedParameter), kind=kind)
        for unit in self.units:
            unit.shown = [param for param in unit.gathered_params if isinstance(param, EngineParameter)]
            unit.writes.skip()

    def _class_in(self, unit: ParamUnit | None) -> type[nn.Parameter]:
        """Returns the class of a unit's parameters, while it is not in use; None: of parameters in no unit."""
        if self.pieces.plan.shard_parameters:
            return UncutParameter if unit is None else ReleasedParameter
        if unit is None:
            return nn.Parameter
        # Where parameters are the masters, what is written to them needs nobody's help; but of parts it is to be known
        # whether they were written to.
        own = unit.shard if self.pieces.plan.shard_optimizer else unit.flat_param
        is_master = unit.master.data_ptr() == own.data_ptr()
        return nn.Parameter if is_master and not unit.placement.cut_over else EngineParameter

    # Released parameters ----------------------------------------------------------------------------------------------

    def read(self, home: UnitHome) -> Tensor:
        """See `ParameterOwner.read`: a broadcast for each piece, or an all-gather of its unit where torch records."""
        if torch.is_grad_enabled() and home.param.requires_grad and not torch.is_inference_mode_enabled():
            return self._read_released(home.param)
        with torch.inference_mode(mode=False), torch.no_grad():  # changes of a tensor of inference mode are not counted
            return self.pieces.whole(home)

    def write(self, home: UnitHome, value: Tensor) -> None:
        """See `ParameterOwner.write`."""
        assert home.unit is not None, "a parameter in no unit is whole on every rank"
        if home.unit.trains:  # frozen ones have no states
            self.check_states(f"a write to `{home.name}`")
        with torch.no_grad():
            self.pieces.write_slice(home, value)
        self.writes.note(home)
        torch.autograd.graph.increment_version(home.param)  # graphs that have saved it are refused, as everywhere
        home.unit.writes.skip_one(home.position)

    def set_exactly(self, home: UnitHome, value: Tensor) -> None:
        """Takes a new master over, and what forward reads of it; every rank must call with the same one."""
        self.check_states(f"a write to `{home.name}`")
        self.pieces.write(home, value, exact=True)
        assert home.unit is not None, "a parameter in no unit has no master"
        self.pieces.publish([home.unit])

    # Whole for a while ------------------------------------------------------------------------------------------------

    def check_modifier(self, homes: Sequence[UnitHome], source: int) -> None:
        """See `OwnerGroup`, and [Note: modifiers of parts].

        Raises:
            ModelError: there is no such rank, or it is another one for some of the parameters than for others.
        """
        parts, rest = [home for home in homes if _is_cut(home)], [home for home in homes if not _is_cut(home)]
        if parts and rest and source:
            raise ModelError(
                f"GatheredParameters: modifier_rank is {source}; it counts the ranks that have the same elements, and "
                f"these are other ranks for `{parts[0].name}`, which is cut over "
                f"{' and '.join(_placement(parts[0]).cut_over)}, than for `{rest[0].name}`",
                hint="open the two in contexts of their own, or pass modifier_rank=0",
            )
        check_modifier(source, min((self._ranks_of(home).size for home in homes), default=self.world_size))

    def open(self, homes: Sequence[UnitHome], *, writes: bool) -> None:
        """See `OwnerGroup`, and [Note: what a gather moves].

        Raises:
            ModelError: inside a forward or a backward, whose values are not to be moved under its feet; or one rank's
                values are to be all ranks', and those are not all that have the parameter.
        """
        self.check_quiet("GatheredParameters")
        for home in homes if writes else ():
            refuse_tied(home, "GatheredParameters")
        settle_all(homes)
        self.writes.are_due()
        if writes:
            self.writes.take_over()
            self.check_states("GatheredParameters")
            self.pieces.before_change()
        wanted = [home for home in homes if home.full is None and (writes or self._is_elsewhere(home))]
        for home in homes:
            home.opened += 1
            home.writers += writes
        by_unit: dict[int, list[UnitHome]] = {}
        for home in wanted:
            by_unit.setdefault(-1 if home.unit is None else home.unit.index, []).append(home)
        pending: list[Pending] = []
        # Ranks of different stages meet in the gathers of what they share.
        for group in sorted(by_unit.values(), key=_meeting_order):
            pending += self._fetch(group)
        for work in pending:
            work.wait()
        for home in wanted:
            assert home.full is not None, "fetched just now"
            home.resident = memory_of(home.param)
            set_memory(home.param, home.full)
            home.version = version_of(home.param)
        self._note_whole(wanted)

    def close(self, homes: Sequence[UnitHome], *, source: int | None, failed: bool) -> None:
        """See `OwnerGroup`. With a source: an all-reduce of one number, and a broadcast of what was gathered as one.

        Raises:
            ModelError: a parameter was given another shape, or without a source another dtype; on the rank where that
                is so.
        """
        changed: list[tuple[UnitHome, Callable[[], None] | None]] = []
        if source is None and not self.pieces.plan.shard_parameters:
            changed += [(home, None) for home in self.writes.look(homes)]
        try:
            if source is not None:
                self._take_over([home for home in homes if home.full is not None], source, failed=failed)
        finally:
            for home in homes:
                home.opened -= 1
                home.writers -= source is not None
                if not home.opened and home.full is not None:
                    assert home.resident is not None, "it was left when the parameter was opened"
                    now = memory_of(home.param)
                    moved = now.data_ptr() != home.full.data_ptr() or now.shape != home.full.shape
                    if source is None and (moved or version_of(home.param) != home.version):
                        changed.append((home, partial(home.replace if moved else home.write, now)))
                    set_memory(home.param, home.resident)
                    home.full = home.flat = home.resident = None
                    if home.unit is not None:
                        home.unit.writes.skip_one(home.position)
            self._note_whole(homes)
        if self._compares:
            self._refuse_unannounced(homes, {home.number for home, _ in changed})
        for _, write in [] if failed else changed:
            if write is not None:
                write()

    def check_quiet(self, who: str) -> None:
        """Raises inside a forward or a backward.

        Raises:
            ModelError: naming `who` was called, and the unit that is in use.
        """
        unit = self._running()
        if unit is not None or in_backward():
            where = "a backward" if unit is None else f"the forward of `{unit.name}`"
            raise ModelError(
                f"{who}: called inside {where}, which reads the parameters",
                hint="call it before the forward or after engine.backward; a forward gathers what it needs itself",
            )

    def check_states(self, who: str) -> None:
        """Raises where masters and states have been put away.

        Raises:
            ModelError: naming `who` was called.
        """
        if self.optimizer.put_away:
            raise ModelError(
                f"{who}: states are in host memory since engine.offload_states()",
                hint="call engine.reload_states() first",
            )

    def check_closed(self, home: UnitHome, who: str) -> None:
        """Raises where a new value would not last.

        Raises:
            ModelError: inside a forward or a backward, or the parameter is open with memory of its own.
        """
        self.check_quiet(who)
        settle_all([home])
        self.check_states(who)
        if home.full is not None:
            raise ModelError(
                f"{who}: `{home.name}` is open in a GatheredParameters, whose values would replace the new one",
                hint="leave the context first, or write to the parameter inside it with modifier_rank",
            )

    def _refuse_unannounced(self, homes: Sequence[UnitHome], changed: Collection[int]) -> None:
        """Enters an all-reduce of one byte a parameter that was open.

        Raises:
            ModelError: a rank has written to a parameter that no rank was named for; on every rank.
        """
        written = torch.tensor([home.number in changed for home in homes], dtype=torch.uint8, device=self.device)
        self.pieces.collectives.all_reduce(written, op="max", label="GatheredParameters changes").wait()
        with self.pieces.collectives.reading("GatheredParameters changes"):
            names = [home.name for home, one in zip(homes, written.tolist(), strict=True) if one]
        if names:
            raise ModelError(
                f"GatheredParameters: {format_names(names, 1)} written to without a modifier_rank",
                hint="name the rank whose values all take over: GatheredParameters(params, modifier_rank=0)",
            )

    def _note_whole(self, homes: Sequence[UnitHome]) -> None:
        """Tells the store which units forwards can read where they have been opened."""
        for unit in {home.unit.index: home.unit for home in homes if home.unit is not None}.values():
            opened = (home_of(param) for param in unit.params)
            self.pieces.store.set_whole(
                unit, all(isinstance(home, UnitHome) and home.full is not None for home in opened)
            )

    def _is_elsewhere(self, home: UnitHome) -> bool:
        return home.unit is not None and self.pieces.plan.shard_parameters

    def _fetch(self, homes: list[UnitHome]) -> list[Pending]:
        """Gives parameters of one unit, or frozen ones, memory of their own with their whole values."""
        unit = homes[0].unit
        if unit is None or not self.pieces.plan.shard_parameters:
            for home in homes:
                home.full = home.param.detach().clone(memory_format=torch.contiguous_format)
            return []
        if len(homes) == len(unit.params):
            flat = torch.empty(unit.layout.padded_numel, dtype=unit.dtype, device=self.device)
            views = dict(zip(map(id, unit.params), unit.views(flat), strict=True))
            for home in homes:
                home.flat, home.full = flat, views[id(home.param)]
            return [gather(unit, flat)]
        if unit.tier is not None:
            unit.tier.settle()
        pending: list[Pending] = []
        for home in homes:
            piece = self.pieces.own_piece(home, unit.shard, start=self.pieces.shard_start(unit))
            home.full, works = self.pieces.assemble(home, None if piece is None else piece[1], dtype=unit.dtype)
            pending += works
        return pending

    def _take_over(self, homes: list[UnitHome], source: int, *, failed: bool) -> None:
        reshaped = [home for home in homes if home.full is not None and home.param.shape != home.full.shape]
        parts = [home for home in homes if _is_cut(home)]
        written = [_is_written(home) for home in parts]
        left = [self._ranks_of(home).rank == source and not one for home, one in zip(parts, written, strict=True)]
        outcome = torch.tensor([int(failed or bool(reshaped)), *written, *left], dtype=torch.int64, device=self.device)
        self.pieces.collectives.all_reduce(outcome, op="max", label="GatheredParameters outcome").wait()
        if reshaped and not failed:
            home = reshaped[0]
            assert home.full is not None, "chosen so"
            raise ModelError(
                f"GatheredParameters: `{home.name}` was given the shape {tuple(home.param.shape)}; "
                f"it is {tuple(home.full.shape)}",
                hint="change shapes before dsrun.initialize",
            )
        with self.pieces.collectives.reading("GatheredParameters outcome"):
            others_gave_up, *told = outcome.tolist()
        if others_gave_up:
            return
        self._refuse_mixed(parts, told)
        for home in homes:
            assert home.full is not None, "chosen so"
            if home.param.data_ptr() != home.full.data_ptr():  # the script has set `.data`
                home.full.copy_(home.param.detach())
        pending = [
            ranks.broadcast(buffer, source=source, label="modified parameters")
            for ranks, of_ranks in self._by_ranks(homes)
            for buffer in _buffers_of(of_ranks)
        ]
        for work in pending:
            work.wait()
        for home in homes:
            assert home.full is not None, "chosen so"
            if home.unit is not None:
                self.pieces.write(home, home.full, exact=False)
            elif home.resident is not None:
                home.resident.copy_(home.full)
        self.pieces.publish(list({home.unit.index: home.unit for home in homes if home.unit is not None}.values()))

    def _refuse_mixed(self, parts: Sequence[UnitHome], told: Sequence[int]) -> None:
        """Refuses values of which some parts would be new and others old, see [Note: modifiers of parts].

        Args:
            parts: parameters of which ranks have parts.
            told: for each of them whether any rank has written to it; then whether a modifier has not.

        Raises:
            ModelError: naming the first of them; on every rank.
        """
        wrote, left = told[: len(parts)], told[len(parts) :]
        mixed = [home for home, *both in zip(parts, wrote, left, strict=True) if all(both)]
        if mixed:
            names = format_names([home.name for home in mixed], 1)
            raise ModelError(
                f"GatheredParameters: {names} cut over {' and '.join(_placement(mixed[0]).cut_over)}, "
                "and not each part was written to by its modifier, so old parts and new ones would be mixed",
                hint="modifier_rank=0 names the first of the ranks that have the same part, which there is for each "
                "part: write on all of these, or set the parts with dsrun.utils.safe_set_full_fp32_param",
            )

    def _ranks_of(self, home: UnitHome) -> Collectives:
        """Returns the ranks that a modifier of a parameter gives its values to: those that have the same elements."""
        assert home.unit is not None or not _is_cut(home), "what is in no unit is whole"
        return home.unit.replicas if home.unit is not None and _is_cut(home) else self.pieces.collectives

    def _by_ranks(self, homes: Sequence[UnitHome]) -> list[tuple[Collectives, list[UnitHome]]]:
        """Returns parameters by the ranks that have the same elements, in one order on every rank."""
        found: dict[tuple[str, ...], tuple[Collectives, list[UnitHome]]] = {}
        for home in homes:
            found.setdefault(_placement(home).cut_over, (self._ranks_of(home), []))[1].append(home)
        return list(found.values())


def _placement(home: UnitHome) -> RankPlacement:
    return EVERYWHERE if home.unit is None else home.unit.placement


def _is_cut(home: UnitHome) -> bool:
    return bool(_placement(home).cut_over)


def _is_written(home: UnitHome) -> bool:
    """Whether a script has written to an open parameter on this rank."""
    assert home.full is not None, "the parameter is open"
    assert home.unit is not None, "a parameter in no unit has no position in one"
    moved = memory_of(home.param).data_ptr() != home.full.data_ptr()
    return moved or home.unit.writes.has_changed(home.position, since=home.version)


def settle_all(homes: Sequence[UnitHome]) -> None:
    """Returns when no update works on these parameters, their masters or states any more."""
    for home in homes:
        if home.unit is not None:
            home.unit.settle()


def _buffers_of(homes: Sequence[UnitHome]) -> list[Tensor]:
    """Returns flat memory that holds the open parameters: a unit's buffer where all of it is in it."""
    by_buffer: dict[int, list[UnitHome]] = {}
    alone: list[Tensor] = []
    for home in homes:
        assert home.full is not None, "the parameters are open"
        if home.flat is None:
            alone.append(home.full.view(-1))
        else:
            by_buffer.setdefault(id(home.flat), []).append(home)
    buffers: list[Tensor] = []
    for group in by_buffer.values():
        flat, unit = group[0].flat, group[0].unit
        assert flat is not None, "grouped by it"
        assert unit is not None, "frozen parameters share no buffer"
        pieces = [home.full.view(-1) for home in group if home.full is not None]
        buffers += [flat] if len(group) == len(unit.params) else pieces
    return [buffer for buffer in chain(buffers, alone) if buffer.numel()]


def _meeting_order(homes: Sequence[UnitHome]) -> tuple[bool, str]:
    """Returns the place of a unit's parameters; those in no unit go first."""
    unit = homes[0].unit
    return (False, "") if unit is None else unit.meeting_order
