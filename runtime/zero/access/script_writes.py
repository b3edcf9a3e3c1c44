"""What scripts write to parameters between the engine's own steps: taken over into masters and slices, or refused.

How writes are seen is `zero/units/write_watch.py`'s business, and what an operation on a released parameter gets
`zero/units/released.py`'s.

[Note: written parameters]
A value that a script writes is what forward reads from then on, and the next update goes on from it, as in plain torch.
Where the parameter is its own master nothing is to be done. Elsewhere the master takes the value, but where rounding
gives it anyway: there it keeps the bits that the parameter has not. That is done when masters are next read or updated,
so a script that writes other weights for a while and puts the old ones back changes nothing.
Every rank is to write the same, as every rank of a plain script does: of ranks that hold parts, each takes its own. The
step refuses where some ranks have written to a parameter and others have not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn
from zlib import crc32

import torch

from dsrun.errors import ModelError
from dsrun.units import format_names

from ...mesh.collectives import Collectives
from ..partition_parameters import ZeroParamStatus, home_of, memory_of
from ..units.unit import ParamUnit
from .pieces import Pieces, UnitHome


class ScriptWrites:
    """See [Note: written parameters].

    Args:
        units: all units, of frozen parameters too.
        pieces: reader and writer of the parameters' slices and masters.
        device: device of the parameters.
        settle: function that returns when no update works on masters, and nothing has been computed ahead of them.
        is_put_away: masters are in host memory for a while, and must not be touched.
    """

    def __init__(
        self,
        units: Sequence[ParamUnit],
        pieces: Pieces,
        *,
        device: torch.device,
        settle: Callable[[], None],
        is_put_away: Callable[[], bool],
    ) -> None:
        self._units = units
        self._pieces = pieces
        self._collectives: Collectives = pieces.collectives
        self._device = device
        self._settle = settle
        self._is_put_away = is_put_away
        self._due: dict[int, UnitHome] = {}  # masters that lack what forward reads, by the parameter's number
        self._written: set[int] = set()  # parameters written to since the last step, likewise
        self._compared: set[int] = set()
        for unit in units:
            unit.on_write = self.take_from_slot if pieces.plan.shard_parameters else None

    def note(self, home: UnitHome) -> None:
        """What forward reads of a parameter has been written, and its master has not.

        Raises:
            ModelError: other pipeline stages use the parameter, and have not been given the value.
        """
        refuse_tied(home, "model")
        self._written.add(home.number)
        self._due[home.number] = home

    def take_from_slot(self, unit: ParamUnit, positions: Sequence[int]) -> None:
        """A forward has written to parameters of its own unit, where they are gathered; every rank must call.

        Args:
            unit: unit that is still gathered.
            positions: positions in the unit of the parameters that were written to.
        """
        for position in positions:
            home = home_of(unit.params[position])
            if isinstance(home, UnitHome) and home.full is None and home.bring_back():
                self._pieces.write_slice(home, memory_of(home.param))
                self.note(home)

    def look(self, homes: Sequence[UnitHome]) -> list[UnitHome]:
        """Returns those parameters that were written to where they lie since the last look, and notes them."""
        numbers = {home.number for home in homes}
        units = {home.unit.index: home.unit for home in homes if home.unit is not None}
        return [home for home in self._look(list(units.values())) if home.number in numbers]

    def are_due(self) -> bool:
        """Looks at what was written, and returns whether masters lack any of it.

        Raises:
            ModelError: a sharded parameter was written to by an alias of the memory it had in a forward.
        """
        self._look(self._units)
        return bool(self._due)

    def take_over(self) -> None:
        """Gives masters what scripts have written to their parameters. Enters no collective.

        Raises:
            ModelError: a sharded parameter was written to by an alias of the memory it had in a forward.
        """
        if not self.are_due() or self._is_put_away():
            return
        due, self._due = list(self._due.values()), {}
        self._settle()
        for home in due:
            self._pieces.adopt(home)

    def _look(self, units: Sequence[ParamUnit]) -> list[UnitHome]:
        found: list[UnitHome] = []
        for unit in units:
            for position in unit.writes.take():
                home = home_of(unit.params[position])
                if not isinstance(home, UnitHome) or home.full is not None:
                    continue  # what is open has memory of its own
                if not self._pieces.plan.shard_parameters:
                    self.note(home)
                elif self._pieces.store.status(unit) is ZeroParamStatus.AVAILABLE:
                    self.take_from_slot(unit, [position])
                else:
                    _refuse_alias(home)
                found.append(home)
        return found

    def take_mark(self) -> int:
        """Returns 32 bits that tell apart which parameters were written to since they were last taken; 0 for none."""
        self._compared, self._written = self._written, set()
        return crc32(repr(sorted(self._compared)).encode()) if self._compared else 0

    def refuse_differences(self, at: str) -> None:
        """Raises on every rank where ranks have written to different parameters; every rank must call.

        Enters an all-reduce of one byte a parameter.

        Args:
            at: text that names the step, for the error message.

        Raises:
            ModelError: naming the first of them.
        """
        homes = [home for unit in self._units for param in unit.params if isinstance(home := home_of(param), UnitHome)]
        mine = torch.tensor([home.number in self._compared for home in homes], dtype=torch.uint8, device=self._device)
        bounds = torch.cat([mine, 1 - mine])
        self._collectives.all_reduce(bounds, op="max", label="written parameters").wait()
        with self._collectives.reading("written parameters"):
            differ = torch.mul(*bounds.chunk(2)).tolist()
        names = [home.name for home, differs in zip(homes, differ, strict=True) if differs]
        if names:
            raise ModelError(
                f"model: {format_names(names, 1)} {'were' if names[1:] else 'was'} written to on some ranks{at} and "
                "not on others, so the ranks have no common model",
                hint="write the same on every rank, or inside dsrun.zero.GatheredParameters with modifier_rank",
            )


def refuse_tied(home: UnitHome, who: str) -> None:
    """Refuses a new value that the ranks of one pipeline stage get of a parameter which others use too.

    Raises:
        ModelError: naming the parameter and the stages.
    """
    stages = () if home.unit is None else home.unit.placement.stages
    if stages:
        raise ModelError(
            f"{who}: `{home.name}` is written to, and pipeline stages {' and '.join(map(str, stages))} use it",
            hint="engine.load_module_state_dict gives all stages the new value; or write to it before dsrun.initialize",
        )


def _refuse_alias(home: UnitHome) -> NoReturn:
    raise ModelError(
        f"model: `{home.name}` was written to by an alias of the memory that it had in its forward, where stage 3 has "
        "other parameters by now",
        hint="write to the parameter itself, under torch.no_grad(), or inside dsrun.zero.GatheredParameters with "
        "modifier_rank",
    )
