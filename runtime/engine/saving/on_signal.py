"""The end of a run that a signal asks to end: it finishes the step, saves, and ends the process.

Which signals those are and how ranks tell each other of them is `stop_signals.py`'s business.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from weakref import ref

from dsrun.checkpoint_files.storage.registry import place_given
from dsrun.checkpoint_files.storage.tags import why_not_saved_to
from dsrun.errors import CheckpointError, InputError

from ...mesh.join.groups import ProcessGroupMesh, leave
from ..progress import Progress
from .run_state import ClientState
from .stop_signals import StopSignals, from_sum, to_number

#: What a shell, and so a launcher, adds to the number of the signal that ended a process.
_EXIT_OF_SIGNALS = 128


class GroupExit:
    """Leaves a mesh's groups at the end of a process that was asked to end, if it is given one.

    The interpreter aborts where a thread of Gloo's still holds a collective, and the exit code would tell of that.
    """

    def __init__(self) -> None:
        self.mesh: ProcessGroupMesh | None = None

    def __call__(self) -> None:
        """To be called at exit."""
        if self.mesh is not None:
            leave(self.mesh)


class SaveOnSignal:
    """Saves a checkpoint and ends the process on a signal; every rank must call each method.

    Args:
        mesh: Ranks, whose groups are left at the end.
        progress: Counters, and the result of the last step.
    """

    def __init__(self, mesh: ProcessGroupMesh, progress: Progress) -> None:
        self._mesh = mesh
        self._progress = progress
        self._signals: StopSignals | None = None
        self._group_exit = GroupExit()
        self._folder: str | os.PathLike[str] = ""
        self._client_state: ClientState | None = None

    def follow(
        self, save_dir: str | os.PathLike[str], signals: Sequence[str], client_state: ClientState | None
    ) -> None:
        """Begins to note signals, see `Engine.save_on_signal`."""
        place = place_given(save_dir, who="save_on_signal: save_dir")
        if isinstance(place, Path) and (reason := why_not_saved_to(place)) is not None:
            raise InputError(f"save_on_signal: {save_dir}: {reason}", hint="name a folder that all ranks can write to")
        self.forget()
        me = ref(self)
        self._signals = StopSignals(signals, is_wanted=lambda: me() is not None)
        self._folder = save_dir
        self._client_state = client_state
        # Now, so that exit handlers of the script, which may talk to other ranks, run before.
        atexit.register(self._group_exit)

    @property
    def is_requested(self) -> bool:
        """Whether a signal has asked this rank to save and end."""
        return self._signals is not None and self._signals.noted is not None

    def forget(self) -> None:
        """Gives the signals back to whom they belonged."""
        if self._signals is not None:
            self._signals.remove()
        self._signals = None

    def request(self) -> float:
        """Returns what this rank tells the others with its next step; 0 where it got no signal."""
        return 0.0 if self._signals is None else to_number(self._signals.noted)

    def end_if_asked(self, save: Callable[..., bool], wait: Callable[[], None]) -> None:
        """Saves and ends where a rank was asked to in the step that has just been finished.

        Args:
            save: `save_checkpoint` of the engine, which a script may have wrapped.
            wait: `wait_for_checkpoint` of the engine.

        Raises:
            SystemExit: with 128 + the signal.
            InputError: this rank was not told where to save.
        """
        last = self._progress.last
        wanted = None if last is None else from_sum(last.sums.stop_request)
        if wanted is None:
            return
        if self._signals is None:
            raise InputError(
                f"save_on_signal: a rank got {wanted.name}, and this one does not know where to save",
                hint="call engine.save_on_signal on every rank, or set `checkpoint.save_on_signal` in the config",
            )
        code = _EXIT_OF_SIGNALS + wanted
        if self._mesh.info.rank == 0:
            steps = self._progress.counters.global_steps
            print(f"dsrun: {wanted.name}: saving after step {steps}, then ending with code {code}", flush=True)
        _end_the_save_before(wait)
        state = self._client_state
        save(self._folder, client_state=state() if callable(state) else state)
        wait()
        self._group_exit.mesh = self._mesh
        raise SystemExit(code)


def _end_the_save_before(wait: Callable[[], None]) -> None:
    """Waits for a save that is under way: this one is wanted, whatever `when_busy` says and became of that."""
    try:
        wait()
    except CheckpointError as error:
        print(error.render(), file=sys.stderr, flush=True)
