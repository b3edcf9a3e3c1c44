"""What stages keep for backward: the bytes that the schedule and the plan say, and a memory budget over all of them."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dsrun
from dsrun.config.load import load
from dsrun.estimate.model.activations import activation_bytes
from dsrun.estimate.model.architecture import Architecture
from dsrun.estimate.model.stages import cut_into_stages
from dsrun.estimate.model.units import from_architecture
from dsrun.estimate.run.settings import read_settings
from dsrun.estimate.time.pipeline import StageEstimate, pipeline_estimate
from dsrun.runtime.activation.choose.policy import Treatment
from support.allocations import allocations, peak_of
from support.covering import covering
from support.inside_engine import components_of, hooks_of
from support.models import CONTEXT, VOCAB, Block, loss_of
from support.pipelines import Case, Ended, assert_same, run, train
from support.ranks import run_ranks

LAYERS, WIDTH, SAMPLES = 8, 64, 4
SHAPE = Architecture(
    layers=LAYERS, hidden=WIDTH, intermediate=3 * WIDTH, heads=4, kv_heads=4, head_dim=16, vocab=VOCAB, gated=False
)
SCHEDULES = [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("breadth_first", 2), ("zero_bubble", 1), ("zbv", 2)]


class GPT(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, 4, odd=0) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False).requires_grad_(False)  # so that it puts nothing off

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(x_BTD)


def make() -> GPT:
    torch.manual_seed(3)
    return GPT()


def case_of(stages: int, schedule: str, virtual: int, **keys: Any) -> Case:
    more = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "activation_checkpointing": keys,
        "pipeline": {
            "stages": stages,
            "schedule": schedule,
            "partition": "uniform",
            **({"virtual_stages": virtual} if virtual > 1 else {}),
        },
    }
    return Case(stages, schedule, virtual, more=more)


def rows() -> Iterator[tuple[Tensor, Tensor]]:
    for number in itertools.count():
        tokens = torch.randint(0, VOCAB, (SAMPLES, CONTEXT + 1), generator=torch.Generator().manual_seed(number))
        yield tokens[:, :-1], tokens[:, 1:]


@dataclass(eq=False)
class Saved:
    """What autograd keeps in the place of a tensor, as long as it keeps it."""

    tensor: Tensor


class SavedBytes:
    """The most bytes that autograd keeps of what blocks have saved, each storage once.

    Args:
        module: module with the blocks.
        queued: function that returns the bytes that wait for gradients of weights.
    """

    def __init__(self, module: nn.Module, queued: Callable[[], int] = lambda: 0) -> None:
        self.most = 0
        self._alive: weakref.WeakSet[Saved] = weakref.WeakSet()
        self._queued = queued
        self._hooks: list[Any] = []
        for block in module.modules():
            if isinstance(block, Block):
                block.register_forward_pre_hook(self._enter)
                block.register_forward_hook(self._leave)

    def _enter(self, *_: Any) -> None:
        self._hooks.append(torch.autograd.graph.saved_tensors_hooks(self._save, lambda saved: saved.tensor))
        self._hooks[-1].__enter__()

    def _leave(self, *_: Any) -> None:
        self._hooks.pop().__exit__(None, None, None)
        storages = {s.tensor.untyped_storage().data_ptr(): s.tensor.untyped_storage().nbytes() for s in self._alive}
        self.most = max(self.most, sum(storages.values()) + self._queued())

    def _save(self, tensor: Tensor) -> Any:
        saved = Saved(tensor)
        if not isinstance(tensor._base if tensor._is_view() else tensor, nn.Parameter):
            self._alive.add(saved)
        return saved


def saved_by_a_block() -> int:
    model = make()
    saved = SavedBytes(model.blocks[0])
    model.blocks[0](torch.randn(SAMPLES, CONTEXT, WIDTH, requires_grad=True)).sum().backward()
    return saved.most


def saved_bytes(engine: Any, data_rank: int) -> int:
    later = components_of(engine).scheduled._later
    saved = SavedBytes(engine.module, queued=lambda: 0 if later is None else later.queued_bytes)
    batches = rows()
    for _ in range(2):
        engine.train_batch(batches, loss_fn=loss_of)
    return saved.most


def planned(case: Case, stages: int) -> list[tuple[StageEstimate, int]]:
    """Returns of each stage what the plan says, and the bytes of its blocks."""
    settings = read_settings(load(case.config(), world_size=stages), ranks=stages, sequence=CONTEXT)
    cut = cut_into_stages(from_architecture(SHAPE, label="m"), settings)
    estimate = pipeline_estimate(cut, settings)
    assert estimate is not None
    return [
        (row, activation_bytes(stage.model.architecture, settings, live=row.live, has_head=stage.has_head).layers)
        for row, stage in zip(estimate.stages, cut, strict=True)
        if stage.model.architecture is not None
    ]


@pytest.mark.parametrize(
    ("order", "stages"),
    covering({schedule: (schedule, virtual) for schedule, virtual in SCHEDULES}, {"2": 2, "4": 4}, together=1),
)
def test_what_stages_have_saved_is_what_the_plan_says(order: tuple[str, int], stages: int) -> None:
    schedule, virtual = order
    case = case_of(stages, schedule, virtual)
    block = saved_by_a_block()
    for found, (row, plan_bytes) in zip(run(case, saved_bytes, make), planned(case, stages), strict=True):
        expected = int(row.live * sum(row.blocks)) * block
        if schedule == "zero_bubble":  # what waits for gradients of weights is counted as what blocks save
            assert 0.97 * expected < found <= expected
        else:
            assert found == expected
        assert plan_bytes == pytest.approx(expected, rel=0.01), "the plan leaves out statistics of norms and attention"


#: Schedule, chunks of a rank, and a budget in blocks' bytes; by stages.
BUDGETS = {
    2: [("1f1b", 1, 4.5), ("gpipe", 1, 9), ("interleaved", 2, 4.5), ("zbv", 2, 7)],
    4: [("1f1b", 1, 4.5)],
}


def _train(case: Case) -> dict[str, Any]:
    """Returns what a process has trained, allocated in the last batch, and made of its blocks."""
    torch.set_num_threads(1)  # ranks of this machine share its cores
    engine: Any = dsrun.initialize(model=make(), config=case.config())[0]
    batches = rows()
    losses = [float(engine.train_batch(batches, loss_fn=loss_of)) for _ in range(2)]
    peak = peak_of(allocations(lambda: losses.append(float(engine.train_batch(batches, loss_fn=loss_of)))))
    found: dict[str, Any] = {"losses": losses, "peak": peak}
    found["weights"] = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
    activations = hooks_of(engine).activations
    if activations is not None:
        assert activations.solution is not None
        found["planned"] = activations.solution.peak_bytes
        found["treatments"] = [treatment.value for treatment in activations.solution.treatments]
    engine.destroy()
    return found


def _train_all(stages: int, block: int) -> list[dict[str, Any]]:
    """Trains without the budget and with it, under every schedule."""
    if stages == 1:
        return [_train(case_of(1, "1f1b", 1))]
    found: list[dict[str, Any]] = []
    for schedule, virtual, blocks in BUDGETS[stages]:
        keys = {"policy": "memory_budget", "memory_budget": int(blocks * block)}
        found += [_train(case_of(stages, schedule, virtual)), _train(case_of(stages, schedule, virtual, **keys))]
    return found


@functools.cache
def _trained(stages: int) -> list[list[dict[str, Any]]]:
    return run_ranks(stages, _train_all, stages, saved_by_a_block())


@pytest.mark.parametrize(("stages", "number"), [(stages, n) for stages in BUDGETS for n in range(len(BUDGETS[stages]))])
def test_each_stage_recomputes_what_does_not_fit_one_budget_and_no_bit_changes(stages: int, number: int) -> None:
    schedule, virtual, blocks = BUDGETS[stages][number]
    block = saved_by_a_block()
    budget = int(blocks * block)
    ((one,),) = _trained(1)
    plans = planned(case_of(stages, schedule, virtual), stages)
    recomputed: list[int] = []
    for of_rank, (row, _) in zip(_trained(stages), plans, strict=True):
        plain, kept = of_rank[2 * number : 2 * number + 2]
        # What is held beside what blocks save, whatever becomes of them: gradients, messages, logits.
        working = plain["peak"] - int(row.live * sum(row.blocks)) * block
        assert 0 < working < 2 * block
        assert kept["planned"] <= budget
        assert kept["peak"] - working <= budget + block // 4, "a second run makes what it does not save, too"
        recomputed.append(kept["treatments"].count("recompute"))
        assert kept["losses"] == plain["losses"] == one["losses"]
        for name, value in kept["weights"].items():
            assert torch.equal(value, one["weights"][name]), name
    assert recomputed[0] > 0
    if schedule in ("1f1b", "interleaved"):
        assert recomputed[0] > recomputed[-1]


def _with_budget(case: Case, budget: int, **more: Any) -> Case:
    keys = {"policy": "memory_budget", "memory_budget": budget, **more.pop("activations", {})}
    return replace(case, more={"activation_checkpointing": keys, **more})


def _ended(engine: Any, data_rank: int) -> tuple[Ended, list[Treatment]]:
    ended = train(engine, data_rank)
    activations = hooks_of(engine).activations
    assert activations is not None
    assert activations.solution is not None
    return ended, list(activations.solution.treatments)


def test_ranks_with_the_same_layers_plan_alike_where_they_gather_parameters() -> None:
    one = run(Case(data=2))[0]
    cut = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    found = run(_with_budget(Case(2, "breadth_first", 2, data=2, zero=3), 150_000, **cut), _ended)
    assert_same([ended for ended, _ in found], one)
    plans = [treatments for _, treatments in found]
    assert plans[0] == plans[1]
    assert plans[2] == plans[3]
    assert {Treatment.KEEP, Treatment.RECOMPUTE} == set(plans[0])


@functools.cache
def one_stage() -> Ended:
    return run(Case())[0]


@pytest.mark.parametrize(
    ("case", "budget"),
    [(Case(2), 30_000), (Case(2, "interleaved", 2), 30_000), (Case(4, "zero_bubble"), 60_000)],
    ids=str,
)
def test_what_waits_in_host_memory_for_several_micro_batches_comes_back_the_same(case: Case, budget: int) -> None:
    found = run(_with_budget(case, budget, activations={"cpu_checkpointing": True}), _ended)
    assert_same([ended for ended, _ in found], one_stage())
    assert Treatment.MOVE in found[0][1]


def _planned_bytes(engine: Any, data_rank: int) -> int:
    del data_rank
    batches = rows()
    for _ in range(2):
        engine.train_batch(batches, loss_fn=loss_of)
    return hooks_of(engine).activations.solution.peak_bytes


@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)
def test_a_budget_for_everything_keeps_what_the_plan_says(schedule: str, virtual: int) -> None:
    case = case_of(2, schedule, virtual, policy="memory_budget", memory_budget=10**9)
    block = saved_by_a_block()
    expected = [int(row.live * sum(row.blocks)) * block for row, _ in planned(case, 2)]
    assert run(case, _planned_bytes, make) == expected


def test_micro_batches_are_those_of_a_global_batch_also_where_the_config_gives_samples() -> None:
    case = case_of(2, "gpipe", 1, policy="memory_budget", memory_budget=10**9)
    given = {"gradient_accumulation_steps": None, "train_batch_size": SAMPLES * case.micros}
    assert run(replace(case, more={**case.more, **given}), _planned_bytes, make) == run(case, _planned_bytes, make)


def test_each_stage_says_its_plan_once(capsys: pytest.CaptureFixture[str]) -> None:
    case = replace(case_of(2, "1f1b", 1, policy="memory_budget", memory_budget=10**9), data=2)
    run(case, _planned_bytes, make)
    said = [line for line in capsys.readouterr().out.splitlines() if "activations: " in line]
    assert sorted(line.partition(";")[0] for line in said) == [
        "stage 0: activations: 4 keep",
        "stage 1: activations: 4 keep",
    ]
