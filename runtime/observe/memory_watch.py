"""When memory is looked at: at four moments of a few steps, and now and then between steps for growth.

Between those steps a call costs a comparison. Every rank looks at its own memory; records and notes are rank 0's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import torch

from dsrun.memory_use.findings import GROWTH_EVENT, LEAK_ADVICE, LOOK_STEPS, WINDOW_STEPS, Growth, growth_of
from dsrun.memory_use.samples import SAMPLE_EVENT, MemorySample, Phase, to_record
from dsrun.memory_use.stacks import HISTORY_EVENT, stacks_lines, stacks_record
from dsrun.memory_use.text import growth_line

from .allocation_history import AllocationHistory
from .records import RecordWriter
from .tiers import live_bytes_of, read_tiers

#: Names of what is held for long and its bytes; asked only when a sample is taken.
Kinds = Callable[[], tuple[tuple[str, int], ...]]

#: Steps that are sampled: the first ones, where buffers grow to their size, and each power of ten.
_FIRST_STEPS = 3
#: A peak that a look finds so much higher than any sample did has its next step sampled, to know whose it is.
_RISE = 1.05
#: Samples kept for the report: four a step, of the first steps, of powers of ten and of those after a new peak.
_MOST_SAMPLES = 512
#: Steps that pass before growth is watched: allocators, caches and compilers settle.
_SETTLED_STEP = 10


class MemoryWatch:
    """Samples memory over a run.

    Args:
        records: writer of the records that samples are written to.
        rank: rank of this process; rank 0 writes and prints.
        device: device that the model is on.
        history: recorder of allocations, used over the first steps and then let go; None for none.
    """

    def __init__(
        self,
        records: RecordWriter,
        *,
        rank: int,
        device: torch.device,
        history: AllocationHistory | None = None,
    ) -> None:
        self._records = records
        self._rank = rank
        self._device = device
        self._samples: deque[MemorySample] = deque(maxlen=_MOST_SAMPLES)
        self._growths: dict[str, Growth] = {}
        self._looks: dict[str, deque[tuple[int, int]]] = {}
        self._history = history
        self._history_steps = 0
        self._step = 0
        self._due: Phase | None = None
        self._peaks: dict[str, int] = {}
        self._has_risen = False
        self._leaks_told: set[str] = set()

    @property
    def samples(self) -> tuple[MemorySample, ...]:
        """What was sampled so far, in order of time."""
        return tuple(self._samples)

    @property
    def growths(self) -> tuple[Growth, ...]:
        """The newest judgement of each tier; empty in the first steps."""
        return tuple(self._growths.values())

    def begin_forward(self, step: int, kinds: Kinds) -> None:
        """A forward that trains begins, in a step counted from 1; only the first of a step counts."""
        if step != self._step:
            self._step = step
            if self._history is not None and self._history_steps == 0:
                self._history.start()
                self._history_steps = 1
            self._due = "start" if self._has_risen or is_sampled(step) else None
            self._has_risen = False
            if self._due:
                self._take("start", kinds, then="forward")

    def begin_backward(self, kinds: Kinds) -> None:
        """The first micro step's activations are all there."""
        if self._due == "forward":
            self._take("forward", kinds, then="backward")

    def end_backward(self, kinds: Kinds) -> None:
        """The first micro step's backward has ended."""
        if self._due == "backward":
            self._take("backward", kinds, then="update")

    def end_step(self, step: int, kinds: Kinds) -> None:
        """The update is done. `step` is the one that has ended."""
        if self._due == "update" and step == self._step:
            self._take("update", kinds, then=None)
        if self._history is not None:
            self._follow(self._history)
        if step % LOOK_STEPS == 0 and step >= _SETTLED_STEP:
            self._look(step)

    def _take(self, phase: Phase, kinds: Kinds, *, then: Phase | None) -> None:
        sample = MemorySample(step=self._step, phase=phase, tiers=read_tiers(self._device, kinds=kinds()))
        self._samples.append(sample)
        self._peaks = {use.tier: use.peak_bytes for use in sample.tiers}
        self._due = then
        if self._rank == 0:
            self._records.write_behind(SAMPLE_EVENT, partial(to_record, sample))

    def _follow(self, history: AllocationHistory) -> None:
        if self._history_steps >= _FIRST_STEPS:
            found, self._history = history.finish(), None
            self._records.write_behind(HISTORY_EVENT, partial(stacks_record, found))
            print("\n".join(stacks_lines(found)), flush=True)
        elif self._history_steps:
            self._history_steps += 1

    def _look(self, step: int) -> None:
        for use in read_tiers(self._device):
            self._has_risen |= use.peak_bytes > _RISE * self._peaks.get(use.tier, use.peak_bytes)
            looks = self._looks.setdefault(use.tier, deque(maxlen=WINDOW_STEPS // LOOK_STEPS + 1))
            if looks and step <= looks[-1][0]:
                looks.clear()  # a checkpoint was loaded
            looks.append((step, live_bytes_of(use)))
            if len(looks) == looks.maxlen:
                self._judge(growth_of(use.tier, list(looks)))

    def _judge(self, growth: Growth) -> None:
        self._growths[growth.tier] = growth
        if self._rank != 0:
            return
        if growth.step % WINDOW_STEPS == 0 or growth.is_leak:
            self._records.write_behind(GROWTH_EVENT, partial(asdict, growth))
        if growth.is_leak and growth.tier not in self._leaks_told:
            self._leaks_told.add(growth.tier)
            print(f"dsrun: memory: {growth_line(growth)}; {LEAK_ADVICE}", flush=True)


def is_sampled(step: int) -> bool:
    """Whether a step, counted from 1, is sampled."""
    return step <= _FIRST_STEPS or (step >= 10 and set(str(step)[1:]) == {"0"} and str(step)[0] == "1")
