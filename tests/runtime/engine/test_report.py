"""What a record of a step holds, and what it leaves out where it is not known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dsrun.contract.environment import RUN_DIR_ENV
from dsrun.contract.job_paths import JobPaths
from dsrun.contract.step_records import STEP_EVENT
from dsrun.runtime.engine.report import StepReport
from dsrun.runtime.observe.records import RecordWriter
from dsrun.runtime.parallel.tensor.same_steps import StepWatch
from support.inside_engine import units_of
from support.models import CONTEXT
from support.training import config, make_engine, train

SCHEDULE = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": 40}}


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the records of the steps so far."""
    monkeypatch.setenv(RUN_DIR_ENV, str(tmp_path))

    def read() -> list[dict[str, Any]]:
        records = [json.loads(line) for line in JobPaths(tmp_path).records.read_text().splitlines()]
        return [record for record in records if record["event"] == STEP_EVENT]

    return read


def test_a_step_on_tokens_says_how_fast_and_how_far_it_is(steps: Any) -> None:
    engine = make_engine(config(1, micro=2, accumulation=3, scheduler=SCHEDULE))
    numel = sum(param.numel() for param in engine.module.parameters())
    train(engine, range(2), samples=6)
    for record in steps():
        assert record["total_steps"] == 40
        # Seconds have six digits.
        assert record["tokens_per_s"] == pytest.approx(6 * CONTEXT / record["seconds"], rel=0.01)
        assert record["tflops"] == pytest.approx(6 * numel * record["tokens_per_s"] / 1e12, rel=1e-5)
        assert 10e6 < record["memory_bytes"] < 100e9


def test_a_forward_without_gradients_is_no_training(steps: Any) -> None:
    engine = make_engine(config(1, micro=2))
    with torch.no_grad():
        engine(torch.zeros(64, CONTEXT, dtype=torch.int64))
    train(engine, range(1), samples=2)
    [record] = steps()
    assert record["tokens_per_s"] == pytest.approx(2 * CONTEXT / record["seconds"], rel=0.01)


def test_what_is_not_known_is_left_out(steps: Any) -> None:
    engine = make_engine(config(1, micro=2), model=nn.Linear(3, 2))
    engine.backward(engine(torch.ones(2, 3)).sum())
    engine.step()
    [record] = steps()
    assert not {"tokens_per_s", "tflops", "total_steps"} & record.keys()
    assert record["samples"] == 2


class OneDevice(TorchFunctionMode):
    """Adds nothing across two devices, as torch on CUDA; where one of them is `meta`, torch itself does not look."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in ("add_", "__iadd__", "add", "__add__"):
            devices = {arg.device for arg in args if isinstance(arg, Tensor) and arg.dim()}
            assert len(devices) == 1, f"expected all tensors to be on the same device, found {devices}"
        return func(*args, **(kwargs or {}))


def report_on(device: torch.device, *, counts_losses: bool = True, same: StepWatch | None = None) -> StepReport:
    """Returns the report of one rank, which writes nowhere."""
    return StepReport(
        RecordWriter(None),
        data_ranks=1,
        counts_losses=counts_losses,
        tells=True,
        steps_per_print=None,
        device=device,
        model_numel=1,
        total_steps=None,
        same=same,
    )


def test_a_loss_may_lie_on_another_device_than_the_engine() -> None:
    elsewhere = torch.device("meta")
    report = report_on(elsewhere)
    with OneDevice():
        report.add_loss(torch.tensor([0.5]))
    assert report.shared_2.device == elsewhere


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
def test_a_loss_on_the_cpu_trains_as_one_on_the_gpu(stage: int, more: dict[str, Any], steps: Any) -> None:
    for_cpu = trained(stage, more, loss_on="cpu")
    on_gpu = trained(stage, more, loss_on="cuda")
    assert for_cpu[0] == on_gpu[0]
    assert all(torch.equal(first, second) for first, second in zip(for_cpu[1], on_gpu[1], strict=True))
    losses = [record["loss"] for record in steps()]
    assert losses[:2] == losses[2:]


def test_losses_that_are_forgotten_are_not_compared_between_ranks_either() -> None:
    """A global batch that is given up on all ranks began anew on all."""
    watch = StepWatch(range(2), 0, torch.device("cpu"))
    report = report_on(torch.device("cpu"), counts_losses=False, same=watch)
    report.add_loss(torch.tensor([3.0]))
    assert watch.shared_3().tolist() == [watch.shared_3()[0].item(), 3.0, 3.0]
    report.forget_losses()
    assert watch.shared_3()[1:].tolist() == [0.0, 0.0]
