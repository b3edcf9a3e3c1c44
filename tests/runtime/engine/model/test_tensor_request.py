"""What `tp_model_init` is given stays with the model, and `initialize` is held to it; the config may say the same."""

from __future__ import annotations

import copy
import importlib
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dsrun
from dsrun.config.load import ScriptTensorParallel
from dsrun.errors import ConfigError, InputError
from dsrun.runtime.engine.model.tensor_request import request_of
from support.ranks import run_ranks

SIZED = ScriptTensorParallel(2, "fp32")


def test_arguments_are_kept_with_the_model_and_nothing_is_done() -> None:
    model = nn.Linear(2, 2)
    before = copy.deepcopy(model.state_dict())
    assert dsrun.tp_model_init(model, 2, torch.float32, {"ignored": True}) is model
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    found = request_of(model)
    assert found is not None
    assert (found.terms, found.group) == (SIZED, None)
    assert request_of(nn.Linear(2, 2)) is None


def test_a_part_of_the_model_is_as_good_as_all_of_it() -> None:
    """As where a script wraps it between the two calls."""
    part = dsrun.tp_model_init(nn.Linear(2, 2), 2, torch.float32)
    found = request_of(nn.Sequential(nn.ReLU(), part))
    assert found is not None
    assert found.terms == SIZED


def test_copies_of_the_model_leave_the_group_behind() -> None:
    """Process groups cannot be copied, and a copied model may be trained too."""
    model = dsrun.tp_model_init(nn.Linear(2, 2), 2, torch.float32, tp_group=(one for one in "no copy"))
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        found = request_of(made)
        assert found is not None
        assert (found.terms, found.group) == (SIZED, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, 2, torch.float32), "model is a NoneType"),
        ((nn.Linear(1, 1), 0, torch.float32), "tp_size is 0; expected a whole number of 1 or more"),
        ((nn.Linear(1, 1), "2", torch.float32), "tp_size is '2'; expected a whole number"),
        ((nn.Linear(1, 1), 2, torch.float64), "dtype is torch.float64; expected torch.float32"),
    ],
)
def test_what_is_no_such_argument_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        dsrun.tp_model_init(*arguments)


@pytest.mark.parametrize(("size", "dtype"), [(4, torch.float32), (2, torch.bfloat16)])
def test_two_calls_that_differ_are_refused(size: int, dtype: torch.dtype) -> None:
    """DeepSpeed raises a ValueError."""
    part = nn.Linear(2, 2)
    model = nn.Sequential(nn.ReLU(), part)
    dsrun.tp_model_init(model, 2, torch.float32)
    dsrun.tp_model_init(model, 2, torch.float32)
    with pytest.raises(ValueError, match="called with tp_size 2 and dtype fp32 before, and now with tp_size"):
        dsrun.tp_model_init(model, size, dtype)
    with pytest.raises(InputError, match="another tp_group"):
        dsrun.tp_model_init(model, 2, torch.float32, tp_group=object())
    dsrun.tp_model_init(part, size, dtype)
    with pytest.raises(InputError, match="called with tp_size"):
        request_of(model)


MICRO: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}


def _initialize(config: dict[str, Any], size: int, group_of: str, dtype: str) -> Any:
    """Returns (samples, ranks of the layer, of the data), or the error, of a rank whose script has said a size.

    Layers are left whole: whether and how they are cut is tested elsewhere.
    """
    root = importlib.import_module("dsrun.runtime.engine.initialize")
    setattr(root, "CUT_BY_AXES", ())  # noqa: B010 - of this process alone
    dsrun.init_distributed("gloo")
    rank = dist.get_rank()
    ranks = {"neighbours": [rank // 2 * 2, rank // 2 * 2 + 1], "others": [rank % 2, rank % 2 + 2]}
    group = dist.new_group(ranks[group_of], use_local_synchronization=True) if group_of else None
    dist.barrier()  # or a rank that is refused could be gone while others still join their group
    model = dsrun.tp_model_init(nn.Linear(2, 2), size, getattr(torch, dtype), tp_group=group)
    try:
        engine: Any = dsrun.initialize(model=model, config=config)[0]
    except InputError as error:
        return str(error), error.hint
    found = engine.train_batch_size(), engine.mp_world_size, engine.dp_world_size, engine.autotp_size()
    engine.destroy()
    return found


@pytest.mark.parametrize("section", [{}, {"tensor_parallel": {"autotp_size": 2}}, {"tensor_parallel": {}}])
def test_the_ranks_of_a_layer_share_their_samples(section: dict[str, Any]) -> None:
    """The batch is that of the ranks that are left for data, whether the config or the script says so."""
    assert run_ranks(4, _initialize, {**MICRO, **section}, 2, "", "float32") == [(2, 2, 2, 2)] * 4


def test_a_size_of_one_is_no_parallelism() -> None:
    assert run_ranks(2, _initialize, MICRO, 1, "", "float32") == [(2, 1, 2, 1)] * 2


@pytest.mark.parametrize(
    ("config", "dtype", "message"),
    [
        (
            {"tensor_parallel": {"autotp_size": 4}},
            "float32",
            "`tensor_parallel.autotp_size` is 4, and the script's tp_model_init has 2; expected the same number",
        ),
        (
            {"tensor_parallel": {"autotp_size": 0}},
            "float32",
            "`tensor_parallel.autotp_size` is 0, and the script's tp_model_init has 2",
        ),
        (
            {"bf16": {"enabled": True}},
            "float16",
            "the script's tp_model_init has dtype fp16, and `bf16.enabled` is true: the model is in bf16",
        ),
        ({}, "bfloat16", "has dtype bf16, and neither `bf16` nor `fp16` is enabled: the model is in fp32"),
    ],
)
def test_a_config_that_says_something_else_is_refused(config: dict[str, Any], dtype: str, message: str) -> None:
    model = dsrun.tp_model_init(nn.Linear(2, 2), 2, getattr(torch, dtype))
    with pytest.raises(ConfigError) as raised:
        dsrun.initialize(model=model, config={**MICRO, **config})
    assert any(message in problem.message for problem in raised.value.problems)


def test_ranks_that_do_not_divide_by_it_are_refused() -> None:
    model = dsrun.tp_model_init(nn.Linear(2, 2), 2, torch.float32)
    with pytest.raises(ConfigError, match="1 rank does not divide by tensor parallel 2"):
        dsrun.initialize(model=model, config=MICRO)


def test_a_group_of_neighbours_is_taken() -> None:
    assert run_ranks(4, _initialize, MICRO, 2, "neighbours", "float32") == [(2, 2, 2, 2)] * 4


def test_a_group_of_other_ranks_is_refused() -> None:
    for rank, found in enumerate(run_ranks(4, _initialize, MICRO, 2, "others", "float32")):
        own, peers = ("0, 2", "1, 3")[rank % 2], ("0, 1", "2, 3")[rank // 2]
        message, hint = found
        assert message == (
            f"tp_model_init: tp_group has the ranks {own}; rank {rank} shares its layers with the ranks {peers}"
        )
        assert "neighbours" in hint
