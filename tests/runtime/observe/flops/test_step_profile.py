"""The config's `flops_profiler`: one table, of one step, that is right with accumulation, shards and stages."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dsrun.runtime.compat import forward_hooks
from dsrun.runtime.observe.flops.counter import FlopCounter
from dsrun.runtime.observe.flops.figures import macs_to_string, number_to_string, params_to_string
from dsrun.runtime.observe.flops.module_profile import numel_of
from support import pipelines
from support.models import CONTEXT, TinyGPT, loss_of
from support.training import batches, config, make_engine


def train(section: dict[str, Any], *, steps: int = 3, model: nn.Module | None = None, **more: Any) -> Any:
    engine = make_engine(
        config(more.pop("stage", 1), micro=2, flops_profiler={"enabled": True, **section}, **more), model=model
    )
    for step in range(steps):
        inputs, targets = batches(step, samples=2)
        for _ in range(engine.gradient_accumulation_steps()):
            engine.backward(loss_of(engine(inputs), targets))
            engine.step()
    engine.destroy()
    return engine


def figure(text: str, name: str) -> str:
    (line,) = (line for line in text.splitlines() if line.startswith(f"{name}:"))
    return line.partition(":")[2].strip()


def expected() -> Any:
    model, counter = TinyGPT(), FlopCounter()
    with counter:
        model(batches(0, samples=2)[0])
    return counter.count().total


@pytest.mark.parametrize(("stage", "accumulation"), [(1, 1), (3, 4)])
def test_a_table_comes_at_its_step_and_tells_a_forward_whatever_is_accumulated(
    stage: int, accumulation: int, capsys: pytest.CaptureFixture[str]
) -> None:
    train({"profile_step": 1}, stage=stage, accumulation=accumulation)
    text = capsys.readouterr().out
    assert text.count("flops profile of step") == 1
    assert "flops profile of step 2:" in text
    total = expected()
    assert figure(text, "forwards in the step") == str(accumulation)
    assert figure(text, "fwd flops of a forward") == number_to_string(total.forward)
    assert figure(text, "fwd+bwd flops of a forward, the model's") == number_to_string(total.model)
    assert figure(text, "params of this rank's model") == params_to_string(numel_of(TinyGPT()))
    (row,) = (line for line in text.splitlines() if line.startswith("blocks.0.up "))
    assert macs_to_string(accumulation * 2 * CONTEXT * TinyGPT().blocks[0].up.weight.numel()) in row  # type: ignore


def test_an_evaluation_within_the_step_is_none_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    engine = make_engine(config(1, micro=2, accumulation=2, flops_profiler={"enabled": True, "profile_step": 0}))
    inputs, targets = batches(0, samples=2)
    for _ in range(2):
        engine.backward(loss_of(engine(inputs), targets))
        with torch.no_grad():
            engine(inputs[:1])
        engine.step()
    engine.destroy()
    text = capsys.readouterr().out
    assert figure(text, "forwards in the step") == "2"
    assert figure(text, "fwd flops of a forward") == number_to_string(expected().forward)


def test_what_is_computed_again_is_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    train({"profile_step": 0}, steps=1, activation_checkpointing={"policy": "every_block"})
    text = capsys.readouterr().out
    assert "flops profile of step 1:" in text
    total = expected()
    assert figure(text, "fwd+bwd flops of a forward, the model's") == number_to_string(total.model)
    assert figure(text, "fwd+bwd flops, with what is computed again") != number_to_string(total.hardware)
    assert figure(text, "fwd flops of a forward") == number_to_string(total.forward)


@pytest.mark.parametrize("section", [{"profile_step": -1}, {"profile_step": 7}, {"enabled": False}])
def test_without_such_a_step_nothing_is_printed_and_no_hook_is_there(
    section: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    model = TinyGPT()
    before = sum(len(forward_hooks(part)) for part in model.modules())
    train(section, model=model)
    assert "flops" not in capsys.readouterr().out
    assert sum(len(forward_hooks(part)) for part in model.modules()) == before


def test_a_file_takes_the_table_and_one_that_cannot_be_written_fails_no_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "profile.txt"
    train({"output_file": str(path), "detailed": False})
    assert "flops profile of step 2:" in path.read_text()
    assert "blocks.0" not in path.read_text()
    assert "flops profile" not in capsys.readouterr().out
    train({"output_file": str(path / "below")})
    text = capsys.readouterr().out
    assert "flops_profiler: `output_file` cannot be written:" in text
    assert "flops profile of step 2:" in text


def test_a_stage_of_a_pipeline_is_told_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    def one_batch(engine: Any, data_rank: int) -> None:
        engine.train_batch(itertools.islice(pipelines.items(data_rank), 100), loss_fn=pipelines.loss_fn)

    section = {"flops_profiler": {"enabled": True, "profile_step": 0}}
    pipelines.run(pipelines.Case(stages=2, more=section), one_batch)
    text = capsys.readouterr().out
    assert text.count("flops profile of step 1:") == 1
    assert figure(text, "pipeline stage that is profiled") == "0 of 2"
    assert figure(text, "forwards in the step") == str(pipelines.MICROS)


def test_a_compiled_model_is_left_alone_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    engine = make_engine(
        config(1, micro=2, flops_profiler={"enabled": True, "profile_step": 0}), model=nn.Sequential(nn.Linear(4, 4))
    )
    engine.compile(backend="eager")
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
    engine.destroy()
    assert capsys.readouterr().out.count("flops_profiler: the model is compiled") == 1
    torch.compiler.reset()
