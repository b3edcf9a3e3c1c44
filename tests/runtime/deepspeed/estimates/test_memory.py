"""Estimates of memory are the numbers and tables recorded from DeepSpeed 0.19.8, with a line about `dsrun plan`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dsrun
from dsrun.runtime.deepspeed.estimates import memory as estimates

BILLIONS, LAYER = 7 * 10**9, 131 * 10**6


class Tied(nn.Module):
    """Embeddings and head share their memory."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.last = nn.Linear(8, 16)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((BILLIONS, LAYER, 8, 2, True, True, True), (94500000000, 524000000, 524000000)),
        ((BILLIONS, LAYER, 8, 2, True, True, False), (336000000000, 524000000, 524000000)),
        ((BILLIONS, LAYER, 8, 2, True, False, True), (84000000000, 1399000000, 524000000)),
        ((BILLIONS, LAYER, 8, 1, False, False, False), (336000000000, 16274000000, 524000000)),
        ((BILLIONS, LAYER, 8, 1, False, False, True), (6288000000, 16274000000, 524000000)),
        ((1001, 13, 3, 4, False, False, True), (234, 1553, 52)),
    ],
)
def test_stage_3_takes_what_deepspeed_says(arguments: tuple[int, ...], expected: tuple[int, int, int]) -> None:
    assert estimates.estimate_zero3_model_states_mem_needs(*arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((BILLIONS, 8, 2, True), (672000000000, 14000000000)),
        ((BILLIONS, 1, 1, True), (168000000000, 14000000000)),
        ((BILLIONS, 8, 1, False), (336000000000, 29750000000)),
        ((1001, 3, 4, False), (18018, 3503)),
    ],
)
def test_stage_2_takes_what_deepspeed_says(arguments: tuple[int, int, int, bool], expected: tuple[int, int]) -> None:
    assert estimates.estimate_zero2_model_states_mem_needs(*arguments) == expected


_TABLE = """\
Estimated memory needed for params, optim states and gradients for a:
HW: Setup with 2 nodes, 8 GPUs per node.
SW: Model with 2783M total params, 131M largest layer params.
  per CPU  |  per GPU |   Options
   34.99GB |   0.49GB | offload_param=cpu , offload_optimizer=cpu , zero_init=1
  124.41GB |   0.49GB | offload_param=cpu , offload_optimizer=cpu , zero_init=0
   31.10GB |   0.81GB | offload_param=none, offload_optimizer=cpu , zero_init=1
  124.41GB |   0.81GB | offload_param=none, offload_optimizer=cpu , zero_init=0
    5.86GB |   3.40GB | offload_param=none, offload_optimizer=none, zero_init=1
  124.41GB |   3.40GB | offload_param=none, offload_optimizer=none, zero_init=0
dsrun keeps other buffers: `dsrun plan MODEL --config FILE` says what it needs, with activations
Estimated memory needed for params, optim states and gradients for a:
HW: Setup with 1 node, 1 GPU per node.
SW: Model with 2783M total params.
  per CPU  |  per GPU |   Options
   62.20GB |   5.18GB | offload_optimizer=cpu
   15.55GB |  51.84GB | offload_optimizer=none
dsrun keeps other buffers: `dsrun plan MODEL --config FILE` says what it needs, with activations
"""


def test_tables_are_printed_with_a_line_about_what_dsrun_knows_better(capsys: pytest.CaptureFixture[str]) -> None:
    estimates.estimate_zero3_model_states_mem_needs_all_cold(2783 * 10**6, LAYER, num_gpus_per_node=8, num_nodes=2)
    estimates.estimate_zero2_model_states_mem_needs_all_cold(2783 * 10**6)
    assert capsys.readouterr().out.replace("cpu \n", "cpu\n") == _TABLE


def test_a_model_is_counted_with_shared_memory_once(capsys: pytest.CaptureFixture[str]) -> None:
    # As 0.19.8's `model_to_params`.
    assert estimates.total_and_largest_params(Tied()) == (544, 400)
    assert estimates.total_params(Tied()) == 544
    estimates.estimate_zero3_model_states_mem_needs_all_live(Tied())
    estimates.estimate_zero2_model_states_mem_needs_all_live(Tied(), num_nodes=2)
    assert capsys.readouterr().out.count("0M total params") == 2


def test_a_model_without_memory_and_one_in_slices_are_counted_too() -> None:
    with torch.device("meta"):
        assert estimates.total_params(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))) == 144
    with dsrun.zero.Init():
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    assert estimates.total_and_largest_params(model) == (144, 72)
