"""Optimizers that know tensors, in pipeline stages: weights that stages share are updated as those of one stage."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dsrun
from dsrun.errors import ModelError
from dsrun.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.parallel.pipeline.ranks import JobRank
from support.pipelines import CPU, WIDTH, Case, Ended, Layer, Model, Tokens, TwoTied, assert_same, loss_fn, run, train
from support.threaded_ranks import ranks_of_threads

CASES = [
    Case(2, tied=True, zero=1),
    Case(2, "interleaved", 2, data=2, tied=True, zero=2),
    Case(4, tied=True, zero=1),
    Case(2, "breadth_first", 2, data=2, tied=True, zero=3),
]


OPTIMIZERS = ["Lamb", "Adafactor", "AdamMini", "Muon"]
BY_TURNS = pytest.mark.soak("each optimizer alone with ZeRO 1, and with data ranks and ZeRO 2 or 3")


def _settings(name: str, stage: int) -> dict[str, Any]:
    return {
        "optimizer": {"type": name, "params": {"lr": 1e-2}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }


@pytest.mark.parametrize(
    ("name", "case"),
    [
        # The first optimizer has the first and the last case, the next one those between, and so on.
        pytest.param(name, case, id=f"{name}-{case}", marks=() if place in ((0, 3), (1, 2))[number % 2] else BY_TURNS)
        for number, name in enumerate(OPTIMIZERS)
        for place, case in enumerate(CASES)
    ],
)
def test_weights_that_stages_share_have_the_bits_of_one_stage(name: str, case: Case) -> None:
    one = run(Case(data=case.data, tied=True, more=_settings(name, 0)))[0]
    assert_same(run(replace(case, more=_settings(name, case.zero))), one)


@pytest.mark.parametrize("case", [Case(2, zero=1), Case(2, "breadth_first", 2, data=2, zero=3)], ids=str)
def test_weights_that_stages_register_in_another_order_are_told_apart(case: Case) -> None:
    zero = {"stage": case.zero, "stage3_param_persistence_threshold": 0}
    more: dict[str, Any] = {"optimizer": {"type": "Lamb", "params": {"lr": 1e-2}}}
    one = run(Case(data=case.data, more=more), make=TwoTied)[0]
    ties = {"head.weight": "embedding.weight", "mix.weight": "positions.weight"}
    for found in run(replace(case, more={**more, "zero_optimization": zero}), make=TwoTied):
        assert (found.losses, found.norms) == (one.losses, one.norms)
        for name, value in found.weights.items():
            assert torch.equal(value, one.weights[ties.get(name, name)]), name


def test_muon_refuses_a_matrix_that_stages_share_in_slices() -> None:
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(WIDTH, WIDTH)

        def forward(self, x_BTD: Tensor) -> Tensor:
            return self.mix(x_BTD)

    def model(rank: int) -> nn.Module:
        specs = [
            LayerSpec(Tokens),
            TiedLayerSpec("mix", Mixer, tied_weight_attr=["mix.weight"]),
            LayerSpec(Layer, 0.0),
            TiedLayerSpec("mix", Mixer, tied_weight_attr=["mix.weight"]),
            LayerSpec(nn.Linear, WIDTH, 37),
        ]
        return PipelineModule(specs, num_stages=2, loss_fn=loss_fn, job=JobRank(rank, 2))

    muon = {"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}}
    with pytest.raises(ModelError, match=r"several stages share `tied_modules\.mix\.mix\.weight`\nhint: .*stage` to 0"):
        run(Case(2, zero=1, more=muon), of_rank=model)
    whole = run(Case(2, more=muon), of_rank=model)
    assert all(torch.isfinite(torch.tensor(one.losses)).all() for one in whole)


def test_the_blocks_of_weights_that_stages_share_are_whole_on_each_of_them() -> None:
    """A row of Adam-mini lies in one stage's slice here, and yet every stage saves all rows."""

    def blocks(engine: Any, data_rank: int) -> dict[str, Tensor]:
        train(engine, data_rank)
        optimizer = engine._update.shards.torch_optimizer
        return {entry.name: entry.tensor.clone() for entry in optimizer.entries() if entry.role == "exp_avg_sq_blocks"}

    more = {"optimizer": {"type": "AdamMini", "params": {"lr": 1e-2}}}
    (one,) = run(Case(tied=True, more=more), blocks)
    for found in run(Case(2, tied=True, zero=1, more=more), blocks):
        assert found["embedding.weight"].count_nonzero() > 0
        assert all(torch.equal(value, one[name]) for name, value in found.items())


def _in_two_groups(case: Case) -> list[Ended]:
    """Trains the weight that both ends use in another group than the blocks."""
    torch.manual_seed(7)
    first = Model(tied=True, dropout=0.0)
    models = [copy.deepcopy(first) for _ in range(case.ranks)]

    def rank(collectives: LoopbackCollectives) -> Ended:
        model = models[collectives.rank]
        blocks = list(model.blocks.parameters())
        groups = [
            {"params": [model.embedding.weight, *model.norm.parameters()], "lr": 0.1},
            {"params": [model.positions.weight, *blocks], "weight_decay": 0.5},
        ]
        engine = dsrun.initialize(model=model, model_parameters=groups, config=case.config())[0]
        try:
            return train(engine, collectives.rank % case.data)
        finally:
            engine.destroy()

    with ranks_of_threads(CPU) as threads:
        return LoopbackWorld(case.ranks).run(lambda collectives: threads(collectives, rank))


@pytest.mark.parametrize("case", [*CASES[::3], Case(2, "zbv", 2, tied=True, zero=1)], ids=str)
def test_weights_of_two_groups_have_the_bits_of_one_stage(case: Case) -> None:
    """Under `zbv` one rank has both uses of a weight."""
    assert_same(_in_two_groups(case), _in_two_groups(Case(data=case.data, tied=True))[0])
