"""Where a unit's parameters are when its forward or backward needs them: what hooks ask, and the store that has all.

`SlottedStore`, which gathers them (stage 3), stands in `slotted.py`. No store touches gradients or the optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, Protocol

from torch import Tensor

from ..partition_parameters import ZeroParamStatus
from ..units.unit import ParamUnit


class ParamStore(Protocol):
    """What the hooks ask for.

    Attributes:
        always_there: parameters may be read at any time, `acquire` or not.
        changes: grows whenever parameters get new values.
    """

    always_there: bool
    changes: int

    def acquire(self, unit: ParamUnit, *, evaluating: bool = False) -> None:
        """Returns when the unit's parameters may be read, until `release`. May be nested.

        Args:
            unit: the unit.
            evaluating: the forward has no backward to come, so it says nothing about the order of a training step.
        """
        ...

    def release(self, unit: ParamUnit) -> None:
        """Ends one `acquire`."""
        ...

    def keep(self, units: Sequence[ParamUnit]) -> None:
        """Begins to gather units together, and keeps them where they are until `let_go`: `acquire` gathers none again.

        Args:
            units: units that lie beside one another.
        """
        ...

    def let_go(self, units: Sequence[ParamUnit]) -> None:
        """Ends one `keep`."""
        ...

    def is_there(self, unit: ParamUnit) -> bool:
        """Whether the unit's parameters may be read now, without an `acquire`."""
        ...

    def read(self, unit: ParamUnit, position: int, *, evaluating: bool = False) -> Tensor:
        """Returns the values of a parameter; they stay. May enter an all-gather.

        Args:
            unit: the unit.
            position: position of the parameter in `gathered_params`.
            evaluating: whether no backward comes after this forward; see `acquire`.
        """
        ...

    def invalidate(self) -> None:
        """The trained shards have new values: what was gathered of them before is stale. Every rank must call."""
        ...

    def refresh(self, unit: ParamUnit) -> None:
        """The shard of this unit alone, trained or frozen, has new values; every rank must call."""
        ...

    def set_whole(self, unit: ParamUnit, whole: bool) -> None:
        """Says whether all parameters of a unit have their whole values in memory of their own; on every rank alike.

        Args:
            unit: unit, trained or frozen.
            whole: True: forwards without a gradient read that memory, and enter no collective for the unit.
        """
        ...

    def status(self, unit: ParamUnit) -> ZeroParamStatus:
        """Whether the unit's parameters may be read now."""
        ...

    def stays(self, unit: ParamUnit) -> bool:
        """Whether nothing else ever lies where the unit's parameters are gathered, so they are gathered once a step."""
        ...

    def take_fingerprint(self) -> int:
        """Returns 32 bits that tell apart what was gathered, in order, since they were last taken."""
        ...

    def refuse_order(self, at: str) -> NoReturn:
        """Raises what tells where the ranks' gathers differ, their last fingerprints being different; all must call.

        Args:
            at: the step, for the error.
        """
        ...

    def check_same_order(self) -> None:
        """Takes the fingerprints and refuses where they differ; every rank must call. Steps send them along instead."""
        ...


class ResidentStore:
    """Every rank holds every parameter all the time."""

    always_there = True
    changes = 0

    def acquire(self, unit: ParamUnit, *, evaluating: bool = False) -> None:
        """See `ParamStore`: the last update's values may still be on their way."""
        unit.wait_update()

    def release(self, unit: ParamUnit) -> None:
        """See `ParamStore`: nothing to do."""

    def keep(self, units: Sequence[ParamUnit]) -> None:
        """See `ParamStore`: they are there."""

    def let_go(self, units: Sequence[ParamUnit]) -> None:
        """See `ParamStore`: nothing to do."""

    def is_there(self, unit: ParamUnit) -> bool:
        """See `ParamStore`."""
        return True

    def read(self, unit: ParamUnit, position: int, *, evaluating: bool = False) -> Tensor:
        """See `ParamStore`: the parameter's own memory."""
        unit.wait_update()
        return unit.params[position].detach()

    def invalidate(self) -> None:
        """See `ParamStore`: the publisher writes new values in place."""

    def refresh(self, unit: ParamUnit) -> None:
        """See `ParamStore`: who changes the shard of a unit that is whole changes the whole."""

    def set_whole(self, unit: ParamUnit, whole: bool) -> None:
        """See `ParamStore`: it changes nothing, for forwards enter none anyway."""

    def status(self, unit: ParamUnit) -> ZeroParamStatus:
        """See `ParamStore`: always."""
        return ZeroParamStatus.AVAILABLE

    def stays(self, unit: ParamUnit) -> bool:
        """See `ParamStore`: they are never gathered."""
        return True

    def take_fingerprint(self) -> int:
        """See `ParamStore`: nothing is gathered."""
        return 0

    def refuse_order(self, at: str) -> NoReturn:
        """See `ParamStore`."""
        raise AssertionError(f"nothing was gathered{at}, so nothing can differ")

    def check_same_order(self) -> None:
        """See `ParamStore`: nothing is gathered."""
