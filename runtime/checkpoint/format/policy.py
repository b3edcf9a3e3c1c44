"""How a run wants its checkpoints saved, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePolicy:
    """What the config says of saving.

    Attributes:
        asynchronous: whether to write while training goes on; if not, `save_checkpoint` returns when the checkpoint is
            complete.
        later: copy what only updates change behind training, where saves are asynchronous.
        when_busy: reaction of a save to another one that is still being written: `wait` for it, or `refuse`.
        keep_last: number of the newest `global_step<N>` checkpoints to keep; None for all; see `Publication`.
        keep_every: step interval: checkpoints `global_step<N>` with a multiple of it as N are always kept; None for
            none; see `Publication`.
        timeout_s: seconds that a rank waits for the others after it has written its part.
        frozen_by_reference: frozen parameters are written once; later checkpoints refer to that file.
        where_tags_differ: reaction of a save to ranks that were given different tags: `Ignore`, `Warn` or `Fail`; see
            `one_tag`.
    """

    asynchronous: bool = True
    later: bool = False
    when_busy: Literal["wait", "refuse"] = "wait"
    keep_last: int | None = None
    keep_every: int | None = None
    timeout_s: float = 1800.0
    frozen_by_reference: bool = False
    where_tags_differ: Literal["Ignore", "Warn", "Fail"] = "Warn"
