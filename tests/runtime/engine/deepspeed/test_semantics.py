"""What scripts written for DeepSpeed rely on comes out as it does there.

The numbers are recorded from DeepSpeed 0.19.8 on two ranks over Gloo: sums of each parameter's elements after training
`Sequential(Linear(8, 16), ReLU(), Linear(16, 4))` by SGD with rate 0.1.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dsrun
from dsrun.errors import ModelError
from dsrun.runtime.deepspeed.offload_names import OffloadDeviceEnum, OffloadStateTypeEnum
from support.ranks import run_ranks
from support.training import batches, config, full_parameters, make_engine, train

STAGES = (0, 1, 2, 3)
#: Two steps with seeds 5 and 6: (operation, clipping) to the sums, and the norm before clipping of the second step.
STEPS = {
    ("mean", 0.0): ([-1.769086, 0.667478, -1.662508, 0.105265], 0.495046),
    ("mean", 0.05): ([-1.812072, 0.697332, -1.854779, 0.073833], 0.607421),
    ("sum", 0.0): ([-1.731425, 0.644097, -1.501869, 0.131643], 0.759011),
    ("sum", 0.05): ([-1.812072, 0.697332, -1.854779, 0.073833], 1.214842),
}
#: With `managed_gradient_accumulation` false and 2 accumulation steps: three backwards and a step, one and a step.
OWN_BOUNDARY = [-1.774369, 0.66848, -1.601534, 0.112622]
OWN_NORMS = [0.5521296, 0.2850310]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def loss_of(engine: Any, seed: int) -> torch.Tensor:
    torch.manual_seed(seed + engine.global_rank)
    return engine(torch.randn(2, 8)).square().mean()


def settings(stage: int, **more: Any) -> dict[str, Any]:
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": sgd,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        **more,
    }


def sums(engine: Any) -> list[float]:
    with dsrun.zero.GatheredParameters(list(engine.module.parameters())):
        return [float(param.detach().double().sum()) for param in engine.module.parameters()]


def as_recorded() -> list[Any]:
    found: list[Any] = []
    dsrun.init_distributed()
    for stage in STAGES:
        for (op, clipping), expected in STEPS.items():
            asked = settings(stage, gradient_allreduce_op=op, gradient_clipping=clipping)
            engine = dsrun.initialize(model=model(), config=asked)[0]
            for seed in (5, 6):
                engine.backward(loss_of(engine, seed))
                engine.step()
            found.append([*sums(engine), engine.get_global_grad_norm()])
            assert found[-1] == pytest.approx([*expected[0], expected[1]], abs=2e-6), (stage, op, clipping)
            engine.destroy()
        asked = settings(stage, managed_gradient_accumulation=False, gradient_accumulation_steps=2)
        engine = dsrun.initialize(model=model(), config=asked)[0]
        counts: list[int] = []
        norms: list[Any] = []
        for backwards in (3, 1):
            for number in range(backwards):
                assert not engine.is_gradient_accumulation_boundary()
                loss = loss_of(engine, 10 * backwards + number)
                assert float(engine.backward(loss).detach()) == pytest.approx(float(loss.detach()) / 2)
            engine.step()
            counts += [engine.global_samples, engine.micro_steps, engine.global_steps]
            norms.append(engine.get_global_grad_norm())
            assert engine.was_step_applied()
        assert counts == [12, 1, 1, 16, 2, 2], stage
        assert norms == pytest.approx(OWN_NORMS, abs=2e-6), stage
        assert sums(engine) == pytest.approx(OWN_BOUNDARY, abs=2e-6), stage
        engine.destroy()
    return found


def test_sums_over_ranks_and_boundaries_of_the_scripts_own_are_deepspeeds_at_every_stage() -> None:
    run_ranks(2, as_recorded)


@pytest.mark.parametrize("stage", STAGES)
def test_states_leave_by_the_optimizer_and_come_back_as_openrlhf_asks_it(stage: int) -> None:
    found: list[dict[str, torch.Tensor]] = []
    for moves in (False, True):
        engine = make_engine(config(stage, micro=2, bf16=True))
        train(engine, range(2), samples=2)
        if moves:
            include = [
                OffloadStateTypeEnum.optim_states,
                OffloadStateTypeEnum.contiguous_grad_buffer,
                OffloadStateTypeEnum.hp_params,
            ]
            engine.optimizer.offload_states(
                include=include, device=OffloadDeviceEnum.cpu, pin_memory=True, non_blocking=True
            )
            with pytest.raises(ModelError, match=r"engine\.reload_states\(\)"):
                engine.backward(engine(batches(9, samples=2)[0]).float().mean())
            engine.zero_grad()
            engine.optimizer.reload_states(non_blocking=True)
        train(engine, range(2, 4), samples=2)
        found.append(full_parameters(engine))
        engine.destroy()
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value), name


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_in_no_group_stay_as_they_are_get_gradients_and_are_told_of_once(
    stage: int, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = model()
    trained = [param for name, param in plain.named_parameters() if name != "2.bias"]
    engine = dsrun.initialize(model=plain, model_parameters=trained, config=settings(stage))[0]
    before = sums(engine)
    for seed in (5, 6):
        engine.backward(loss_of(engine, seed))
        engine.step()
    assert [a == b for a, b in zip(before, sums(engine), strict=True)] == [False, False, False, True]
    # As in DeepSpeed at stages 1 to 3; its stage 0 forgets them with every step.
    assert float(plain[2].bias.grad.sum()) == pytest.approx(-0.338865, abs=2e-6)  # type: ignore[index,union-attr]
    assert capsys.readouterr().out.count("not updated, for no optimizer group has them: `2.bias`") == 1


# A second engine of a model -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_a_model_that_is_initialized_again_goes_on_from_its_values_with_new_states(
    stage: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DSRUN_AS_DEEPSPEED", "0.19.8")
    dsrun.init_distributed("gloo")
    found: list[dict[str, torch.Tensor]] = []
    for destroys in (True, False):
        first = make_engine(config(stage, micro=2, bf16=True))
        train(first, range(2), samples=2)
        if destroys:
            first.destroy()
        engine = make_engine(config(stage, micro=2, bf16=True), model=first.module)
        train(engine, range(2, 4), samples=2)
        found.append(full_parameters(engine))
        with pytest.raises(ModelError, match="the engine has been destroyed"):
            first.step()
        with pytest.raises(ModelError, match="optimizer is the one of an earlier engine"):
            dsrun.initialize(model=engine.module, optimizer=first.optimizer, config=config(stage, micro=2))
        engine.destroy()
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value), name
    told = "dsrun: the engine that trained this model has ended, for another one takes it over"
    assert capsys.readouterr().out.count(told) == 1


@pytest.mark.parametrize("stage", STAGES)
def test_an_engine_goes_on_where_another_one_of_its_model_was_refused(
    stage: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DSRUN_AS_DEEPSPEED", "0.19.8")
    engine = make_engine(config(stage, micro=2))
    train(engine, range(1), samples=2)
    both = {"bf16": {"enabled": True}, "fp16": {"enabled": True}}
    with pytest.raises(ValueError, match="are both true"):
        dsrun.initialize(model=engine.module, config=config(stage, micro=2) | both)
    strange = [nn.Parameter(torch.zeros(3))]
    with pytest.raises(ModelError, match="holds a tensor of shape"):
        dsrun.initialize(model=engine.module, model_parameters=strange, config=config(stage, micro=2))
    train(engine, range(1, 2), samples=2)
    for writer in (None, 0):
        gathered = dsrun.zero.GatheredParameters(engine.module.parameters(), modifier_rank=writer)
        with gathered, pytest.raises(ModelError, match=r"the model's parameters are gathered, `.*\n.*leave `Gath"):
            make_engine(config(stage, micro=2), model=engine.module)
    train(engine, range(2, 3), samples=2)
    assert (engine.global_steps, "has ended" in capsys.readouterr().out) == (3, False)


def test_an_engine_that_trains_a_part_of_a_model_does_not_end_for_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSRUN_AS_DEEPSPEED", "0.19.8")
    part = model()
    engine = dsrun.initialize(model=part, config=settings(1))[0]
    with pytest.raises(ModelError, match="has an engine already"):
        dsrun.initialize(model=nn.Sequential(part, nn.Linear(4, 1)), config=settings(1))
    engine.backward(loss_of(engine, 5))
    engine.step()


def test_engines_of_several_models_at_other_stages_train_in_one_loop() -> None:
    expected = []
    for number in range(3):
        torch.manual_seed(number)
        plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        update = torch.optim.SGD(plain.parameters(), lr=0.1)
        for seed in (5, 6):
            torch.manual_seed(seed)
            plain(torch.randn(2, 8)).square().mean().backward()
            update.step()
            update.zero_grad()
        expected.append([float(param.detach().double().sum()) for param in plain.parameters()])
    engines = []
    for number, stage in enumerate((2, 3, 0)):
        torch.manual_seed(number)
        plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        engines.append(dsrun.initialize(model=plain, config=settings(stage))[0])
    for seed in (5, 6):
        for engine in engines:
            engine.backward(loss_of(engine, seed))
            engine.step()
    for engine, numbers in zip(engines, expected, strict=True):
        assert sums(engine) == pytest.approx(numbers, abs=1e-6)
