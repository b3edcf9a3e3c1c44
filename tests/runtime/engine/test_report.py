"""What a record of a step holds, and what it leaves out where it is not known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import dsrun
from dsrun.contract.environment import ENGINE_ENV, RUN_DIR_ENV
from dsrun.contract.heartbeats import HeartbeatWriter
from dsrun.contract.step_records import LOG_EVENT, STEP_EVENT
from dsrun.errors import ModelError
from dsrun.runtime.engine.engine import Engine
from dsrun.runtime.engine.report import StepReport
from dsrun.runtime.mesh.wait_times import WaitTimes
from dsrun.runtime.observe.records import RecordWriter
from dsrun.runtime.observe.steps.figures import StepFigures
from dsrun.runtime.observe.steps.phase_times import PhaseTimes
from dsrun.runtime.observe.steps.script_figures import ScriptFigures
from dsrun.runtime.parallel.tensor.same_steps import StepWatch
from support.inside_engine import units_of
from support.models import CONTEXT
from support.training import config, make_engine, train
from support.written_records import read_records

SCHEDULE = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": 40}}


Steps = Callable[[Engine], list[dict[str, Any]]]


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Steps:
    """Returns the records of an engine's steps so far."""
    monkeypatch.setenv(RUN_DIR_ENV, str(tmp_path))
    monkeypatch.delenv(ENGINE_ENV, raising=False)
    return lambda engine: read_records(tmp_path, STEP_EVENT, engine)


def test_a_step_on_tokens_says_how_fast_and_how_far_it_is(steps: Steps) -> None:
    engine = make_engine(config(1, micro=2, accumulation=3, scheduler=SCHEDULE))
    numel = sum(param.numel() for param in engine.module.parameters())
    train(engine, range(2), samples=6)
    for record in steps(engine):
        assert record["total_steps"] == 40
        assert record["tokens"] == 6 * CONTEXT
        # Seconds have six digits.
        assert record["tokens_per_s"] == pytest.approx(6 * CONTEXT / record["seconds"], rel=0.01)
        assert 10e6 < record["memory_bytes"] < 100e9
        # Of matrix products alone: an embedding multiplies nothing, attention has no parameters.
        assert 4 < record["model_tflops"] * 1e12 / record["tokens_per_s"] / numel < 6
        assert record["hardware_tflops"] == pytest.approx(record["model_tflops"], rel=0.05)
        assert record["memory"] == {"cpu": record["memory_bytes"]}


def test_the_seconds_of_a_step_are_those_of_its_phases(steps: Steps) -> None:
    engine = make_engine(config(1, micro=2, accumulation=2))
    train(engine, range(3), samples=4)
    *_, last = steps(engine)
    assert last["phases"].keys() == {"script", "forward", "backward", "step"}
    # Read one after the other, some microseconds apart.
    assert sum(last["phases"].values()) == pytest.approx(last["seconds"], abs=0.001)
    assert min(last["phases"].values()) >= 0


def test_a_forward_without_gradients_is_no_training(steps: Steps) -> None:
    engine = make_engine(config(1, micro=2))
    with torch.no_grad():
        engine(torch.zeros(64, CONTEXT, dtype=torch.int64))
    train(engine, range(1), samples=2)
    [record] = steps(engine)
    assert record["tokens"] == 2 * CONTEXT
    assert record["phases"]["evaluate"] > 0


def test_a_batch_whose_gradients_are_forgotten_does_not_count(steps: Steps) -> None:
    engine = make_engine(config(1, micro=2))
    tokens = torch.zeros(2, CONTEXT, dtype=torch.int64)
    engine.backward(engine(tokens).sum() * 0 + 100.0)
    engine.zero_grad()
    loss = engine(tokens).sum() * 0 + 1.0
    engine.zero_grad()  # as scripts of torch do between forward and backward
    engine.backward(loss)
    engine.step()
    [record] = steps(engine)
    assert (record["loss"], record["tokens"]) == (1.0, 2 * CONTEXT)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_batch_that_a_load_gives_up_does_not_count(tmp_path: Path, steps: Steps, stage: int) -> None:
    engine = make_engine(config(stage, micro=2, accumulation=2))
    tokens = torch.zeros(2, CONTEXT, dtype=torch.int64)
    engine.save_checkpoint(tmp_path / "saved")
    engine.backward(engine(tokens).sum() * 0 + 100.0)
    engine.step()
    engine(tokens)  # without a backward
    engine.load_checkpoint(tmp_path / "saved")
    for _ in range(4):
        engine.backward(engine(tokens).sum() * 0 + 1.0)
        engine.step()
    first, second = steps(engine)
    assert (first["step"], first["loss"], first["tokens"]) == (1, 1.0, 4 * CONTEXT)
    assert operations_of(first) == pytest.approx(operations_of(second), rel=0.02)
    assert not engine._mesh.where.oddity


def operations_of(record: dict[str, Any]) -> float:
    return record["model_tflops"] * record["seconds"]


def test_samples_that_the_script_counts_are_those_since_a_load(tmp_path: Path) -> None:
    engine = make_engine(config(1, micro=2, accumulation=2, managed_gradient_accumulation=False))
    tokens = torch.zeros(2, CONTEXT, dtype=torch.int64)
    engine.save_checkpoint(tmp_path / "saved")
    for micros in (3, 2):
        for _ in range(micros):
            engine.backward(engine(tokens).mean())
        if micros == 3:
            engine.load_checkpoint(tmp_path / "saved")
    engine.step()
    assert engine.global_samples == 4


def test_a_loss_that_was_scaled_before_a_load_does_not_count(tmp_path: Path, steps: Steps) -> None:
    engine = make_engine(config(1, micro=2))
    tokens = torch.zeros(2, CONTEXT, dtype=torch.int64)
    engine.save_checkpoint(tmp_path / "saved")
    engine.scale(engine(tokens).sum() * 0 + 50.0)
    engine.load_checkpoint(tmp_path / "saved")
    engine.scale(engine(tokens).sum() * 0 + 1.0).backward()
    engine.step()
    [record] = steps(engine)
    assert record["loss"] == 1.0


class Scored(nn.Module):
    """A model that takes tokens with a mask and labels, as Hugging Face's do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 16)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        del attention_mask, labels
        return self.embed(input_ids).square().mean()


def test_padding_and_labels_that_do_not_count_are_told_apart(steps: Steps) -> None:
    engine = make_engine(config(1, micro=2, accumulation=2), model=Scored())
    ids = torch.arange(8).reshape(2, 4)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    labels = torch.tensor([[-100, 1, 2, 3], [-100, 5, -100, -100]])
    for batch in ({"input_ids": ids, "attention_mask": mask, "labels": labels}, {"input_ids": ids, "labels": ids}):
        engine.backward(engine(**batch))
        engine.step()
    [record] = steps(engine)
    assert (record["tokens"], record["tokens_padded"], record["tokens_in_loss"]) == (6 + 8, 8 + 8, 4 + 8)


def test_what_is_not_known_is_left_out(steps: Steps) -> None:
    engine = make_engine(config(1, micro=2), model=nn.Linear(3, 2))
    engine.backward(engine(torch.ones(2, 3)).sum())
    engine.step()
    [record] = steps(engine)
    assert not {"tokens", "tokens_per_s", "total_steps", "tokens_in_loss", "lrs", "waits_s"} & record.keys()
    assert record["samples"] == 2


def test_an_engine_that_trains_beside_another_says_which_it_is(steps: Steps) -> None:
    first = make_engine(config(1, micro=2))
    only_evaluates, *_ = dsrun.initialize(model=nn.Linear(3, 2), config={"train_micro_batch_size_per_gpu": 2})
    second = make_engine(config(1, micro=2))
    train(first, range(1), samples=2)
    train(second, range(1), samples=2)
    steps(first)
    assert [record.get("engine") for record in steps(second)] == [None, 1]
    assert not only_evaluates.optimizer


def test_figures_of_the_script_are_recorded_by_their_names(steps: Steps, tmp_path: Path) -> None:
    engine = make_engine(config(1, micro=2))
    train(engine, range(2), samples=2)
    loss = torch.tensor([[2.5]], requires_grad=True)
    engine.log({"eval/loss": loss, "seen": 3, "off": float("inf"), "half": torch.tensor(0.5, dtype=torch.bfloat16)})
    [record] = read_records(tmp_path, LOG_EVENT, engine)
    assert record["values"] == {"eval/loss": 2.5, "seen": 3.0, "off": None, "half": 0.5}
    assert (record["step"], record["samples"]) == (2, 4)


def test_figures_that_are_none_are_refused_together(steps: Steps, tmp_path: Path) -> None:
    engine = make_engine(config(1, micro=2))
    many: Any = {"e": numpy.ones(2), "f": 10**400}
    wrong: Any = {"a": "2", "": 1.0, "b": torch.ones(3), "c": None, "d": 1.0, **many}
    with pytest.raises(ModelError) as caught:
        engine.log(wrong)
    said = str(caught.value)
    assert all(
        part in said for part in ("`a` is a str", "a name is ''", "`b` is a tensor of shape (3,)", "`c`", "`e`", "`f`")
    )
    assert "`d`" not in said
    assert read_records(tmp_path, LOG_EVENT, engine) == []


def test_the_seconds_of_phases_are_printed_where_the_config_asks(
    steps: Steps, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = make_engine(config(1, micro=2, wall_clock_breakdown=True, steps_per_print=2))
    train(engine, range(4), samples=2)
    lines = [line for line in capsys.readouterr().out.splitlines() if "time (ms)" in line]
    assert [line.split()[1] for line in lines] == ["2", "4"]
    assert all(f" {phase} " in lines[0] for phase in ("script", "forward", "backward", "step"))


class OneDevice(TorchFunctionMode):
    """Adds nothing across two devices, as torch on CUDA; where one of them is `meta`, torch itself does not look."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in ("add_", "__iadd__", "add", "__add__"):
            devices = {arg.device for arg in args if isinstance(arg, Tensor) and arg.dim()}
            assert len(devices) == 1, f"expected all tensors to be on the same device, found {devices}"
        return func(*args, **(kwargs or {}))


def report_on(device: torch.device, *, counts_losses: bool = True, same: StepWatch | None = None) -> StepReport:
    """Returns the report of one rank, which writes nowhere."""
    records = RecordWriter(None)
    waits = WaitTimes(HeartbeatWriter(None))
    return StepReport(
        records,
        data_ranks=1,
        counts_tokens=True,
        counts_labels=True,
        counts_losses=counts_losses,
        tells=True,
        steps_per_print=None,
        device=device,
        on_drives=lambda: 0,
        total_steps=None,
        figures=StepFigures(PhaseTimes(), waits, moved=dict[str, int], spread=None),
        script=ScriptFigures(records, is_first=True),
        same=same,
    )


def test_a_loss_may_lie_on_another_device_than_the_engine() -> None:
    elsewhere = torch.device("meta")
    report = report_on(elsewhere)
    with OneDevice():
        report.add_loss(torch.tensor([0.5]))
    assert report.numbers.values_N().device == elsewhere


class Layers(nn.Module):
    """Residual layers, whose kernels have one order of sums."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x_BD: Tensor) -> Tensor:
        for layer in self.layers:
            x_BD = x_BD + torch.tanh(layer(x_BD))
        return x_BD


FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}


def trained(stage: int, more: dict[str, Any], *, loss_on: str) -> tuple[list[float], list[Tensor]]:
    """Returns the losses that backward gave, and the masters, after two steps of two micro batches."""
    engine = make_engine(config(stage, micro=4, accumulation=2, **more), model=Layers())
    assert engine.device.type == "cuda"
    given: list[float] = []
    for number in range(4):
        generator = torch.Generator().manual_seed(number)
        x_BD = torch.randn(4, 64, generator=generator).to(engine.device, next(engine.module.parameters()).dtype)
        loss = engine(x_BD).float().square().mean().to(loss_on)
        given.append(float(engine.backward(loss).detach()))
        engine.step()
    masters = [unit.master.detach().cpu().clone() for unit in units_of(engine)]
    engine.destroy()
    return given, masters


@pytest.mark.cuda
@pytest.mark.gpu_seconds(1.3)
@pytest.mark.parametrize(("stage", "more"), [(0, {}), (2, FP16), (3, {"bf16": True})])
def test_a_loss_on_the_cpu_trains_as_one_on_the_gpu(
    stage: int, more: dict[str, Any], steps: Steps, tmp_path: Path
) -> None:
    for_cpu = trained(stage, more, loss_on="cpu")
    on_gpu = trained(stage, more, loss_on="cuda")
    assert for_cpu[0] == on_gpu[0]
    assert all(torch.equal(first, second) for first, second in zip(for_cpu[1], on_gpu[1], strict=True))
    losses = [record["loss"] for record in read_records(tmp_path, STEP_EVENT)]
    assert losses[:2] == losses[2:]


def test_losses_that_are_forgotten_are_not_compared_between_ranks_either() -> None:
    """A global batch that is given up on all ranks began anew on all."""
    watch = StepWatch(range(2), 0, torch.device("cpu"))
    report = report_on(torch.device("cpu"), counts_losses=False, same=watch)
    report.add_loss(torch.tensor([3.0]))
    assert watch.shared_3().tolist() == [watch.shared_3()[0].item(), 3.0, 3.0]
    report.forget_losses()
    assert watch.shared_3()[1:].tolist() == [0.0, 0.0]
