"""After an update the parameters that forward reads are the masters', rounded where dtypes differ."""

from __future__ import annotations

import pytest
import torch

from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.optim.groups import assign_groups
from dsrun.runtime.precision.policy import BF16, FP32, PrecisionPolicy
from dsrun.runtime.zero.creation.units import build_store, build_units
from dsrun.runtime.zero.params.publisher import publish
from dsrun.runtime.zero.units.find import find_units
from dsrun.runtime.zero.units.plan import ZeroPlan
from support.models import TinyGPT


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", [FP32, BF16])
@pytest.mark.parametrize("size", [1, 3])
def test_every_rank_reads_the_new_values(stage: int, precision: PrecisionPolicy, size: int) -> None:
    models = [TinyGPT(width=40, layers=2) for _ in range(size)]
    plan = ZeroPlan.of_stage(stage)

    def body(collectives: LoopbackCollectives) -> tuple[list[list[torch.Tensor]], dict[str, int]]:
        model = models[collectives.rank]
        groups = assign_groups(model, None).group_of
        units = build_units(
            find_units(model),
            plan,
            lambda _: collectives,
            precision=precision,
            device=torch.device("cpu"),
            group_of=groups,
        )
        store = build_store(units, plan, collectives)
        for unit in units:
            start, stop = unit.owned
            unit.master.copy_(torch.arange(start, stop) / 7)
        collectives.traffic.calls.clear()
        publish(units, plan, store)
        sent = dict(collectives.traffic.calls)
        found: list[list[torch.Tensor]] = []
        for unit in units:
            store.acquire(unit)
            found.append([param.detach().clone() for param in unit.params])
            whole = torch.arange(unit.layout.padded_numel) / 7
            for param, view in zip(found[-1], unit.views(whole.to(precision.compute)), strict=True):
                assert torch.equal(param, view)
            store.release(unit)
        return found, sent

    for found, sent in LoopbackWorld(size).run(body):
        # At stage 3 the rest unit alone is gathered at once, for it may be read without the engine knowing.
        assert (
            sent == {0: {}, 1: {"all_gather": len(found)}, 2: {"all_gather": len(found)}, 3: {"all_gather": 1}}[stage]
        )
