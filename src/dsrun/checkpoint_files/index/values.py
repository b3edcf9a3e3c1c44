"""The values of an index that a run goes on from: each is of its type and in its range, where it is there at all.

What scripts, schedules and optimizers say is theirs, and not looked into.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from .damage import DamageError, a_list, a_number, a_text, an_object, shown

#: Whole numbers by the value that they are members of, and the least of each.
_NUMBERS = {
    "counters": {"micro_steps": 0, "global_steps": 0, "global_samples": 0, "skipped_steps": 0},
    "data": {"epoch": 0, "samples_seen": 0},
    "loss_scale": {"hysteresis": 0, "steps": 0, "last_overflow": -1},
    "mesh": {"tensor": 1},
}


def check_values(values: Mapping[str, Any]) -> None:
    """Refuses what cannot be gone on from.

    Args:
        values: JSON values of an index that are the same for all ranks; see `Index`.

    Raises:
        DamageError: naming the value and its place.
    """
    for name, least in _NUMBERS.items():
        members = _members(values, name, required=name == "counters")
        for key in members.keys() & least.keys():
            a_number(members[key], f"`values.{name}.{key}`", at_least=least[key])
    scale: Any = _members(values, "loss_scale").get("scale", 1.0)
    if type(scale) not in (int, float) or not isfinite(scale) or scale <= 0:
        raise DamageError(f"`values.loss_scale.scale` is {shown(scale)}; expected a finite number above 0")
    optimizer = _members(values, "optimizer", required=True)
    if optimizer.get("type") is not None:  # null where a model alone was imported
        a_text(optimizer["type"], "`values.optimizer.type`")
    for number, group in enumerate(a_list(optimizer.get("groups", []), "`values.optimizer.groups`")):
        an_object(group, f"`values.optimizer.groups`[{number}]")
    for number, entry in enumerate(a_list(optimizer.get("left_out", []), "`values.optimizer.left_out`")):
        place = f"`values.optimizer.left_out`[{number}]"
        a_number(an_object(entry, place).get("missed"), f"`missed` of {place}")
    schedule = _members(values, "scheduler")
    if schedule.get("type") is not None:  # null where another tool's did not say
        a_text(schedule["type"], "`values.scheduler.type`")
    if not isinstance(values.get("frozen", True), bool):
        raise DamageError(f"`values.frozen` is {shown(values['frozen'])}; expected true or false")
    seed: Any = _members(values, "data").get("seed", 0)
    if type(seed) is not int:
        raise DamageError(f"`values.data.seed` is {shown(seed)}; expected a whole number")
    if "latest" in values:  # see [Note: numbers of the latest]
        a_number(values["latest"], "`values.latest`", at_least=1)


def _members(values: Mapping[str, Any], name: str, *, required: bool = False) -> Mapping[str, Any]:
    """Returns the members of a value; none where it is absent, or null and may be."""
    value = values.get(name, {})
    return {} if value is None and not required else an_object(value, f"`values.{name}`")
