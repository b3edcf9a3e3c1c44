"""Recomputation gives the bits of plain training: at every stage, on one rank and two, with dropout."""

from __future__ import annotations

import itertools
import tempfile
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.inside_engine import hooks_of, store_of
from support.models import CONTEXT, VOCAB, Block, loss_of
from support.ranks import run_ranks
from support.training import batches, config, full_parameters, make_engine, train

STEPS = 2
STAGES = (0, 1, 2, 3)
Result = tuple[list[float], dict[str, Tensor]]

#: Sections that must not change a bit.
POLICIES: dict[str, dict[str, Any]] = {
    "every block": {"policy": "every_block"},
    "segments of 2": {"policy": "interval", "interval": 2},
    "ratio": {"policy": "ratio", "ratio": 0.6},
    "sqrt": {"policy": "sqrt"},
    "hierarchical": {"policy": "hierarchical"},
    "selective": {"policy": "selective"},
    "cpu": {"cpu_checkpointing": True},
    "cpu, sqrt": {"policy": "sqrt", "cpu_checkpointing": True},
    "disk": {"cpu_checkpointing": True, "nvme_path": [tempfile.gettempdir()], "nvme_buffer_count": 3},
    "contiguous": {"contiguous_memory_optimization": True, "number_checkpoints": 5},
    "3 segments": {"number_checkpoints": 3},
    "budget": {"policy": "memory_budget", "memory_budget": 300_000, "cpu_checkpointing": True},
    "synchronized": {"policy": "every_block", "synchronize_checkpoint_boundary": True, "profile": True},
    "parts of blocks": {"policy": "every_block", "blocks": ["blocks.*.up", "blocks.[13].qkv"]},
}


class DropBlock(Block):
    """A block that draws random numbers in two places."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return F.dropout(super().forward(F.dropout(x_BTD, 0.1)), 0.2)


class DropGPT(nn.Module):
    """Five such blocks between an embedding and a head."""

    def __init__(self, width: int = 48, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.position = nn.Parameter(torch.randn(CONTEXT, width) * 0.02)
        self.blocks = nn.ModuleList(DropBlock(width, 4) for _ in range(layers))
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = self.embed(tokens_BT) + self.position[: tokens_BT.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train_cases(cases: list[dict[str, Any]], samples: int) -> list[Result]:
    found: list[Result] = []
    for case in cases:
        torch.manual_seed(7)
        engine = make_engine(case, model=DropGPT())
        if engine.zero_optimization_stage() == 3:
            store_of(engine).poison = True
        torch.manual_seed(11 + engine.global_rank)
        losses = train(engine, range(STEPS), samples=samples)
        found.append((losses, full_parameters(engine)))
    return found


def section(keys: dict[str, Any]) -> dict[str, Any]:
    return {"activation_checkpointing": keys}


def assert_equal(found: Result, expected: Result, what: str) -> None:
    assert found[0] == expected[0], what
    for name, value in expected[1].items():
        assert torch.equal(found[1][name], value), f"{what}: {name}"


@pytest.mark.parametrize("bf16", [False, True])
def test_every_policy_gives_the_bits_of_plain_training_with_accumulation(bf16: bool) -> None:
    stage = 3 if bf16 else 0
    plain = config(stage, micro=2, accumulation=2, bf16=bf16)
    cases = [plain, *({**plain, **section(keys)} for keys in POLICIES.values())]
    expected, *found = train_cases(cases, 4)
    assert expected[0][-1] != expected[0][0]
    for name, result in zip(POLICIES, found, strict=True):
        assert_equal(result, expected, name)


def stage_cases(*formats: tuple[int, bool]) -> list[dict[str, Any]]:
    """For each (stage, bf16) plain training, then blocks by themselves and in segments: four are three and one."""
    recomputed = section({"policy": "interval", "interval": 3})
    return [{**config(stage, micro=2, bf16=bf16), **keys} for stage, bf16 in formats for keys in ({}, recomputed)]


def test_stages_give_the_bits_of_plain_training_on_one_rank() -> None:
    results = train_cases(stage_cases(*itertools.product(STAGES, (False, True))), 2)
    for case, (expected, found) in enumerate(zip(results[::2], results[1::2], strict=True)):
        assert_equal(found, expected, f"case {case}")


def test_stages_and_policies_give_the_bits_of_plain_training_on_two_ranks() -> None:
    stages = stage_cases((0, True), (1, False), (2, True), (3, False), (3, True))
    accumulated = config(3, micro=1, accumulation=2)
    kinds = ("hierarchical", "selective", "cpu", "contiguous", "parts of blocks")
    cases = [*stages, accumulated, *({**accumulated, **section(POLICIES[kind])} for kind in kinds)]
    for results in run_ranks(2, train_cases, cases, 4):
        of_stages, (expected, *of_kinds) = results[: len(stages)], results[len(stages) :]
        for case, (plain, found) in enumerate(zip(of_stages[::2], of_stages[1::2], strict=True)):
            assert_equal(found, plain, f"case {case}")
        for kind, found in zip(kinds, of_kinds, strict=True):
            assert_equal(found, expected, kind)


def train_lengths(stage: int, budget: int) -> tuple[list[float], list[str]]:
    """Trains with shorter samples on rank 1; returns losses and what becomes of each block."""
    torch.manual_seed(7)
    keys = {"policy": "memory_budget", "memory_budget": budget}
    engine = make_engine({**config(stage, micro=2), **section(keys)}, model=DropGPT())
    torch.manual_seed(11)
    losses: list[float] = []
    for step in range(4):
        inputs, targets = (each[:2, : CONTEXT - 8 * engine.global_rank] for each in batches(step, samples=2))
        loss = loss_of(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    plan = hooks_of(engine).activations.solution
    assert plan is not None
    return losses, [treatment.value for treatment in plan.treatments]


def test_ranks_whose_batches_differ_in_length_plan_alike_where_they_gather_for_it() -> None:
    budget = 160_000
    below, at_3 = (run_ranks(2, train_lengths, stage, budget) for stage in (2, 3))
    assert "recompute" in below[0][1]
    assert set(below[1][1]) == {"keep"}
    assert at_3[0][1] == at_3[1][1], "one plan, which blocks of equal bytes it recomputes is a matter of times"
    assert sorted(at_3[0][1]) == sorted(below[0][1])
    assert [losses for losses, _ in at_3] == [losses for losses, _ in below]


def test_packing_is_close_and_not_the_same() -> None:
    plain = config(2, micro=4)
    expected, found = train_cases([plain, {**plain, **section({"packing": "int8"})}], 4)
    assert found[0] != expected[0]
    assert found[0] == pytest.approx(expected[0], rel=0.02)


def test_an_evaluation_between_micro_steps_changes_nothing() -> None:
    results: list[list[float]] = []
    for keys in ({"policy": "none"}, {"policy": "sqrt", "cpu_checkpointing": True}):
        torch.manual_seed(7)
        engine = make_engine({**config(1, micro=2), **section(keys)}, model=DropGPT())
        losses: list[float] = []
        for step in range(3):
            inputs, targets = batches(step, samples=2)
            with torch.no_grad():
                engine(inputs)
            loss = loss_of(engine(inputs), targets)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        results.append(losses)
    assert results[0] == results[1]
