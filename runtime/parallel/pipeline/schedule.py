"""DeepSpeed's words for what a stage does, slot by slot, for scripts that read them. The engine runs other values.

Its own schedules stand in `dsrun.pipeline_schedules`. Here slots are numbered from 0 on all stages alike: of p stages,
stage s has the forward of micro batch m in slot 2m + s, and the backward in slot 2m + 2p - 1 - s.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dsrun.errors import ModelError


class PipeInstruction:
    """A thing to do.

    Args:
        kwargs: values that are its attributes.

    Attributes:
        name: name of its class.
        kwargs: the values.
    """

    def __init__(self, **kwargs: Any) -> None:
        self.name = type(self).__name__
        self.kwargs = kwargs
        for name, value in kwargs.items():
            setattr(self, name, value)

    def __repr__(self) -> str:
        """Returns the name with the values, as a call."""
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.kwargs.items())})"


class OptimizerStep(PipeInstruction):
    """The optimizer steps."""


class ReduceGrads(PipeInstruction):
    """Gradients are summed up over the ranks of the stage."""


class ReduceTiedGrads(PipeInstruction):
    """Gradients of tied layers are summed up over their stages."""


class BufferOpInstruction(PipeInstruction):
    """A thing to do with the buffer of a micro batch.

    Args:
        buffer_id: number of the buffer.
        kwargs: further values.
    """

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """A micro batch is read."""


class ForwardPass(BufferOpInstruction):
    """The stage's forward."""


class BackwardPass(BufferOpInstruction):
    """The stage's backward."""


class SendActivation(BufferOpInstruction):
    """What the forward has made goes to the next stage."""


class RecvActivation(BufferOpInstruction):
    """What the stage before has made is received."""


class SendGrad(BufferOpInstruction):
    """Gradients of what was received go to the stage before."""


class RecvGrad(BufferOpInstruction):
    """Gradients of what was sent are received."""


class PipeSchedule:
    """What a stage does in each slot of a batch; a subclass says it in `steps`.

    Args:
        micro_batches: micro batches of a batch.
        stages: number of stages.
        stage_id: stage that does it.

    Attributes:
        micro_batches: micro batches of a batch.
        stages: number of stages.
        stage_id: stage that does it.
        prev_stage: stage before.
        next_stage: stage behind.

    Raises:
        ModelError: there is no such stage.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        if not 0 <= stage_id < stages:
            raise ModelError(f"{type(self).__name__}: there is no stage {stage_id} of {stages}")
        self.micro_batches = micro_batches
        self.stages = stages
        self.stage_id = stage_id
        self.prev_stage, self.next_stage = stage_id - 1, stage_id + 1

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yields the instructions of each slot."""
        raise NotImplementedError(f"{type(self).__name__} has no `steps`")

    def num_pipe_buffers(self) -> int:
        """Returns the number of buffers, which micro batches take in turn."""
        return self.micro_batches

    @property
    def stage(self) -> int:
        """Stage that does it."""
        return self.stage_id

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        """Micro batches of a batch."""
        return self.micro_batches

    @property
    def is_first_stage(self) -> bool:
        """Whether the stage is the first one."""
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether the stage is the last one."""
        return self.stage_id == self.stages - 1

    def __iter__(self) -> Iterator[list[PipeInstruction]]:
        """Yields what `steps` does."""
        return self.steps()

    def _at(self, kind: type[BufferOpInstruction], micro: int, *, needs: bool = True) -> list[PipeInstruction]:
        """Returns an instruction for a micro batch; none where there is no such micro batch, or it is not needed."""
        has = needs and 0 <= micro < self.micro_batches
        return [kind(micro % self.num_pipe_buffers())] if has else []

    def _ends(self) -> list[PipeInstruction]:
        return [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]


class TrainSchedule(PipeSchedule):
    """Forwards and backwards in turn: 1F1B."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yields the instructions of each of 2 (M + p - 1) slots."""
        slots = 2 * (self.micro_batches + self.stages - 1)
        has_prev, has_next = not self.is_first_stage, not self.is_last_stage
        is_end = self.is_first_stage or self.is_last_stage
        for slot in range(slots):
            if (slot - self.stage_id) % 2 == 0:
                micro = (slot - self.stage_id) // 2
                done = self._at(SendGrad, self._backward_at(slot - 1), needs=has_prev and slot > 0)
                done += self._at(RecvActivation, micro, needs=has_prev)
                done += self._at(LoadMicroBatch, micro, needs=is_end) + self._at(ForwardPass, micro)
            else:
                micro = self._backward_at(slot)
                done = self._at(RecvGrad, micro, needs=has_next)
                done += self._at(SendActivation, (slot - 1 - self.stage_id) // 2, needs=has_next)
                done += self._at(BackwardPass, micro)
            yield done + (self._ends() if slot == slots - 1 else [])

    def num_pipe_buffers(self) -> int:
        """Returns the micro batches that are between forward and backward at most, 2 at least."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))

    def _backward_at(self, slot: int) -> int:
        """Returns the micro batch whose backward is in a slot."""
        return (slot + 1 + self.stage_id) // 2 - self.stages


class InferenceSchedule(PipeSchedule):
    """Forwards alone; two buffers are in turn, on odd stages the other way round."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yields the instructions of each of M + p - 1 slots."""
        is_end = self.is_first_stage or self.is_last_stage
        odd = self.stage_id % 2
        for slot in range(self.micro_batches + self.stages - 1):
            micro = slot - self.stage_id
            here, other = (slot + odd) % 2, (slot + 1 + odd) % 2
            is_here = 0 <= micro < self.micro_batches
            loads: list[PipeInstruction] = [LoadMicroBatch(here)] if is_here and is_end else []
            receives: list[PipeInstruction] = [RecvActivation(here)] if is_here and not self.is_first_stage else []
            has_made = 0 <= micro - 1 < self.micro_batches and not self.is_last_stage
            sends: list[PipeInstruction] = [SendActivation(other)] if has_made else []
            # Neighbours must not both send first: each message is waited for.
            messages = receives + sends if odd else sends + receives
            yield loads + messages + ([ForwardPass(here)] if is_here else [])

    def num_pipe_buffers(self) -> int:
        """Returns 2: one is sent while the other is filled."""
        return 2


class DataParallelSchedule(PipeSchedule):
    """One micro batch after the other, without stages."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yields the instructions of each micro batch."""
        for micro in range(self.micro_batches):
            done: list[PipeInstruction] = [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0)]
            yield done + ([ReduceGrads(), OptimizerStep()] if micro == self.micro_batches - 1 else [])

    def num_pipe_buffers(self) -> int:
        """Returns 1."""
        return 1
