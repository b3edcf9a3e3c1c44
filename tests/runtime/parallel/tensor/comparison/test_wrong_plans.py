"""A wrong plan is refused by the name of what it makes of a block, on all ranks alike."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsrun.runtime.parallel.tensor.styles import COLUMN, GATHERED_COLUMN, ROW, SPLIT_ROW, WHOLE, Form, ModelPlan, Style
from support.compared_blocks import (
    DEEPSEEK,
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
from support.cut_models import MODULES, model_of, plan_of


@pytest.mark.parametrize(
    ("last", "style", "part"),
    [
        ("up_proj", GATHERED_COLUMN, "its forward fails with RuntimeError"),
        ("up_proj", WHOLE, "its forward fails with RuntimeError"),
        ("down_proj", SPLIT_ROW, "its forward fails with RuntimeError"),
        ("o_proj", WHOLE, "its forward fails with RuntimeError"),
        ("gate_proj", Style(Form.COLUMN, parts=2), "output differs by"),
        ("down_proj", Style(Form.ROW, parts=2), "output differs by"),
        ("v_proj", Style(Form.PARTIAL_GRADIENT), "output differs by"),
        (
            "input_layernorm",
            Style(Form.PARTIAL_GRADIENT),
            "gradient of `input_layernorm.weight` differs by 1 of itself",
        ),
        ("input_layernorm", Style(Form.SUMMED_OUTPUT), "output differs by"),
        ("self_attn", Style(Form.EXPERTS), "its forward fails with"),
    ],
)
@pytest.mark.usefixtures("transformers")
def test_a_wrong_style_is_refused_by_the_name_of_the_block(last: str, style: Style, part: str) -> None:
    model = model_of("Llama", num_key_value_heads=4, intermediate_size=40)
    message = refusal(model, changed(model, last, style), 2, forward)
    block = "`model.layers.0` (LlamaDecoderLayer)"
    assert f"model: cut over 2 ranks, {block} does something else than whole (plan of the test): " in message
    assert part in message
    assert "tensor_parallel.partition_config" in message


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.usefixtures("transformers")
def test_a_gradient_in_parts_that_the_plan_forgets_is_summed_and_told(frozen: bool) -> None:
    """Qwen3 has norms of this rank's heads; the engine takes the mean of a whole weight's gradients over the ranks."""
    model = model_of("Qwen3", head_dim=6)

    def call(mine: Any) -> list[Tensor]:
        norms = [layer.self_attn.q_norm.weight for layer in mine.model.layers]
        if frozen:  # and trained from the second step on
            norms[0].requires_grad_(False)
            train(mine)
            mine.zero_grad()
            norms[0].requires_grad_()
        train(mine)
        return [param.grad for param in norms]

    expected = call(copy.deepcopy(model))
    ranks = checked(model, changed(model, "q_norm", WHOLE), 2, call)
    for _, said, _ in ranks:
        assert said == [
            "tensor parallelism: each rank has a part of the gradients of `self_attn.q_norm.weight` in blocks like "
            "`model.layers.0`, of which the plan (the test) says nothing; they are summed"
        ]
    for number, right in enumerate(expected):
        mine, others = (found[number] for found, _, _ in ranks)
        assert not torch.allclose(mine, others)
        torch.testing.assert_close((mine + others) / 2, right)


def test_a_weight_that_all_blocks_share_has_its_gradient_summed_once() -> None:
    """Queries are multiplied with a weight of all blocks, behind the columns."""
    shared = nn.Parameter(torch.ones(()))

    class Scaled(Block):
        def __init__(self) -> None:
            super().__init__()
            self.factor = shared

        def forward(self, x: Tensor, *more: Any) -> Tensor:
            return x + self.down(F.gelu(self.up(self.norm(x))) * self.factor)

    def call(mine: Any) -> Tensor:
        mine(X).square().sum().backward()
        return mine.blocks[0].factor.grad

    model = Stack(Scaled)
    expected = call(copy.deepcopy(model))
    (mine, said, _), (others, _, _) = checked(model, RIGHT, 2, call)
    assert "`factor`" in said[0]
    torch.testing.assert_close((mine + others) / 2, expected)


@pytest.mark.usefixtures("transformers")
def test_a_forgotten_sum_of_a_shared_tail_is_refused() -> None:
    model = model_of("DeepseekV2", **DEEPSEEK)
    message = refusal(model, plan_of(model, MODULES), 2, forward)
    assert "gradient of `self_attn.kv_a_proj_with_mqa.weight` differs by" in message
    assert "output" not in message


@pytest.mark.usefixtures("transformers")
def test_experts_whose_outputs_nobody_sums_are_refused() -> None:
    model = model_of("Mixtral", num_local_experts=4)
    message = refusal(model, changed(model, "experts", WHOLE), 2, forward)
    assert "output differs by" in message


def test_a_forgotten_sum_of_the_gradient_of_an_input_alone_is_refused() -> None:
    class Matrices(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Parameter(torch.randn(2, 8, 6)), nn.Parameter(torch.randn(2, 6, 8))

        def forward(self, x: Tensor) -> Tensor:
            inner = torch.einsum("bsi,eoi->ebso", x, self.up).sin()
            return torch.einsum("ebso,eio->bsi", inner, self.down)

    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = Matrices()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.experts(x)

    def plan(form: Form) -> ModelPlan:
        parameters = {
            f"blocks.{i}.experts.{key}": style for i in range(2) for key, style in (("up", COLUMN), ("down", ROW))
        }
        return ModelPlan("the test", of_all_blocks({"experts": Style(form)}).modules, parameters)

    def call(model: nn.Module) -> Tensor:
        return model(X.clone().requires_grad_())

    for _, said, _ in checked(Stack(Direct), plan(Form.EXPERTS), 2, call):
        assert said == []
    message = refusal(Stack(Direct), plan(Form.SUMMED_OUTPUT), 2, call)
    assert "(plan of the test): gradient of argument [0][0] differs by" in message
    assert message.count("differs by") == 1


def test_a_plan_that_is_wrong_in_a_later_block_of_the_same_kind_is_refused() -> None:
    """A rule that names one layer by its number gives blocks of one class unlike styles."""
    styles = {"blocks.0.up": COLUMN, "blocks.0.down": ROW, "blocks.1.up": GATHERED_COLUMN, "blocks.1.down": SPLIT_ROW}
    for _, said, _ in checked(Stack(), ModelPlan("the test", styles), 2, lambda model: model(X)):
        assert said == []
    message = refusal(Stack(), ModelPlan("the test", {**styles, "blocks.1.down": ROW}), 2, lambda model: model(X))
    assert "`blocks.1` (Block)" in message


def test_numbers_of_heads_that_are_not_divided_are_refused() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = 2
            self.qkv, self.out = nn.Linear(6, 36), nn.Linear(12, 6)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
            return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))

    styles = of_all_blocks({"qkv": Style(Form.COLUMN, parts=3), "out": ROW}).modules
    attributes = {f"blocks.{i}": ("heads",) for i in range(2)}
    call: Callable[[Any], Tensor] = lambda model: model(X)  # noqa: E731
    for _, said, _ in checked(Stack(Attending), ModelPlan("the test", styles, attributes=attributes), 2, call):
        assert said == []
    message = refusal(Stack(Attending), ModelPlan("the test", styles), 2, call)
    assert "`blocks.0` (Attending)" in message
