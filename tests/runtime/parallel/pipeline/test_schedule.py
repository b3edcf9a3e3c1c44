"""DeepSpeed's words for what stages do, in the slots and buffers in which DeepSpeed 0.19.8 has them (recorded)."""

from __future__ import annotations

import pytest

from dsrun.errors import ModelError
from dsrun.runtime.parallel.pipeline.schedule import (
    DataParallelSchedule,
    ForwardPass,
    InferenceSchedule,
    PipeSchedule,
    TrainSchedule,
)

#: Letters of instructions in the recorded lines, each with its buffer behind it.
LETTERS = {
    "LoadMicroBatch": "L",
    "ForwardPass": "F",
    "BackwardPass": "B",
    "SendActivation": "SA",
    "RecvActivation": "RA",
    "SendGrad": "SG",
    "RecvGrad": "RG",
    "ReduceTiedGrads": "T",
    "ReduceGrads": "R",
    "OptimizerStep": "O",
}
RECORDED = {
    (4, 1, 0): "L0 F0|B0|L1 F1|B1|L0 F0|B0|L1 F1|B1 T R O",
    (4, 2, 1): "|RA0 L0 F0|B0|SG0 RA1 L1 F1|B1|SG1 RA0 L0 F0|B0|SG0 RA1 L1 F1|B1|SG1 T R O",
    (4, 3, 0): "L0 F0|SA0|L1 F1|SA1|L2 F2|RG0 SA2 B0|L0 F0|RG1 SA0 B1||RG2 B2||RG0 B0 T R O",
    (4, 3, 1): "|RA0 F0|SA0|RA1 F1|RG0 SA1 B0|SG0 RA0 F0|RG1 SA0 B1|SG1 RA1 F1|RG0 SA1 B0|SG0|RG1 B1|SG1 T R O",
}


def line(schedule: PipeSchedule) -> str:
    slots: list[str] = []
    for done in schedule:
        slots.append(" ".join(f"{LETTERS[what.name]}{what.kwargs.get('buffer_id', '')}" for what in done))
    return "|".join(slots)


@pytest.mark.parametrize(("micros", "stages", "stage"), RECORDED)
def test_slots_of_training_are_those_of_deepspeed(micros: int, stages: int, stage: int) -> None:
    assert line(TrainSchedule(micros, stages, stage)) == RECORDED[micros, stages, stage]


def test_slots_of_inference_and_of_one_stage_are_those_of_deepspeed() -> None:
    assert line(InferenceSchedule(3, 2, 0)) == "L0 F0|L1 SA0 F1|L0 SA1 F0|SA0"
    assert line(DataParallelSchedule(2, 1, 0)) == "L0 F0 B0|L0 F0 B0 R O"


def test_each_schedule_says_its_buffers() -> None:
    assert [TrainSchedule(8, 4, stage).num_pipe_buffers() for stage in range(4)] == [4, 3, 2, 2]
    assert (InferenceSchedule(8, 4, 0).num_pipe_buffers(), DataParallelSchedule(8, 4, 0).num_pipe_buffers()) == (2, 1)


def test_an_instruction_shows_its_values_and_has_them() -> None:
    what = ForwardPass(3)
    assert (repr(what), what.buffer_id) == ("ForwardPass(buffer_id=3)", 3)  # pyright: ignore[reportAttributeAccessIssue]


def test_a_stage_that_is_not_there_is_refused() -> None:
    with pytest.raises(ModelError, match="TrainSchedule: there is no stage 2 of 2"):
        TrainSchedule(1, 2, 2)
