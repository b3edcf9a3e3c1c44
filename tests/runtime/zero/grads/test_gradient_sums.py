"""`gradient_allreduce_op: sum` adds gradients up over the ranks: what a rate as many times as large does with means."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsrun.config.findings import Severity
from dsrun.config.load import inspect
from dsrun.runtime.mesh.loopback import LoopbackWorld
from support.models import TinyGPT
from support.threaded_ranks import Trained, assert_same_bits, train_in
from support.training import config

RANKS = 2


def trained(stage: int, op: str, *, offload: bool = False, **more: Any) -> list[Trained]:
    settings = config(stage, micro=2, optimizer="SGD", gradient_clipping=0, gradient_allreduce_op=op, **more)
    settings["optimizer"]["params"] = {"lr": 0.01 if op == "sum" else 0.01 * RANKS}
    if offload:
        settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    return train_in(
        LoopbackWorld(RANKS), settings, device=torch.device("cpu"), model=lambda: TinyGPT(width=20, layers=1), steps=2
    )


@pytest.mark.parametrize(
    ("stage", "more"),
    [
        (0, {}),
        (2, {"accumulation": 2}),
        (3, {"bf16": True}),
        (3, {"communication_data_type": "bf16"}),
        (1, {"offload": True}),
        (3, {"offload": True, "accumulation": 2}),
    ],
)
def test_sums_are_the_mean_times_the_ranks(stage: int, more: dict[str, Any]) -> None:
    mean, total = (trained(stage, op, **more) for op in ("mean", "sum"))
    for rank in total:
        rank.norms = [norm / RANKS for norm in rank.norms]
    assert_same_bits(total, mean)


def test_parts_of_a_division_that_sums_have_not_are_said_to_do_nothing() -> None:
    given = {"prescale_gradients": True, "gradient_predivide_factor": 4.0, "gradient_allreduce_op": "sum"}
    found = inspect({"train_micro_batch_size_per_gpu": 1, **given}).findings
    assert [finding.message for finding in found if finding.severity is Severity.WARNING] == [
        f'`{name}` does nothing: `gradient_allreduce_op` is "sum", and nothing is divided'
        for name in ("prescale_gradients", "gradient_predivide_factor")
    ]
    divided = trained(1, "sum", prescale_gradients=True, gradient_predivide_factor=4.0)
    assert_same_bits(divided, trained(1, "sum"))
