"""Which trackers are to be given a run's scalars: as the launcher reads it from a config, and as rank 0 records it.

A config that a program made is known to the ranks alone, and trackers are fed outside of them: rank 0 records what the
config says, and the front end starts the trackers. Knows no tracker.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: Event of the trackers that a config names, written before the first step. Field: `monitors`, an object for each.
MONITORS_EVENT = "monitors"

_PASSWORD_IN_URL = re.compile(r"\b[A-Za-z][A-Za-z0-9+.-]*://[^\s/@]*:[^\s/@]+@")
#: Keys of sections whose values are secrets.
SECRET_KEYS = frozenset({"api_key"})


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorSettings:
    """One tracker that is switched on.

    Attributes:
        name: Name of its section of the config.
        options: Values of the section's other keys.
        with_timers: Whether it gets the seconds of forward, backward and step by DeepSpeed's names.
        left_out: Keys whose values are secrets, and were not recorded.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    with_timers: bool = False
    left_out: tuple[str, ...] = ()

    def without_secrets(self) -> MonitorSettings:
        """Returns the same without values that are secrets: keys of accounts, addresses with a password."""
        secret = {name for name, value in self.options.items() if value is not None and is_secret(name, value)}
        return MonitorSettings(
            name=self.name,
            options={name: value for name, value in self.options.items() if name not in secret},
            with_timers=self.with_timers,
            left_out=tuple(sorted({*self.left_out, *secret})),
        )

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON values."""
        return {
            "name": self.name,
            "options": dict(self.options),
            "with_timers": self.with_timers,
            "left_out": list(self.left_out),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> MonitorSettings:
        """Reads what `to_json` wrote.

        Raises:
            KeyError: a field is missing.
        """
        return cls(
            name=value["name"],
            options=value["options"],
            with_timers=bool(value.get("with_timers")),
            left_out=tuple(value.get("left_out", ())),
        )


def monitors_fields(monitors: Sequence[MonitorSettings]) -> dict[str, Any]:
    """Returns the fields of the record, without secrets.

    Args:
        monitors: Trackers that are switched on.
    """
    return {"monitors": [each.without_secrets().to_json() for each in monitors]}


def read_monitors(record: Mapping[str, Any]) -> list[MonitorSettings]:
    """Reads a record of trackers.

    Raises:
        KeyError: a field is missing.
    """
    return [MonitorSettings.from_json(each) for each in record["monitors"]]


def is_secret(name: str, value: object) -> bool:
    """Whether a value of a tracker's section is to be shown nowhere: the key of an account, an address with a password.

    Args:
        name: Name of the key.
        value: Value of the key.
    """
    return name in SECRET_KEYS or (isinstance(value, str) and _PASSWORD_IN_URL.search(value) is not None)
