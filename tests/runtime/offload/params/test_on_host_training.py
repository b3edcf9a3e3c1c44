"""With parameters in host memory a model trains as without: the same bits, and no byte more than was planned."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dsrun
from dsrun.choices.gather_plan import GatherBudgets
from dsrun.estimate.memory.model_state import pad_units
from dsrun.estimate.prediction import predict
from dsrun.estimate.run.catalogue import find_gpu
from dsrun.estimate.run.machine import Machine
from dsrun.estimate.run.settings import RunSettings
from dsrun.estimate.time.steps import step_traffic
from dsrun.runtime.engine.compose.describe import describe
from dsrun.runtime.memory.arenas import Arenas
from dsrun.runtime.memory.bus import CopyCounts, ThreadBus
from dsrun.runtime.memory.host_pool import HostPool
from dsrun.runtime.mesh.alone import AloneCollectives
from dsrun.runtime.offload.params.on_host import HostShards
from dsrun.runtime.optim.groups import assign_groups
from dsrun.runtime.precision.policy import BF16
from dsrun.runtime.zero.creation.placement import Placement
from dsrun.runtime.zero.creation.units import build_store, build_units
from dsrun.runtime.zero.units.find import find_units
from dsrun.runtime.zero.units.plan import ZeroPlan
from support.inside_engine import predicted_bytes, predicted_host_bytes, store_of, units_of
from support.models import AdaptedBlock, TinyGPT, loss_of
from support.ranks import run_ranks
from support.training import batches, config, frozen_parameters, full_parameters, make_engine, train

WIDTH = 72
ON_HOST = {"offload_param": {"device": "cpu"}}


class Adapted(TinyGPT):
    """Frozen but for adapters in the blocks, one of which has none and is frozen whole."""

    def __init__(self) -> None:
        super().__init__(width=WIDTH, layers=4)
        self.requires_grad_(False)
        self.blocks = nn.ModuleList(AdaptedBlock(WIDTH, 4) for _ in range(4))
        self.blocks[2].requires_grad_(False)


MODELS = {"whole": lambda: TinyGPT(layers=4), "adapters": Adapted}


def engine_of(name: str, zero: dict[str, Any], *, accumulation: int = 1, poison: bool = True, **options: Any) -> Any:
    settings = config(3, micro=2, accumulation=accumulation, **options)
    settings["zero_optimization"].update(zero)
    torch.manual_seed(7)
    engine = make_engine(settings, model=MODELS[name]())
    store_of(engine).poison = poison
    return engine


def weights_of(engine: Any) -> dict[str, Tensor]:
    return {**full_parameters(engine), **frozen_parameters(engine)}


# The same bits --------------------------------------------------------------------------------------------------------

SAME_BITS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("whole", {}, {"bf16": True, "accumulation": 2}),
    ("whole", {}, {"fp16": {"enabled": True, "initial_scale_power": 8}}),
    ("whole", {"stage3_prefetch_bucket_size": 0}, {"bf16": True}),
    ("whole", {"stage3_prefetch_bucket_size": 10**9}, {"bf16": True, "accumulation": 3}),
    ("whole", {"stage3_param_persistence_threshold": 10**6}, {"bf16": True, "accumulation": 2}),
    ("adapters", {}, {"bf16": True, "accumulation": 2}),
    ("adapters", {}, {}),  # in fp32 the frozen ones alone leave
    ("whole", {}, {"bf16": True, "activation_checkpointing": {"policy": "every_block"}}),
]


def _both(cases: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> list[list[tuple[list[float], dict[str, Tensor]]]]:
    """Losses and weights without and with parameters in host memory, of each case."""
    found: list[list[tuple[list[float], dict[str, Tensor]]]] = []
    for name, zero, options in cases:
        found.append([])
        for where in ({}, ON_HOST):
            engine = engine_of(name, {**zero, **where}, **options)
            samples = 2 * engine.gradient_accumulation_steps() * engine.world_size
            found[-1].append((train(engine, range(2), samples=samples), weights_of(engine)))
            engine.destroy()
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        pytest.param(1, [SAME_BITS[0], SAME_BITS[5]], id="1"),
        pytest.param(1, SAME_BITS, id="1 with all", marks=pytest.mark.soak("two ranks have all cases, one has two")),
        pytest.param(2, SAME_BITS, id="2"),
    ],
)
def test_where_parameters_lie_changes_no_bit(world_size: int, cases: list[Any]) -> None:
    for rank in run_ranks(world_size, _both, cases, timeout_s=180):
        for case, (without, with_host) in zip(cases, rank, strict=True):
            assert with_host[0] == without[0], case
            assert with_host[1].keys() == without[1].keys()
            assert all(torch.equal(with_host[1][key], value) for key, value in without[1].items()), case


# Ahead of use ---------------------------------------------------------------------------------------------------------


class Gate:
    """A pace that lets copies pass when it is told to."""

    def __init__(self) -> None:
        self._passes = threading.Semaphore(0)
        self.is_open = True

    def __call__(self, nbytes: int) -> None:
        if not self.is_open:
            assert self._passes.acquire(timeout=60.0), "the gate was not opened"

    def let_pass(self) -> None:
        self._passes.release()


def test_the_next_unit_is_on_its_way_while_one_computes_forward_and_backward() -> None:
    gate = Gate()
    bus = ThreadBus(back_pace=gate)
    axis, cpu, plan = AloneCollectives(), torch.device("cpu"), ZeroPlan.of_stage(3)
    tier = HostShards(bus, Arenas(), pool=HostPool(None, say=print), device=cpu)
    model = TinyGPT(layers=4)
    groups = assign_groups(model, None).group_of
    units = build_units(
        find_units(model),
        plan,
        lambda _: axis,
        precision=BF16,
        device=cpu,
        group_of=groups,
        placement=Placement(tier=tier),
    )
    store = build_store(units, plan, axis)
    turns = [unit for unit in units if unit.module is not None]
    step = [*turns, *reversed(turns)]
    for unit in step:  # the order is recorded
        store.acquire(unit)
        store.release(unit)
    store.invalidate()
    bus.finish()

    gate.is_open = False
    before, passed = bus.counts.back["parameters"].calls, 0
    under_way: list[bool] = []
    for number, unit in enumerate(step):
        if number not in (len(turns), len(turns) + 1):  # backward finds the last two units in their slots
            gate.let_pass()
            passed += 1
        store.acquire(unit)
        assert all(bool(torch.isfinite(param).all()) for param in unit.params)
        under_way.append(bus.counts.back["parameters"].calls - before > passed)
        store.release(unit)
    last = len(turns) - 1
    assert under_way == [*[True] * last, False, False, *[True] * (last - 1), False]
    assert bus.counts.back["parameters"].calls - before == passed == 2 * len(turns) - 2


# Bytes ----------------------------------------------------------------------------------------------------------------

#: Model, accumulation steps, bf16, and keys of gathering.
COUNTED: list[tuple[str, int, bool, dict[str, int]]] = [
    ("whole", 1, True, {}),
    ("whole", 3, True, {}),
    ("whole", 2, True, {"stage3_prefetch_bucket_size": 10**9}),
    ("whole", 2, True, {"stage3_param_persistence_threshold": 10**6, "stage3_model_persistence_threshold": 50_000}),
    ("adapters", 2, True, {}),
    ("adapters", 2, False, {}),
]


def _count(name: str, accumulation: int, bf16: bool, keys: dict[str, int]) -> dict[str, Any]:
    """What crosses the bus in the third step, and what is held, of one rank."""
    engine = engine_of(name, {**ON_HOST, **keys}, accumulation=accumulation, bf16=bf16, poison=False)
    samples = 2 * accumulation * engine.world_size
    train(engine, range(2), samples=samples)
    before = engine.counters()
    train(engine, range(2, 3), samples=samples)
    moved = engine.counters()
    counts = moved.since(before).bus
    report = engine.memory_arenas()
    found = {
        "bus": (counts.back_bytes, counts.out_bytes),
        "kinds": {kind for way in (moved.bus.out, moved.bus.back) for kind, moved in way.items() if moved.calls},
        "host": report.bytes_in("host"),
        "host predicted": predicted_host_bytes(engine),
        "device": report.bytes_in("device") - sum(u.reserved_bytes for u in report.arenas if "leaving" in u.name),
        "device predicted": predicted_bytes(engine) - predicted_host_bytes(engine),
        "frozen whole": sum(use.used_bytes for use in report.outside if use.name == "frozen parameters"),
    }
    engine.destroy()
    return found


def _count_all(cases: list[tuple[str, int, bool, dict[str, int]]]) -> list[dict[str, Any]]:
    return [_count(*case) for case in cases]


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        pytest.param(1, [COUNTED[1], COUNTED[4]], id="1"),
        pytest.param(1, COUNTED, id="1 with all", marks=pytest.mark.soak("two ranks have all cases, one has two")),
        pytest.param(2, COUNTED, id="2"),
    ],
)
def test_what_crosses_the_bus_and_is_held_in_both_tiers_is_what_a_plan_says(
    world_size: int, cases: list[tuple[str, int, bool, dict[str, int]]]
) -> None:
    for rank in run_ranks(world_size, _count_all, cases, timeout_s=180):
        for (name, accumulation, bf16, keys), found in zip(cases, rank, strict=True):
            case = f"{name} {accumulation} {bf16} {keys}"
            torch.manual_seed(7)
            size = describe(MODELS[name]())
            settings = RunSettings(
                stage=3,
                compute_bytes=2 if bf16 else 4,
                accumulation_steps=accumulation,
                offload_param="cpu",
                gather=GatherBudgets(
                    stay=keys.get("stage3_param_persistence_threshold", 0),
                    stay_total=keys.get("stage3_model_persistence_threshold", GatherBudgets().stay_total),
                    ahead=keys.get("stage3_prefetch_bucket_size"),
                ),
            )
            units = pad_units(size.units, world_size)
            machine = Machine(label="test", ranks=world_size, ranks_per_host=world_size)
            planned = step_traffic(size, units, settings, machine)
            assert found["bus"] == (planned.pcie_to_gpu_bytes, planned.pcie_to_host_bytes), case
            assert found["kinds"] == {"parameters"}
            tiers = predict(size, settings, replace(machine, gpu_memory_bytes=80 << 30, gpu=find_gpu("A100-80G"))).tiers
            on_host = {line.name: line.size_bytes for tier in tiers for line in tier.lines if tier.name == "CPU pinned"}
            assert found["host"] == found["host predicted"] == sum(filter(None, on_host.values())), case
            assert found["device"] + found["frozen whole"] == found["device predicted"], case


def _twice_a_step() -> tuple[int, int, int]:
    """(bytes to the device, to the host, of one slice of everything) in a step with both in host memory."""
    zero = {**ON_HOST, "offload_optimizer": {"device": "cpu"}, "stage3_prefetch_bucket_size": 0}
    engine = engine_of("whole", zero, bf16=True, poison=False)
    train(engine, range(2), samples=2 * engine.world_size)
    before = engine.counters()
    train(engine, range(2, 3), samples=2 * engine.world_size)
    counts = engine.counters().since(before).bus
    units = units_of(engine)
    gathered_once = [unit for unit in units if unit.module is None or unit is units[-2]]  # the rest, and the last one
    return (
        counts.back_bytes,
        counts.out_bytes,
        sum(unit.shard.nbytes * (1 if unit in gathered_once else 2) for unit in units),
    )


def test_with_the_optimizer_there_too_parameters_cross_twice_and_gradients_once() -> None:
    """Table 2.2 of the performance reference: 4 bytes an element in and 2 out, but for what is still in its slot."""
    for to_device, to_host, expected in run_ranks(2, _twice_a_step):
        assert to_device == expected
        assert to_host == pytest.approx(expected / 2, rel=0.2)


# What scripts do ------------------------------------------------------------------------------------------------------


def test_a_script_reads_and_writes_parameters_wherever_they_lie() -> None:
    values = [_touch({}), _touch(ON_HOST), _touch({**ON_HOST, "offload_optimizer": {"device": "cpu"}})]
    assert all(torch.equal(a, b) for other in values[1:] for a, b in zip(values[0], other, strict=True))


def _touch(zero: dict[str, Any]) -> list[Tensor]:
    """What a script finds while it trains, evaluates and changes a model."""
    engine = engine_of("whole", zero, bf16=True)
    found: list[Tensor] = []
    tokens, targets = batches(0, samples=2)
    weight, norm = engine.module.blocks[1].up.weight, engine.module.norm.weight
    train(engine, range(1), samples=2)
    with torch.no_grad():
        engine.eval()
        found += [engine(tokens), engine(tokens[:, :4]), engine.module(tokens)]
        engine.train()
    loss = loss_of(engine(tokens), targets)  # units are on their way when the next lines come
    engine.backward(loss)
    engine.step()
    with dsrun.zero.GatheredParameters([weight, norm], modifier_rank=0):
        found += [weight.clone(), norm.clone()]
        weight.data[0].fill_(0.25)
    with dsrun.zero.GatheredParameters(engine.module.parameters()):
        found += [param.detach().clone() for param in engine.module.parameters()]
    found += [weight.ds_tensor.clone()]
    master = dsrun.zero.safe_get_full_fp32_param(weight)
    assert master is not None
    dsrun.utils.safe_set_full_fp32_param(weight, master * 0.5)
    piece = dsrun.utils.safe_get_local_fp32_param(norm)
    assert piece is not None
    dsrun.utils.safe_set_local_fp32_param(norm, piece + 1)
    found += [master, *engine.module_state_dict().values()]
    found += [torch.tensor(train(engine, range(2, 4), samples=2)), *full_parameters(engine).values()]
    engine.destroy()
    return [tensor.detach().clone() for tensor in found]


@pytest.mark.parametrize("zero", [ON_HOST, {**ON_HOST, "offload_optimizer": {"device": "cpu"}}])
def test_a_checkpoint_goes_on_elsewhere_and_back(zero: dict[str, Any], tmp_path: Path) -> None:
    engine = engine_of("whole", zero, bf16=True)
    train(engine, range(2), samples=2)
    engine.save_checkpoint(tmp_path)
    expected = (train(engine, range(2, 4), samples=2), weights_of(engine))
    engine.destroy()
    for other in ({}, zero):
        torch.manual_seed(1)
        engine = engine_of("whole", other, bf16=True)
        engine.load_checkpoint(tmp_path)
        found = (train(engine, range(2, 4), samples=2), weights_of(engine))
        assert found[0] == expected[0]
        assert all(torch.equal(found[1][key], value) for key, value in expected[1].items())
        engine.destroy()


def _by_slices(zero: dict[str, Any]) -> tuple[list[float], dict[str, Tensor], list[str]]:
    """A model that is built by slices, which lie in host memory from the start, and trained."""
    settings = config(3, micro=2, bf16=True)
    settings["zero_optimization"].update(zero)
    torch.manual_seed(7)
    with dsrun.zero.Init(config_dict_or_path=settings, remote_device="cpu" if zero else None):
        model = TinyGPT(layers=4)
    engine = make_engine(settings, model=model)
    losses = train(engine, range(2), samples=2 * engine.world_size)
    return losses, full_parameters(engine), sorted(use.name for use in engine.memory_arenas().arenas)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_model_built_by_slices_goes_to_the_host_as_it_is_built(world_size: int) -> None:
    without, with_host = run_ranks(world_size, _by_slices, {}), run_ranks(world_size, _by_slices, ON_HOST)
    for a, b in zip(without, with_host, strict=True):
        assert a[0] == b[0]
        assert all(torch.equal(a[1][key], b[1][key]) for key in a[1])


def test_a_model_without_an_optimizer_lies_on_the_host_in_any_dtype() -> None:
    outputs: list[Tensor] = []
    for zero in ({}, ON_HOST):
        settings = config(3, micro=2)
        settings["zero_optimization"].update(zero)
        del settings["optimizer"]
        engine = make_engine(settings)
        with torch.no_grad():
            outputs.append(engine(batches(0, samples=2)[0]))
        held = engine.memory_arenas().bytes_in("host")
        assert held == predicted_host_bytes(engine)
        assert (held > 0) == bool(zero)
        engine.destroy()
    assert torch.equal(*outputs)


def test_parameters_that_an_optimizer_on_the_device_updates_stay_and_that_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = engine_of("whole", ON_HOST)
    assert engine.memory_arenas().bytes_in("host") == 0
    said = capsys.readouterr().out
    assert "trained ones do not go to host memory" in said
    assert "nothing is frozen that could" in said
    engine.destroy()


def test_the_config_s_switch_acts_at_stage_3_alone() -> None:
    settings = config(2, micro=2, bf16=True)
    settings["zero_optimization"].update(ON_HOST)
    engine = make_engine(settings)
    train(engine, range(1), samples=2)
    assert engine.memory_arenas().bytes_in("host") == 0
    assert engine.counters().bus.back["parameters"] == CopyCounts(0, 0)
    engine.destroy()
