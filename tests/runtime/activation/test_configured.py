"""DeepSpeed's functions, as Megatron's scripts call them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import dsrun
from dsrun import checkpointing
from dsrun.errors import ConfigError, InputError, ModelError
from dsrun.runtime.activation.configured import _process
from dsrun.runtime.engine.compose.distributed import init_distributed
from support.inside_engine import hooks_of
from support.ranks import run_ranks
from support.training import config, make_engine

WIDTH = 40


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    checkpointing.reset(forget=True)
    checkpointing.get_cuda_rng_tracker().reset()


class Mpu:
    """What Megatron calls mpu."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def get_model_parallel_group(self) -> Any:
        return self._group


class Chunked(nn.Module):
    """A transformer that recomputes its layers in chunks of two, as Megatron-LM does."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(layers))

    def chunk(self, start: int) -> Any:
        def run(hidden: Tensor, mask: Tensor) -> Tensor:
            for layer in self.layers[start : start + 2]:
                hidden = hidden + F.dropout(layer(hidden), 0.2) * mask
            return hidden

        return run

    def forward(self, hidden: Tensor, *, recompute: bool = True) -> Tensor:
        mask = torch.ones(WIDTH)
        for start in range(0, len(self.layers), 2):
            run = self.chunk(start)
            hidden = checkpointing.checkpoint(run, hidden, mask) if recompute else run(hidden, mask)
        return hidden


def gradients(recompute: bool) -> list[Tensor]:
    torch.manual_seed(3)
    model = Chunked()
    hidden = torch.randn(32, WIDTH, requires_grad=True)
    model(hidden, recompute=recompute).square().sum().backward()
    assert hidden.grad is not None
    return [hidden.grad, *(param.grad for param in model.parameters() if param.grad is not None)]


@pytest.mark.parametrize(
    "keys",
    [
        None,
        {},
        {"checkpoint_in_cpu": True},
        {"contiguous_checkpointing": True, "num_checkpoints": 2},
        {"synchronize": True, "profile": True},
        {"deepspeed_config": {"train_batch_size": 1, "activation_checkpointing": {"policy": "selective"}}},
    ],
)
def test_every_way_of_keeping_gives_the_bits_of_plain_training(keys: dict[str, Any] | None) -> None:
    if keys is not None:
        checkpointing.configure(None, **keys)
    assert checkpointing.is_configured() == (keys is not None)
    assert all(torch.equal(a, b) for a, b in zip(gradients(True), gradients(False), strict=True))


def cut_over_two_ranks() -> tuple[bool, int]:
    """A rank's share of a job whose two ranks are one tensor-parallel group."""
    init_distributed()
    checkpointing.configure(Mpu(dist.group.WORLD), partition_activations=True, checkpoint_in_cpu=True)
    same = all(torch.equal(a, b) for a, b in zip(gradients(True), gradients(False), strict=True))
    assert _process.axis is not None
    return same, _process.axis.traffic.calls["all_gather"]


def test_kept_inputs_are_cut_over_the_group_that_mpu_gives() -> None:
    assert run_ranks(2, cut_over_two_ranks) == [(True, 2)] * 2


def test_arguments_go_before_the_configs_keys() -> None:
    given = {"train_batch_size": 1, "activation_checkpointing": {"profile": False}}
    checkpointing.configure(None, deepspeed_config=given, profile=True)
    gradients(True)
    assert "Chunked.chunk.<locals>.run" in checkpointing.profile_table()
    checkpointing.reset()
    assert checkpointing.is_configured()


def test_a_script_that_has_configured_chooses_its_calls_and_a_policy_goes_before() -> None:
    checkpointing.configure(None, checkpoint_in_cpu=True)
    keys = {"activation_checkpointing": {"cpu_checkpointing": True}}
    engine = make_engine({**config(0, micro=1), **keys})
    assert hooks_of(engine).activations is None
    engine.destroy()
    engine = make_engine({**config(0, micro=1), "activation_checkpointing": {"policy": "every_block"}})
    assert hooks_of(engine).activations is not None


def test_bad_combinations_are_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match="partition_activations` is true without tensor parallelism") as refused:
        checkpointing.configure(None, partition_activations=True)
    assert "configure(mpu, partition_activations=True)" in str(refused.value.hint)
    with pytest.raises(ConfigError, match="contiguous_memory_optimization` is true and `number_checkpoints`"):
        checkpointing.configure(None, contiguous_checkpointing=True)
    with pytest.raises(InputError, match="mpu is a object without get_tensor_model_parallel_group"):
        checkpointing.configure(object())
    section = {"train_batch_size": 1, "activation_checkpointing": {"policy": "sqrt"}}
    with pytest.raises(InputError, match="policy` is 'sqrt', which chooses among blocks"):
        checkpointing.configure(None, deepspeed_config=section)
    with pytest.raises(ModelError, match="nothing was measured"):
        checkpointing.profile_table()
    assert not checkpointing.is_configured()


def test_named_generators_are_replayed_in_a_recomputed_call() -> None:
    checkpointing.model_parallel_cuda_manual_seed(5)
    tracker = checkpointing.get_cuda_rng_tracker()

    def body(x: Tensor) -> Tensor:
        with tracker.fork():
            x = F.dropout(x * x, 0.5)
        return x.sin()

    def run(recompute: bool) -> Tensor:
        checkpointing.model_parallel_cuda_manual_seed(5)
        x = torch.linspace(0, 1, 64, requires_grad=True)
        (checkpointing.checkpoint(body, x) if recompute else body(x)).sum().backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(run(True), run(False))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo asks for it
def test_a_compiler_sees_torchs_own_checkpoint() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, WIDTH)
    compiled: Any = torch.compile(lambda x: checkpointing.checkpoint(layer, x).sin(), backend="aot_eager")
    x = torch.randn(3, WIDTH, requires_grad=True)
    compiled(x).sum().backward()
    found = x.grad
    x.grad = None
    layer(x).sin().sum().backward()
    assert found is not None
    assert x.grad is not None
    torch.testing.assert_close(found, x.grad)


def test_the_face_has_what_it_lists() -> None:
    assert {name for name in dir(checkpointing) if hasattr(checkpointing, name)} == set(checkpointing.__all__)
    assert dsrun.checkpointing is checkpointing
