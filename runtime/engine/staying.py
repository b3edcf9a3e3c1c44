"""Which units keep their masters and states on the device, where an optimizer in host memory leaves room for some.

Only whose they are is decided here; where each kind lies is `cut.py`'s and the optimizer's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dsrun.config.config import Config
from dsrun.placement import room_at_ratio, units_that_stay

from ..zero.unit import ParamUnit

#: Says of units that are laid out whether each stays; alike on every rank.
Stays = Callable[[Sequence[ParamUnit]], Sequence[bool]]


def stays_of(settings: Config) -> Stays:
    """Returns what the config says: at least `offload_optimizer.ratio` of the elements leave, see [Note: what stays].

    Args:
        settings: the config, whose optimizer leaves the device.
    """
    ratio = settings.zero_optimization.offload_optimizer.ratio

    def at_ratio(units: Sequence[ParamUnit]) -> Sequence[bool]:
        numels = [unit.layout.shard_numel for unit in units]
        return units_that_stay(numels, [unit.module is not None for unit in units], room_at_ratio(numels, ratio))

    return at_ratio
