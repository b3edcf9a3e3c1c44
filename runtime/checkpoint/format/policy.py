"""How a run wants its checkpoints saved, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePolicy:
    """What the config says of saving.

    Attributes:
        asynchronous: write while training goes on; False: `save_checkpoint` returns when the checkpoint is there.
        later: copy what only updates change behind training, where saves are asynchronous.
        when_busy: what a save does while another is being written: wait for it, or refuse.
        keep_last: see `Publication`.
        keep_every: likewise.
        timeout_s: how long a rank whose part is written waits for the others.
        frozen_by_reference: frozen parameters are written once; later checkpoints refer to that file.
        where_tags_differ: what a save does where ranks were given different tags, see `one_tag`.
    """

    asynchronous: bool = True
    later: bool = False
    when_busy: Literal["wait", "refuse"] = "wait"
    keep_last: int | None = None
    keep_every: int | None = None
    timeout_s: float = 1800.0
    frozen_by_reference: bool = False
    where_tags_differ: Literal["Ignore", "Warn", "Fail"] = "Warn"
