"""Checkpoints of pipelines: saved in some stages and loaded in others, the run goes on as if it had not stopped."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dsrun.checkpoint_files.parse import read_index
from dsrun.checkpoint_files.verbs.compare import tensor_differences
from dsrun.errors import DsrunError
from dsrun.runtime.engine.saving.resume_state import RNG_ROLE
from dsrun.runtime.checkpoint.convert.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from support.pipelines import Case, Ended, Model, assert_same, run, train

BEFORE, AFTER = 2, 2

#: Layouts that save, each with those that load what it has saved.
SAVED = [
    (Case(1, plain=True), [Case(2), Case(4, "interleaved", 2)]),
    (Case(2, "1f1b", tied=True), [Case(1, plain=True), Case(2, "zbv", 2, zero=1)]),
    (Case(2, "interleaved", 2, tied=True), [Case(4, "gpipe"), Case(1)]),
    (Case(4, "zero_bubble"), [Case(2, "zbv", 2, zero=2), Case(2, "breadth_first", 2)]),
    (Case(2, "zbv", 2, tied=True, zero=1), [Case(4, "interleaved", 2), Case(1, plain=True, zero=2)]),
    (Case(2, data=2, zero=2), [Case(1, data=2, plain=True, zero=1), Case(2, "zbv", 2, data=2, zero=1)]),
    (Case(1, data=2, plain=True, zero=1, tied=True), [Case(2, data=2, zero=2), Case(2, "interleaved", 2, data=2)]),
]


def of(case: Case, tied: bool) -> Case:
    return Case(case.stages, case.schedule, case.virtual, case.data, case.zero, tied, plain=case.plain)


@functools.cache
def never_stopped(data: int, tied: bool) -> tuple[Ended, Path]:
    """The last updates of a run in one stage, and a checkpoint of its end."""
    folder = Path(tempfile.mkdtemp())

    def body(engine: Any, data_rank: int) -> Ended:
        ended = train(engine, data_rank, BEFORE + AFTER)
        engine.save_checkpoint(folder, tag="end")
        return Ended(ended.losses[BEFORE:], ended.norms[BEFORE:], ended.weights)

    return run(Case(1, data=data, tied=tied), body)[0], folder / "end"


def differences(one: Path, other: Path) -> list[Any]:
    """Masters, moments, step counts and buffers that differ; random numbers are a rank's own."""
    found = tensor_differences((one, read_index(one)), (other, read_index(other)))
    return [tensor for tensor in found if tensor.role != RNG_ROLE]


@pytest.mark.parametrize(("saves", "loads"), SAVED, ids=[f"{saves}{'-tied' * saves.tied}" for saves, _ in SAVED])
def test_a_run_goes_on_in_other_stages_as_if_it_had_not_stopped(
    tmp_path: Path, saves: Case, loads: list[Case]
) -> None:
    expected, end = never_stopped(saves.data, saves.tied)

    def save(engine: Any, data_rank: int) -> None:
        train(engine, data_rank, BEFORE)
        engine.save_checkpoint(tmp_path, tag="half")

    run(saves, save)

    def go_on(engine: Any, data_rank: int) -> Ended:
        engine.load_checkpoint(tmp_path, tag="half")
        assert engine.global_steps == BEFORE
        engine.save_checkpoint(tmp_path, tag="again")
        ended = train(engine, data_rank, AFTER, first=BEFORE)
        engine.save_checkpoint(tmp_path, tag="end")
        return ended

    for case in loads:
        found = run(of(case, saves.tied), go_on)
        assert not differences(tmp_path / "again", tmp_path / "half"), case
        if case.plain or saves.plain:  # its units are others, and so the last bits of the norm that clips
            assert found[0].losses == pytest.approx(expected.losses, rel=1e-6)
            assert found[0].norms == pytest.approx(expected.norms, rel=1e-6)
            continue
        assert_same(found, expected)
        assert not differences(tmp_path / "end", end), case
