"""Rank 0's values reach every rank's buffers, in the dtypes of the policy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.optim.groups import assign_groups
from dsrun.runtime.precision.policy import BF16, FP32, PrecisionPolicy
from dsrun.runtime.zero.creation.frozen import place_frozen
from dsrun.runtime.zero.creation.units import build_units
from dsrun.runtime.zero.units.find import find_units
from dsrun.runtime.zero.units.plan import ZeroPlan
from support.models import TinyGPT

CPU = torch.device("cpu")


class Buffers(nn.Module):
    """Buffers and frozen parameters of every awkward kind."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.register_buffer("flag", torch.tensor(rank == 0))
        self.register_buffer("positions", (torch.arange(4) + rank).expand(3, -1))
        self.register_buffer("none", None)
        self.register_buffer("empty", torch.zeros(0, 2))
        self.register_buffer("rates", torch.full((3, 2), 1.0 + rank).t())
        self.frozen = nn.Parameter(torch.full((5,), float(rank)), requires_grad=False)
        self.trained = nn.Parameter(torch.zeros(2))


@pytest.mark.parametrize("precision", [FP32, BF16])
def test_buffers_and_frozen_parameters_take_rank_0s_values(precision: PrecisionPolicy) -> None:
    def body(collectives: LoopbackCollectives) -> Buffers:
        model = Buffers(collectives.rank)
        place_frozen(model, collectives, precision=precision, device=CPU)
        return model

    for model in LoopbackWorld(3).run(body):
        assert bool(model.flag)
        assert model.flag.dtype == torch.bool
        assert model.positions.tolist() == [[0, 1, 2, 3]] * 3
        assert model.positions.dtype == torch.int64
        assert model.empty.shape == (0, 2)
        assert model.rates.dtype == model.frozen.dtype == precision.compute
        assert model.rates.tolist() == [[1.0] * 3] * 2
        assert model.frozen.tolist() == [0.0] * 5
        assert model.trained.dtype == torch.float32, "units take trained parameters over"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", [FP32, BF16])
def test_owned_ranges_of_all_ranks_are_rank_0s_values_once(stage: int, precision: PrecisionPolicy) -> None:
    torch.manual_seed(0)
    models = [TinyGPT(width=40, layers=2) for _ in range(3)]
    expected = {name: param.detach().clone() for name, param in models[0].named_parameters()}
    plan = ZeroPlan.of_stage(stage)

    def body(collectives: LoopbackCollectives) -> list[tuple[int, int, torch.Tensor]]:
        model = models[collectives.rank]
        groups = assign_groups(model, None).group_of
        units = build_units(
            find_units(model), plan, lambda _: collectives, precision=precision, device=CPU, group_of=groups
        )
        for unit in units:
            assert unit.master.dtype == unit.grad_sum.dtype == torch.float32
            assert unit.shard.dtype == precision.compute
            shared = unit.master.data_ptr() == (unit.shard if plan.shard_optimizer else unit.flat_param).data_ptr()
            assert shared == (precision is FP32), "no second copy where the optimizer updates the parameters"
        return [(*unit.owned, unit.master) for unit in units]

    ranks = LoopbackWorld(3).run(body)
    units = find_units(TinyGPT(width=40, layers=2))
    for index, spec in enumerate(units):
        owned = [rank[index] for rank in ranks]
        flat = torch.cat([master for _, _, master in owned]) if plan.shard_optimizer else owned[0][2]
        if plan.shard_optimizer:
            assert [start for start, _, _ in owned[1:]] == [stop for _, stop, _ in owned[:-1]]
        position = 0
        for name, param in spec.params:
            position = -(-position // 64) * 64
            assert torch.equal(flat[position : position + param.numel()].view(param.shape), expected[name]), name
            position += param.numel()
        assert not bool(flat[position:].any())
