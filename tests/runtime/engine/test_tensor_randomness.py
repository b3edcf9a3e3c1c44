"""Random numbers of ranks that share layers go on after a load; in processes, for threads share generators."""

from __future__ import annotations

import functools
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import dsrun
from dsrun.checkpoint_files.index.value import INDEX_FILE
from dsrun.checkpoint_files.parse import read_index
from dsrun.runtime.activation.configured import named_generators
from dsrun.runtime.activation.recompute.rng import MODEL_PARALLEL_NAME
from support.llama import Mlp, TinyLlama, settings, train
from support.ranks import run_ranks


def generators() -> dict[str, Any]:
    """Returns how this rank's generators stand."""
    return {
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "named": {name: state.tolist() for name, state in named_generators().get_states().items()},
    }


def _ran(tensor: int, folder: str, saves: bool) -> dict[str, Any]:
    """One rank of a job that saves, or goes on from there; scripts seed by data rank, as Megatron's do."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    torch.manual_seed(11)
    config = settings(tensor, stage=1, tensor_parallel={"check": False})
    engine: Any = dsrun.initialize(model=TinyLlama(dropout=0.2), config=config)[0]
    try:
        dsrun.checkpointing.model_parallel_cuda_manual_seed(7, tensor_rank=rank % tensor)
        torch.manual_seed((100 if saves else 200) + engine.get_data_parallel_rank())
        random.seed(rank)
        if saves:
            train(engine, rank // tensor, range(1))
            found = generators()
            engine.save_checkpoint(folder, tag="x")
            return found
        engine.load_checkpoint(folder, tag="x")
        found = generators()
        losses = train(engine, 0, range(1, 3)).losses  # the same samples: what differs is dropout
        return {**found, "losses": losses, "end": torch.get_rng_state().tolist()}
    finally:
        engine.destroy()


#: Makes a job of so many ranks, of which so many share layers, save; returns what each rank had then, and the folder.
Save = Callable[[int, int], tuple[list[dict[str, Any]], Path]]


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Save:
    """Each job saves once, whichever tests go on from there."""

    @functools.cache
    def once(ranks: int, tensor: int) -> tuple[list[dict[str, Any]], Path]:
        folder = tmp_path_factory.mktemp("saved")
        return run_ranks(ranks, _ran, tensor, str(folder), True), folder

    return once


@pytest.mark.parametrize(
    ("saved", "now"),
    [
        ((2, 1), (2, 2)),
        ((4, 2), (4, 4)),
        ((4, 2), (2, 1)),
        pytest.param((4, 2), (4, 1), marks=pytest.mark.soak("2 ranks, 1 a layer, go on from there")),
        ((1, 1), (2, 2)),
        ((2, 1), (4, 2)),
        ((4, 2), (4, 2)),
    ],
    ids=lambda ranks: f"{ranks[0]} ranks, {ranks[1]} a layer",
)
def test_ranks_that_share_layers_draw_alike_after_a_load(
    save: Save, saved: tuple[int, int], now: tuple[int, int]
) -> None:
    before, folder = save(*saved)
    after = run_ranks(now[0], _ran, now[1], str(folder), False)
    assert read_index(folder / "x").values["mesh"] == {"tensor": saved[1]}
    tensor = now[1]
    replicas = [after[first : first + tensor] for first in range(0, now[0], tensor)]
    for number, replica in enumerate(replicas):
        for key in ("torch", "losses", "end"):
            assert all(rank[key] == replica[0][key] for rank in replica), (number, key)
        if saved[1] != tensor:
            assert all(rank["python"] == replica[0]["python"] for rank in replica)
        if number < saved[0] // saved[1]:
            assert replica[0]["torch"] == before[number * saved[1]]["torch"]
        named = [rank["named"][MODEL_PARALLEL_NAME] for rank in replica]
        assert len({str(state) for state in named}) == tensor, "each rank has other parts"
        assert named == [rank["named"][MODEL_PARALLEL_NAME] for rank in replicas[0]]
    for key in ("torch", "losses", "end"):
        assert len({str(replica[0][key]) for replica in replicas}) == len(replicas), key
    if saved == now:
        for mine, its in zip(after, before, strict=True):
            assert {key: mine[key] for key in its} == its


def test_in_a_checkpoint_of_an_earlier_version_nothing_shared_layers(save: Save, tmp_path: Path) -> None:
    before, folder = save(2, 1)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    index = read_index(tmp_path / "x")
    del index.values["mesh"]
    (tmp_path / "x" / INDEX_FILE).write_bytes(index.to_bytes())
    assert [rank["torch"] for rank in run_ranks(2, _ran, 2, str(tmp_path), False)] == [before[0]["torch"]] * 2


class RecomputedMlp(Mlp):
    """An MLP whose columns may be computed again.

    Args:
        recomputes: whether they are.
    """

    def __init__(self, *, recomputes: bool) -> None:
        super().__init__(64, 101, bias=True)
        self.recomputes = recomputes

    def forward(self, x_BTD: Tensor) -> Tensor:
        def inner(x_BTD: Tensor) -> Tensor:
            return F.silu(self.gate_proj(x_BTD)) * F.dropout(self.up_proj(x_BTD), 0.2)

        made: Any = checkpoint(inner, x_BTD, use_reentrant=False) if self.recomputes else inner(x_BTD)
        return self.down_proj(made)


def _trained(recomputes: bool) -> tuple[list[float], list[str]]:
    """Losses of one rank, and how its generator stands before each step."""
    torch.set_num_threads(1)
    torch.manual_seed(11)
    model = TinyLlama(dropout=0.2)
    for layer in model.layers:
        layer.mlp = RecomputedMlp(recomputes=recomputes)
    engine: Any = dsrun.initialize(model=model, config=settings(2, stage=1, tensor_parallel={"check": False}))[0]
    losses: list[float] = []
    states: list[str] = []
    try:
        for step in range(3):
            states.append(str(torch.get_rng_state().tolist()))
            losses += train(engine, 0, range(step, step + 1)).losses
        return losses, states
    finally:
        engine.destroy()


def test_a_part_of_a_block_that_is_computed_again_changes_no_loss_and_no_state() -> None:
    plain = run_ranks(2, _trained, False)
    assert plain[0] == plain[1]
    assert len(set(plain[0][1])) == 3
    assert run_ranks(2, _trained, True) == plain
