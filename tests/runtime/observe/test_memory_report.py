"""What an engine tells of its own memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dsrun.errors import InputError
from dsrun.memory_use.samples import ACTIVATIONS, parts_of
from dsrun.runtime.observe.memory_report import MemoryReport
from dsrun.runtime.observe.tiers import malloc_bytes
from support.models import CONTEXT, TinyGPT
from support.ranks import run_ranks
from support.training import config, make_engine, train

MIB = 1 << 20


def _report(stage: int, micro: int) -> tuple[MemoryReport, dict[str, int]]:
    engine: Any = make_engine(config(stage, micro=micro))
    train(engine, range(2), samples=micro * engine.world_size)
    return engine.memory_report(), {use.name: use.reserved_bytes for use in engine.memory_arenas().arenas}


@pytest.mark.parametrize("stage", [0, 3])
def test_each_rank_tells_its_arenas_by_name_at_every_moment(stage: int) -> None:
    for report, arenas in run_ranks(2, _report, stage, 2):
        assert [(s.step, s.phase) for s in report.samples] == [
            (step, phase) for step in (1, 2) for phase in ("start", "forward", "backward", "update")
        ]
        assert arenas.items() <= dict(report.samples[-1].tiers[0].kinds).items()
        assert report.state_bytes == pytest.approx(report.state_predicted_bytes, rel=0.01)
        assert report.tiers == ["cpu"]
        assert "host memory over step 2" in str(report)


def test_activations_are_what_the_forward_leaves_for_the_backward() -> None:
    if malloc_bytes() is None:
        pytest.skip("this C library does not tell what is in use")

    engine: Any = make_engine(config(0, micro=256), model=TinyGPT())
    train(engine, range(2), samples=256)
    by_phase = {sample.phase: sample.tiers[0] for sample in engine.memory_report().samples[4:]}
    found = {phase: dict(parts_of(use, by_phase["start"])).get(ACTIVATIONS, 0) for phase, use in by_phase.items()}
    # Each of some 50 tensors that are kept has a value for every token and channel, which is 4 KiB a token at least.
    assert found["forward"] > 256 * CONTEXT * 4096
    assert found["backward"] < found["forward"] / 4
    assert found["update"] < found["forward"] / 4


def test_before_the_first_step_there_is_a_report_and_no_picture(tmp_path: Path) -> None:
    engine: Any = make_engine(config(0, micro=2))
    report = engine.memory_report()
    assert report.samples == ()
    assert report.peak("cpu") is None
    assert report.fragmentation("cpu") is None
    with pytest.raises(InputError, match="no step was sampled yet"):
        report.save_plot(tmp_path / "memory.png")


def test_evaluation_is_not_sampled() -> None:
    engine: Any = make_engine(config(0, micro=2))
    with torch.no_grad():
        engine(torch.zeros(2, CONTEXT, dtype=torch.long))
    assert engine.memory_report().samples == ()
