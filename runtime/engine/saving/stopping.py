"""What an engine does when a signal asks its run to end: it finishes the step, saves, and ends the process.

Which signals those are and how ranks tell each other of them is `stop_signals.py`'s business.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import ref

from dsrun.checkpoint_files.storage.registry import place_given
from dsrun.checkpoint_files.storage.tags import why_not_saved_to
from dsrun.errors import CheckpointError, InputError

from ...mesh.join.groups import ProcessGroupMesh, leave
from ..parts import EngineParts
from ..state import Counters
from ..step import StepResult
from .stop_signals import StopSignals, from_sum, to_number

#: What a shell, and so a launcher, adds to the number of the signal that ended a process.
_EXIT_OF_SIGNALS = 128

ClientState = Mapping[str, Any] | Callable[[], Mapping[str, Any]]


class Departure:
    """Leaves a mesh's groups at the end of a process that was asked to end, if it is given one.

    The interpreter aborts where a thread of Gloo's still holds a collective, and the exit code would tell of that.
    """

    def __init__(self) -> None:
        self.mesh: ProcessGroupMesh | None = None

    def __call__(self) -> None:
        """To be called at exit."""
        if self.mesh is not None:
            leave(self.mesh)


class Stopping:
    """Saves a checkpoint on a signal; every rank must call each method."""

    _parts: EngineParts
    _counters: Counters
    _last: StepResult | None
    _stop: StopSignals | None
    _at_stop: Departure
    _stop_folder: str | os.PathLike[str]
    _stop_client_state: ClientState | None
    save_checkpoint: Callable[..., bool]
    wait_for_checkpoint: Callable[[], None]

    def save_on_signal(
        self,
        save_dir: str | os.PathLike[str],
        signals: Sequence[str] = ("SIGTERM",),
        *,
        client_state: ClientState | None = None,
    ) -> None:
        """Has the run save a checkpoint and end where one of its ranks gets a signal; goes before the config's.

        The optimizer step that is under way is finished on all ranks, and `engine.step()` then saves in `save_dir`,
        with the tag `global_step<N>`, and raises SystemExit with 128 + the signal's number: 143 for SIGTERM. So a
        launcher's grace (`dsrun run --grace`) has to cover a step and a checkpoint. A signal that comes 3 s after the
        first one, or later, does what it did before this call: SIGTERM ends the process at once.

        Args:
            save_dir: checkpoint folder, shared by all ranks, or an address such as `s3://bucket/run`.
            signals: which ones: SIGTERM, SIGUSR1, SIGUSR2.
            client_state: JSON values that `load_checkpoint` returns; or a function that returns them when it is time.

        Raises:
            InputError: `save_dir` is None, empty, no address, or no folder that this rank could write to; a signal is
                none of the three, or this is not the main thread.
        """
        place = place_given(save_dir, who="save_on_signal: save_dir")
        if isinstance(place, Path) and (why := why_not_saved_to(place)) is not None:
            raise InputError(f"save_on_signal: {save_dir}: {why}", hint="name a folder that all ranks can write to")
        self._forget_signals()
        me = ref(self)
        self._stop = StopSignals(signals, is_wanted=lambda: me() is not None)
        self._stop_folder = save_dir
        self._stop_client_state = client_state
        # Now, so that exit handlers of the script, which may talk to other ranks, run before.
        atexit.register(self._at_stop)

    @property
    def stop_requested(self) -> bool:
        """Whether a signal has asked this rank to save and end, say to leave a long evaluation; others may not know."""
        return self._stop is not None and self._stop.noted is not None

    def _forget_signals(self) -> None:
        """Gives the signals back to whom they belonged."""
        if self._stop is not None:
            self._stop.remove()
        self._stop = None

    def _wish(self) -> float:
        """What this rank tells the others with its next step."""
        return 0.0 if self._stop is None else to_number(self._stop.noted)

    def _end_if_asked(self) -> None:
        """Saves and ends where a rank wished it in the step that has just been finished.

        Raises:
            SystemExit: with 128 + the signal.
            InputError: this rank was not told where to save.
        """
        wanted = None if self._last is None else from_sum(self._last.wish)
        if wanted is None:
            return
        if self._stop is None:
            raise InputError(
                f"save_on_signal: a rank got {wanted.name}, and this one does not know where to save",
                hint="call engine.save_on_signal on every rank, or set `checkpoint.save_on_signal` in the config",
            )
        code = _EXIT_OF_SIGNALS + wanted
        if self._parts.mesh.info.rank == 0:
            steps = self._counters.global_steps
            print(f"dsrun: {wanted.name}: saving after step {steps}, then ending with code {code}", flush=True)
        self._end_the_save_before()
        state = self._stop_client_state
        self.save_checkpoint(self._stop_folder, client_state=state() if callable(state) else state)
        self.wait_for_checkpoint()
        self._at_stop.mesh = self._parts.mesh
        raise SystemExit(code)

    def _end_the_save_before(self) -> None:
        """Waits for a save that is under way: this one is wanted, whatever `when_busy` says and became of that."""
        try:
            self.wait_for_checkpoint()
        except CheckpointError as error:
            print(error.render(), file=sys.stderr, flush=True)
