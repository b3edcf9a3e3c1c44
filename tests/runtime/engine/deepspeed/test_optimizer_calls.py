"""What a script does with the optimizer that it was handed, in the manner of Lightning Fabric and of loops by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dsrun
from dsrun.contract.environment import AS_DEEPSPEED_ENV
from dsrun.errors import ModelError

INPUTS = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def network() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(8, 4)


def engine_of(stage: int, **more: Any) -> tuple[Any, Any, Any]:
    """An engine, its optimizer and a schedule that was made before them."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    zero = {"stage": stage, **more.pop("zero", {})}
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0, "zero_optimization": zero, **more}
    engine, handed, _, _ = dsrun.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)
    return engine, handed, schedule


def loss_of(module: nn.Module) -> Tensor:
    return module(INPUTS).square().mean()


@pytest.mark.parametrize(
    ("stage", "offload"),
    [(0, {}), (1, {}), (2, {}), (3, {}), (3, {"offload_optimizer": {"device": "cpu"}})],
    ids=["0", "1", "2", "3", "3 on the host"],
)
def test_a_step_of_the_optimizer_is_the_engines_without_the_schedule(
    monkeypatch: pytest.MonkeyPatch, stage: int, offload: dict[str, Any]
) -> None:
    # DeepSpeed 0.19.8: the parameters change, the rate stays, and a call with two micro steps a batch raises KeyError.
    monkeypatch.setenv(AS_DEEPSPEED_ENV, "0.19.8")
    model = network()
    plain = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine, optimizer, schedule = engine_of(stage, zero=offload)
    later = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    for _ in range(3):
        loss, expected = loss_of(engine), loss_of(model)
        assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
        expected.backward()
        plain.step()
        plain.zero_grad()
        engine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        later.step()
    assert (engine.global_steps, optimizer.param_groups[0]["lr"]) == (3, 0.1)
    assert schedule.last_epoch == 0
    engine.backward(loss_of(engine))
    engine.step()
    assert (engine.global_steps, schedule.last_epoch) == (4, 1)


def test_a_step_that_leaves_the_configs_schedule_where_it_is_says_so_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(AS_DEEPSPEED_ENV, "0.19.8")
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}
    config = {"train_micro_batch_size_per_gpu": 4, "scheduler": scheduler}
    model = network()
    engine, optimizer, _, _ = dsrun.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1), config=config
    )
    engine.backward(loss_of(engine))
    engine.step()
    note = "optimizer.step() does not step the config's schedule WarmupLR: the learning rate stays unless the script"
    assert note not in capsys.readouterr().out
    rates = []
    for _ in range(2):
        engine.backward(loss_of(engine))
        optimizer.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[0] == rates[1]
    assert capsys.readouterr().out.count(note) == 1
    engine.destroy()
    engine, optimizer, _ = engine_of(1, scheduler=scheduler)  # the script's own goes before the config's
    engine.backward(loss_of(engine))
    optimizer.step()
    assert "does not step" not in capsys.readouterr().out


def test_steps_that_would_not_do_what_they_say_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AS_DEEPSPEED_ENV, "0.19.8")
    engine, optimizer, _ = engine_of(2, gradient_accumulation_steps=2)
    engine.backward(loss_of(engine))
    with pytest.raises(ModelError, match="called after micro step 1 of 2, before the gradients of a global batch"):
        optimizer.step()
    with pytest.raises(ModelError, match="got a closure, which nobody would call"):
        optimizer.step(lambda: 0.0)
    engine.step()
    engine.backward(loss_of(engine))
    optimizer.step()
    assert engine.global_steps == 1
    engine.destroy()
    monkeypatch.delenv(AS_DEEPSPEED_ENV)
    engine, optimizer, _ = engine_of(2)
    engine.backward(loss_of(engine))
    with pytest.raises(ModelError, match="the engine takes the steps of this optimizer"):
        optimizer.step()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_states_that_a_script_reads_are_those_that_are_trained_with(
    monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    monkeypatch.setenv(AS_DEEPSPEED_ENV, "0.19.8")
    engine, optimizer, _ = engine_of(stage)
    for _ in range(2):
        engine.backward(loss_of(engine))
        engine.step()
    states = list(optimizer.state.values())
    flat = torch.cat([state["exp_avg"].reshape(-1) for state in states])
    whole = [dsrun.utils.safe_get_full_optimizer_state(param, "exp_avg") for param in engine.module.parameters()]
    wanted = torch.cat([state.reshape(-1) for state in whole])
    assert torch.equal(flat[flat != 0].sort().values, wanted[wanted != 0].sort().values)
    assert wanted.count_nonzero() > 0
    for state in states:  # a script that moves states by hand
        for value in state.values():
            if isinstance(value, Tensor):
                value.data = value.data.cpu()
    before = copy.deepcopy(wanted)
    engine.backward(loss_of(engine))
    engine.step()
    after = [dsrun.utils.safe_get_full_optimizer_state(param, "exp_avg") for param in engine.module.parameters()]
    assert not torch.equal(torch.cat([state.reshape(-1) for state in after]), before)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_list_of_no_parameters_is_an_engine_that_evaluates(stage: int) -> None:
    model = network()
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    expected = loss_of(model).item()
    engine, optimizer, _, _ = dsrun.initialize(model=model, model_parameters=[], config=config)
    assert optimizer is None
    with torch.no_grad():
        assert loss_of(engine.eval()).item() == pytest.approx(expected)
    named = config | {"optimizer": {"type": "AdamW"}}
    with pytest.raises(ModelError, match="all 2 trainable parameters of Linear are in no group"):
        dsrun.initialize(model=network(), model_parameters=[], config=named)


def test_a_sharded_parameter_says_how_much_of_it_is_here() -> None:
    engine, _, _ = engine_of(3)
    for param in engine.module.parameters():
        assert param.partition_numel() == param.ds_tensor.numel() == param.numel()
