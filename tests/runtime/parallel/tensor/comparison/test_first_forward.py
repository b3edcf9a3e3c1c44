"""A right plan passes in the first forward, and nothing is said, drawn or kept for it."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.parallel.tensor.comparison.first_forward import compare_in_first_forward
from dsrun.runtime.parallel.tensor.comparison.regions import kinds_of_regions
from dsrun.runtime.parallel.tensor.styles import COLUMN, GATHERED_COLUMN, ROW, Style
from support.compared_blocks import (
    DEEPSEEK,
    IDS,
    LATENT,
    RIGHT,
    Block,
    Stack,
    X,
    changed,
    checked,
    forward,
    of_all_blocks,
    refusal,
    train,
)
from support.cut_models import MODULES, WITH_VOCABULARY, cut_over, model_of, plan_of


@pytest.mark.parametrize(
    ("family", "values", "modules"),
    [
        ("Llama", {}, WITH_VOCABULARY),
        ("Llama", {"attention_bias": True, "mlp_bias": True}, MODULES),
        ("Qwen3", {"head_dim": 6}, MODULES),
        ("Mixtral", {"num_local_experts": 4, "num_key_value_heads": 4}, MODULES),
        ("DeepseekV2", DEEPSEEK, LATENT),
    ],
    ids=["Llama", "Llama with biases", "Qwen3", "Mixtral", "DeepSeek-V2"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.usefixtures("transformers")
def test_a_right_plan_passes_and_nothing_is_said(
    size: int, dtype: torch.dtype, family: str, values: dict[str, Any], modules: Mapping[str, Style]
) -> None:
    """With four ranks, some of these models have fewer heads of keys than ranks."""
    model = model_of(family, **values).to(dtype)
    expected = train(copy.deepcopy(model))
    for loss, said, mine in checked(model, plan_of(model, modules), size, train):
        assert said == []
        torch.testing.assert_close(loss, expected, rtol=0.02 if dtype is torch.bfloat16 else 1e-5, atol=0)
        assert all(type(one) is type(other) or "_dsrun" in str(vars(one)) for one, other in _pairs(mine, model))


def _pairs(one: nn.Module, other: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    return list(zip(one.modules(), other.modules(), strict=True))


@pytest.mark.usefixtures("transformers")
def test_a_gradient_that_is_nothing_but_rounding_is_no_difference() -> None:
    """A softmax does not change with the bias of keys, so its gradient is 0, of which rounding leaves some."""
    model = model_of("OPT", ffn_dim=46, word_embed_proj_dim=32, dropout=0.0).float()
    styles = {"fc1": COLUMN, "fc2": ROW, "out_proj": ROW}
    for _, said, _ in checked(model, plan_of(model, {**MODULES, **styles}, self_attn=("num_heads",)), 2, train):
        assert said == []


@pytest.mark.usefixtures("transformers")
def test_each_block_is_looked_at_once() -> None:
    model = model_of("Llama")
    models = [copy.deepcopy(model) for _ in range(2)]

    def body(axis: LoopbackCollectives) -> list[Counter[str]]:
        mine = models[axis.rank]
        kinds = kinds_of_regions(mine, plan_of(mine))
        assert [kind.names for kind in kinds] == [["model.layers.0", "model.layers.1"]], "its blocks are of one kind"
        cuts = cut_over(mine, plan_of(mine), axis)
        compare_in_first_forward(mine, kinds, cuts, axis, source="the test", say=lambda message: None)
        traffic: list[Counter[str]] = []
        for _ in range(3):
            before = Counter(axis.traffic.calls)
            forward(mine)
            traffic.append(axis.traffic.calls - before)
        return traffic

    for first, second, third in LoopbackWorld(2).run(body):
        assert second == third == Counter(all_reduce=4)
        assert first.total() > second.total()


@pytest.mark.parametrize("family", ["Llama", "DeepseekV2"])
@pytest.mark.usefixtures("transformers")
def test_a_cache_is_filled_once(family: str) -> None:
    """DeepSeek's second block is of another kind, and is given a cache that the first one has filled."""
    model = model_of(family, **(DEEPSEEK if family == "DeepseekV2" else {}))
    plan = plan_of(model, LATENT)

    def call(mine: Any) -> tuple[Tensor, int]:
        out = mine(IDS, use_cache=True)
        return out.logits.detach(), out.past_key_values.get_seq_length()

    logits, length = call(copy.deepcopy(model))
    assert length == IDS.shape[1]
    for found, said, _ in checked(model, plan, 2, call):
        assert said == []
        torch.testing.assert_close(found[0], logits, rtol=1e-5, atol=1e-6)
        assert found[1] == length


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.usefixtures("transformers")
def test_recomputed_blocks_are_checked_too(use_reentrant: bool) -> None:
    model = model_of("Llama")

    def call(mine: Any) -> Tensor:
        mine.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        mine.train()
        return train(mine)

    expected = train(copy.deepcopy(model))
    for loss, said, mine in checked(model, plan_of(model), 2, call):
        assert said == []
        torch.testing.assert_close(loss, expected)
        assert all(param.grad is not None for param in mine.parameters())
    assert "`model.layers.0`" in refusal(model, changed(model, "up_proj", GATHERED_COLUMN), 2, call)


def test_buffers_are_those_of_the_block_when_it_is_called_and_stay_as_they_are() -> None:
    """A model that is moved to a device has other buffers than before; and a count goes up once a call."""

    def moved(model: Any) -> None:
        for block in model.blocks:
            block.scale = torch.tensor(3.0)

    expected = Stack()
    models = checked(copy.deepcopy(expected), RIGHT, 2, lambda model: model(X).detach(), between=moved)
    moved(expected)
    for found, said, model in models:
        assert said == []
        torch.testing.assert_close(found, expected(X).detach())
        assert [block.calls.item() for block in model.blocks] == [1, 1]


def test_random_numbers_are_put_back() -> None:
    class Drawing(Block):
        def forward(self, x: Tensor, *more: Any) -> Tensor:
            return super().forward(x) * torch.rand(())

    def call(model: nn.Module) -> Tensor:
        torch.manual_seed(3)
        return model(X).detach()

    model = Stack(Drawing)
    ((found, said, _),) = checked(model, RIGHT, 1, call)  # threads share the generator, so one rank
    assert said == []
    torch.testing.assert_close(found, call(model))


def test_rows_that_are_no_numbers_in_both_are_no_difference() -> None:
    """As of a query that may see nothing: its softmax has no value, cut or whole."""

    class Masked(Block):
        def forward(self, x: Tensor, *more: Any) -> Tensor:
            y = super().forward(x)
            return torch.cat([y[:, :1] * torch.nan, y[:, 1:]], 1).nan_to_num() + torch.zeros(3, 1).index_fill(
                0, torch.tensor([0]), torch.nan
            )

    for _, said, _ in checked(Stack(Masked), RIGHT, 2, lambda model: model(X)):
        assert said == []
    wrong = of_all_blocks({"up": GATHERED_COLUMN, "down": ROW})
    assert "`blocks.0`" in refusal(Stack(Masked), wrong, 2, lambda model: model(X))


def test_a_weight_by_two_names_in_a_block_is_one() -> None:
    class Twice(Block):
        def __init__(self) -> None:
            super().__init__()
            self.again = nn.Linear(6, 8)
            self.again.weight = self.up.weight

        def forward(self, x: Tensor, *more: Any) -> Tensor:
            return self.down(F.gelu(self.up(x)) * self.again(x))

    plan = of_all_blocks({"up": COLUMN, "again": COLUMN, "down": ROW})
    for _, said, _ in checked(Stack(Twice), plan, 2, lambda model: model(X).sum().backward()):
        assert said == []


@pytest.mark.parametrize("without", ["inputs", "weights", "anything"])
def test_what_is_frozen_is_checked_all_the_same(without: str) -> None:
    """A step later it may train, and a weight that is whole may not be looked at anew."""
    model = Stack()
    model.requires_grad_(without == "inputs")

    def call(mine: nn.Module) -> Tensor:
        return mine(X.clone().requires_grad_(without == "weights"))

    for found, said, mine in checked(model, RIGHT, 2, call):
        assert said == []
        torch.testing.assert_close(found, model(X))
        assert all(param.grad is None and param.requires_grad is (without == "inputs") for param in mine.parameters())
    assert "`blocks.0`" in refusal(model, of_all_blocks({"up": GATHERED_COLUMN, "down": ROW}), 2, call)


def test_a_block_of_which_nothing_is_cut_is_not_run_again() -> None:
    plan = of_all_blocks({"up": COLUMN, "down": ROW}, numbers=(1,))
    for _, said, model in checked(Stack(), plan, 2, lambda model: model(X)):
        assert said == []
        assert type(model.blocks[0]) is Block


def test_a_copy_of_a_model_that_was_not_called_yet_works() -> None:
    model = Stack()
    for found, said, _ in checked(model, RIGHT, 2, lambda mine: copy.deepcopy(mine)(X)):
        assert said == []
        torch.testing.assert_close(found, model(X))
