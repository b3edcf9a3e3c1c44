"""States leave for a generation phase and come back with their bits; what needs them meanwhile is refused by name."""

from __future__ import annotations

import gc
import os
import time
from enum import Enum
from typing import Any

import pytest
import torch

import dsrun
from dsrun.errors import InputError, ModelError
from support.inside_engine import components_of, units_of
from support.models import loss_of
from support.ranks import run_ranks
from support.training import batches, config, full_parameters, make_engine, train

STAGES = (0, 1, 2, 3)
#: States leave after each, in turns so that the script waits and does not.
STEPS = 4


class OffloadStateTypeEnum(str, Enum):
    """As DeepSpeed has it."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def _interrupted(stage: int, bf16: bool, optimizer: str) -> None:
    samples = 2 * int(dsrun.comm.get_world_size()) if torch.distributed.is_initialized() else 2
    settings = config(stage, micro=2, bf16=bf16, optimizer=optimizer)
    plain = make_engine(settings)
    samples = 2 * plain.world_size
    losses = train(plain, range(STEPS), samples=samples)
    engine = make_engine(settings)
    inputs, _ = batches(9, samples=2)
    found: list[float] = []
    for step in range(STEPS):
        found += train(engine, range(step, step + 1), samples=samples)
        with torch.no_grad():
            before = engine(inputs).clone()
        freed = engine.offload_states(non_blocking=step % 2 == 1)
        owned = sum(unit.master.numel() for unit in units_of(engine))
        states = 8 if optimizer == "AdamW" else 4
        assert freed == owned * (4 + states + (4 if bf16 else 0)), "sums, states and masters"
        with torch.no_grad():
            assert torch.equal(engine(inputs), before), "the model computes meanwhile"
        with dsrun.zero.GatheredParameters(list(engine.module.parameters())):
            assert all(bool(torch.isfinite(param).all()) for param in engine.module.parameters())
        engine.reload_states(non_blocking=step % 2 == 1)
    assert found == losses
    expected = full_parameters(plain)
    for name, value in full_parameters(engine).items():
        assert torch.equal(value, expected[name]), name


#: bf16 and optimizer.
KINDS = [(True, "AdamW"), (False, "AdamW"), (True, "Lion")]


@pytest.mark.parametrize(
    ("stage", "kinds"),
    [
        pytest.param(0, KINDS[:1], id="0"),
        pytest.param(1, KINDS[1:2], id="1"),
        pytest.param(2, KINDS[2:], id="2"),
        pytest.param(3, KINDS[:2], id="3"),
        *(
            pytest.param(stage, KINDS, id=f"{stage}-all", marks=pytest.mark.soak("each stage with a kind, in turn"))
            for stage in STAGES
        ),
    ],
)
def test_training_goes_on_with_the_same_bits(stage: int, kinds: list[tuple[bool, str]]) -> None:
    for bf16, optimizer in kinds:
        _interrupted(stage, bf16, optimizer)


def _on_two_ranks() -> None:
    for stage in (1, 3):
        _interrupted(stage, True, "AdamW")


def test_training_goes_on_with_the_same_bits_on_two_ranks() -> None:
    run_ranks(2, _on_two_ranks)


def test_sums_that_a_micro_step_has_begun_come_back_too() -> None:
    results: list[dict[str, torch.Tensor]] = []
    for interrupted in (False, True):
        engine = make_engine(config(2, micro=2, accumulation=2, bf16=True))
        inputs, targets = batches(0, samples=4)
        for first in (0, 2):
            engine.backward(loss_of(engine(inputs[first : first + 2]), targets[first : first + 2]))
            if interrupted:
                engine.offload_states()
                engine.reload_states()
            engine.step()
        results.append(full_parameters(engine))
    for name in results[0]:
        assert torch.equal(*(found[name] for found in results)), name


def test_what_needs_states_is_refused_until_they_are_back(tmp_path: Any) -> None:
    engine = make_engine(config(1, micro=2, bf16=True))
    train(engine, range(1), samples=2)
    engine.offload_states()
    param = engine.module.norm.weight
    inputs, targets = batches(1, samples=2)
    loss = loss_of(engine(inputs), targets)
    for call in (
        lambda: engine.backward(loss),
        lambda: engine.save_checkpoint(tmp_path),
        lambda: dsrun.utils.safe_get_full_fp32_param(param),
        lambda: dsrun.utils.safe_set_full_fp32_param(param, torch.zeros_like(param)),
        lambda: engine.load_module_state_dict(engine.module_state_dict()),
        lambda: dsrun.zero.GatheredParameters(param, modifier_rank=0).__enter__(),
        engine.offload_states,
    ):
        with pytest.raises(ModelError, match="in host memory") as caught:
            call()
        assert caught.value.hint == "call engine.reload_states() first"
    assert engine.module_state_dict() is not None
    engine.reload_states()
    engine.reload_states()  # nothing is away any more
    train(engine, range(1, 2), samples=2)


def test_some_of_them_may_leave_by_name_or_member() -> None:
    engine = make_engine(config(2, micro=2, bf16=True))
    train(engine, range(1), samples=2)
    owned = sum(unit.master.numel() for unit in units_of(engine))
    assert engine.offload_states(include=["hp_params"]) == 4 * owned
    assert {use.name for use in engine.memory_arenas().arenas if use.tier == "host"} == {"masters"}
    engine.reload_states()
    asked = [OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.lp_params]
    assert engine.offload_states(include=asked, pin_memory=False) == 8 * owned
    engine.reload_states()
    assert not [use for use in engine.memory_arenas().arenas if use.tier == "host"]
    with pytest.raises(InputError, match="include names weights; expected some of optim_states, "):
        engine.offload_states(include=["weights"])
    with pytest.raises(InputError, match="device is 'nvme'; expected \"cpu\""):
        engine.offload_states(device="nvme")


def test_an_optimizer_in_host_memory_leaves_nothing_to_move() -> None:
    settings = config(2, micro=2, bf16=True)
    settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    engine = make_engine(settings)
    train(engine, range(2), samples=2)
    assert engine.offload_states() == 0
    engine.reload_states()
    train(engine, range(2, 3), samples=2)


def _freed() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)))
    settings = config(1, micro=2, bf16=True)
    engine = make_engine(settings, model=model)
    engine.backward(engine(torch.ones(2, 1024, dtype=torch.bfloat16)).float().mean())
    engine.step()
    before = _resident()
    freed = engine.offload_states()
    assert freed > 120 << 20
    # On a CPU host memory takes what the device gives, but for sums that hold nothing; both pools count here.
    assert _resident() < before + (32 << 20)
    engine.reload_states()
    # The thread that copies lets go of the host's memory a moment after it has said that the copy is done.
    deadline = time.monotonic() + 60
    while _resident() > before + (32 << 20):
        assert time.monotonic() < deadline, "what was copied back is still there"
        os.sched_yield()


def test_memory_is_given_back() -> None:
    run_ranks(1, _freed)


@pytest.mark.cuda
@pytest.mark.gpu_seconds(2.5)
def test_what_leaves_a_gpu_is_free_to_others_and_host_memory_is_locked_once() -> None:
    def free() -> int:
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0]

    def kept() -> list[int]:
        return [use.used_bytes for use in engine.memory_arenas().outside if use.name == "kept for states that leave"]

    def step() -> None:
        engine.backward(engine(inputs).float().mean())
        engine.step()

    # What tests before this one have left in torch's cache would be parts of what leaves, and parts of what stays.
    gc.collect()
    torch.cuda.empty_cache()
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(24)))
    engine = make_engine(config(1, micro=2, bf16=True), model=model)
    assert engine.device.type == "cuda"
    inputs = torch.ones(2, 1024, dtype=torch.bfloat16, device=engine.device)
    step()
    masters = [unit.master for unit in units_of(engine)]
    values = [master.clone() for master in masters]
    torch.cuda.empty_cache()
    before = free()
    for phase in range(3):
        freed = engine.offload_states(non_blocking=phase == 2)
        assert freed > 380 << 20
        if phase < 2:
            # Kernels that are loaded meanwhile take some.
            assert free() - before > freed - (64 << 20), "a generation engine is another process"
        assert kept() == []
        engine.reload_states(non_blocking=phase == 2)
        assert all(torch.equal(master, value) for master, value in zip(masters, values, strict=True))
        if phase < 2:
            assert kept() == [freed * 3 // 4], "locked for the next phase; sums that hold nothing are not copied"
    step()
    assert kept() == [freed * 3 // 4]
    engine.destroy()
    assert components_of(engine).states._copies is None


@pytest.mark.cuda
def test_what_leaves_on_another_stream_than_it_was_made_on_is_not_overwritten_before_it_is_copied() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)))
    engine = make_engine(config(1, micro=2, bf16=True), model=model)
    engine.backward(engine(torch.ones(2, 1024, dtype=torch.bfloat16, device=engine.device)).float().mean())
    engine.step()
    masters = [unit.master for unit in units_of(engine)]
    values = [master.clone() for master in masters]
    engine.offload_states()  # locks host memory, which stops the device
    engine.reload_states()
    torch.cuda.synchronize()
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        torch.cuda._sleep(200_000_000)
        engine.offload_states(non_blocking=True)
    # On the stream that the states were made on.
    others = [torch.full_like(value, float("nan")) for value in values * 4]
    engine.reload_states()
    assert all(torch.equal(master, value) for master, value in zip(masters, values, strict=True))
    del others
    engine.destroy()
