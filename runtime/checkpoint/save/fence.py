"""Between who copies state for a checkpoint and who changes it: unit by unit, the change waits for the copy.

Knows numbers of units, and no tensors. Who changes what, and so waits where, stands in [Note: who changes state].

[Note: who changes state]
What a save copies behind training (`checkpoint.when_copied`), or has read from a drive, is the state of one moment.
Until its copy is done it is changed by nobody:
- the optimizer's step waits: in host memory for each unit (`offload/step/cpu_optimizer.py`), on the device for all,
which
  torch steps in one go (`optim/sharded.py`); so does who sets masters or states: `safe_set_*`, `GatheredParameters`,
  `load_module_state_dict` (`zero/access/pieces.py`), and who moves them (`offload_states`);
- another load or save, and `destroy`, wait for the save as a whole;
- counters, rates, the loss scale, random numbers, positions in the data and buffers are copied at once;
- a script that writes to a parameter by itself waits for nobody, whether its engine is still there or not. Where it
  goes through the parameter, torch counts it, and the save fails; where it goes through `.data` or another view of the
  memory, nobody can know.
Forward and backward change nothing of it, so they go on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable


class Fence:
    """Closed for the units that are being copied; a `ChangeFence`. Methods may be called from any thread.

    Attributes:
        pace: callback that gets the number of each unit before that unit is copied; tests delay the copy with it.
        waits: number of times that somebody had to wait for a copy.
    """

    def __init__(self) -> None:
        self.pace: Callable[[int], None] = _at_once
        self.waits = 0
        self._changed = threading.Condition()
        self._closed: set[int] = set()

    @property
    def is_closed(self) -> bool:
        """Whether anything is being copied."""
        return bool(self._closed)

    def close(self, units: Iterable[int]) -> None:
        """These units stay what they are until they are opened."""
        with self._changed:
            self._closed |= set(units)

    def open(self, unit: int) -> None:
        """A unit's copy is done."""
        with self._changed:
            self._closed.discard(unit)
            self._changed.notify_all()

    def open_all(self) -> None:
        """Nothing is copied any more, whatever came of it."""
        with self._changed:
            self._closed.clear()
            self._changed.notify_all()

    def wait(self, unit: int) -> None:
        """See `ChangeFence`."""
        # Without the lock where nothing is copied: it is asked for each unit of every step.
        if unit in self._closed:
            self._wait_until(lambda: unit not in self._closed)

    def wait_all(self) -> None:
        """See `ChangeFence`."""
        if self._closed:
            self._wait_until(lambda: not self._closed)

    def _wait_until(self, is_open: Callable[[], bool]) -> None:
        with self._changed:
            if not is_open():
                self.waits += 1
                self._changed.wait_for(is_open)


def _at_once(unit: int) -> None:
    """Holds nothing up."""
