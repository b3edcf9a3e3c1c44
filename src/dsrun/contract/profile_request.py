"""Which optimizer steps of which ranks are profiled: asked for by the launcher, read by the ranks. Profiles nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from dsrun.contract.environment import PROFILE_ENV
from dsrun.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """Steps to profile.

    Attributes:
        first: First step, counted from 1.
        last: Last step.
        ranks: Ranks that profile, in order; None for all.
        memory: Whether each allocation is traced too.
        stacks: Whether each operation has its Python stack.
        shapes: Whether each operation has the shapes of its inputs.
    """

    first: int
    last: int
    ranks: tuple[int, ...] | None = (0,)
    memory: bool = False
    stacks: bool = False
    shapes: bool = False

    def has(self, rank: int) -> bool:
        """Whether a rank profiles."""
        return self.ranks is None or rank in self.ranks

    @property
    def steps_text(self) -> str:
        """Returns `step 3` or `steps 10 to 13`."""
        return f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"

    def to_env(self) -> dict[str, str]:
        """Returns the variable by which ranks are told."""
        return {PROFILE_ENV: json.dumps(asdict(self), separators=(",", ":"))}


def profile_request(environ: Mapping[str, str] | None = None) -> ProfileRequest | None:
    """Returns what this job's ranks are to profile; None where nothing is.

    Raises:
        InputError: the variable holds no such request.
    """
    text = (os.environ if environ is None else environ).get(PROFILE_ENV)
    if not text:
        return None
    try:
        fields = json.loads(text)
        ranks = fields.pop("ranks")
        return ProfileRequest(**fields, ranks=None if ranks is None else tuple(ranks))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(
            f"environment: {PROFILE_ENV} is {text[:200]!r}, which is no request",
            hint="`dsrun run --profile steps=10:13` sets it",
        ) from error
