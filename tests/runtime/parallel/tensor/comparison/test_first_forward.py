"""A right plan passes, and a wrong one is refused by the name of what it makes of a block, on all ranks alike."""

from __future__ import annotations

import copy
import dataclasses
import threading
import types
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from dsrun.errors import ConfigError, ModelError
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.parallel.tensor.comparison.first_forward import compare_in_first_forward
from dsrun.runtime.parallel.tensor.comparison.regions import kinds_of_regions
from dsrun.runtime.parallel.tensor.styles import (
    COLUMN,
    GATHERED_COLUMN,
    ROW,
    SPLIT_ROW,
    WHOLE,
    Form,
    ModelPlan,
    Style,
)
from support.cut_models import MODULES, VOCAB, WITH_VOCABULARY, cut_over, model_of, plan_of

IDS = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(4))
DEEPSEEK: Mapping[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}
LATENT = {**MODULES, "kv_a_proj_with_mqa": Style(Form.SHARED_TAIL, tail=4)}


@pytest.fixture
def transformers() -> Any:
    return pytest.importorskip("transformers", reason="transformers is not installed; pip install -e '.[test-zoo]'")


def checked(
    model: nn.Module,
    plan: ModelPlan,
    size: int,
    call: Callable[..., Any],
    *,
    between: Callable[[nn.Module], None] = lambda model: None,
    **options: bool,
) -> list[tuple[Any, list[str], Any]]:
    """Returns for each rank what the first call gives, what was said, and the model.

    Args:
        model: model, left as it is.
        plan: its plan.
        size: ranks.
        call: function that is given a model, and calls it.
        between: what is done with each model after it was cut, and before it is called.
        options: options of `cut_layers`.
    """
    models = [copy.deepcopy(model) for _ in range(size)]

    def body(axis: LoopbackCollectives) -> tuple[Any, list[str], Any]:
        mine = models[axis.rank]
        said: list[str] = []
        kinds = kinds_of_regions(mine, plan)
        cuts = cut_over(mine, plan, axis, **options)
        compare_in_first_forward(mine, kinds, cuts, axis, source=plan.source, say=said.append)
        between(mine)
        return call(mine), said, mine

    return LoopbackWorld(size).run(body)


def refusal(model: nn.Module, plan: ModelPlan, size: int, call: Callable[..., Any], **more: Any) -> str:
    """Returns the message that all ranks are given in the first call."""

    def refused(mine: nn.Module) -> str:
        with pytest.raises(ModelError) as caught:
            call(mine)
        return caught.value.render()

    first, *others = [result for result, _, _ in checked(model, plan, size, refused, **more)]
    assert others == [first] * (size - 1)
    return first


def forward(model: Any) -> Tensor:
    return model(IDS, use_cache=False).logits


def train(model: Any) -> Tensor:
    loss: Tensor = model(IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    return loss.detach()


# Right plans.


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
    assert "`model.layers.0`" in refusal(model, _changed(model, "up_proj", GATHERED_COLUMN), 2, call)


class Block(nn.Module):
    """A block of one's own, with whatever a test gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 8), nn.Linear(8, 6), nn.LayerNorm(6)
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        self.calls += 1
        return x + self.down(F.gelu(self.up(self.norm(x)))) * self.scale


class Stack(nn.Module):
    """Two blocks."""

    def __init__(self, kind: type[nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(2))

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        for block in self.blocks:
            x = block(x, *more)
        return x


def of_all_blocks(styles: Mapping[str, Style], *, numbers: tuple[int, ...] = (0, 1)) -> ModelPlan:
    return ModelPlan("the test", {f"blocks.{i}.{name}": style for i in numbers for name, style in styles.items()})


X = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(7))
RIGHT = of_all_blocks({"up": COLUMN, "down": ROW})


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


# Wrong plans.


def _changed(model: nn.Module, last: str, style: Style, modules: Mapping[str, Style] = MODULES) -> ModelPlan:
    return plan_of(model, {**modules, last: style})


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
    message = refusal(model, _changed(model, last, style), 2, forward)
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
    ranks = checked(model, _changed(model, "q_norm", WHOLE), 2, call)
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
    message = refusal(model, _changed(model, "experts", WHOLE), 2, forward)
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


# What would hide a wrong plan.


class Attention(nn.Module):
    """Attention of 4 heads, and the same for tests that give it something of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, 2)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.o(self.mixed(self.of_heads(q), k, v, x).transpose(1, 2).flatten(-2))

    def of_heads(self, q: Tensor) -> Tensor:
        return q

    def mixed(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class Layer(nn.Module):
    """A block around a module that attends."""

    def __init__(self, kind: type[nn.Module] = Attention) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(6), kind()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x))


class OfAllHeads(Attention):
    """Queries divided by the largest of all heads, which a rank with some heads does not know."""

    def of_heads(self, q: Tensor) -> Tensor:
        return q / q.abs().amax((1, 3), keepdim=True)


def layers_of(kind: type[nn.Module], block: type[nn.Module] = Layer) -> Stack:
    torch.manual_seed(2)
    return Stack(lambda: block(kind))  # type: ignore[arg-type]


ATTENTION = of_all_blocks({**dict.fromkeys(("attention.q", "attention.k", "attention.v"), COLUMN), "attention.o": ROW})


def test_a_projection_that_begins_at_zero_hides_nothing() -> None:
    class Gated(Attention):
        """A gate by a weight that the plan does not name; its gradients are parts."""

        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(2)
            nn.init.zeros_(self.o.weight)
            nn.init.zeros_(self.o.bias)

        def of_heads(self, q: Tensor) -> Tensor:
            return self.norm(q)

    for _, said, _ in checked(layers_of(Gated), ATTENTION, 2, lambda model: model(X)):
        assert ["`attention.norm.weight`, `attention.norm.bias`" in text for text in said] == [True]

    class Hidden(OfAllHeads):
        def __init__(self) -> None:
            super().__init__()
            nn.init.zeros_(self.o.weight)

    assert "output differs by" in refusal(layers_of(Hidden), ATTENTION, 2, lambda model: model(X))


def test_a_bias_that_begins_at_zero_and_is_added_once_a_rank_is_seen() -> None:
    class Twice(Block):
        def __init__(self) -> None:
            super().__init__()
            nn.init.zeros_(self.down.bias)

        def forward(self, x: Tensor, *more: Any) -> Tensor:
            return x + self.down(F.gelu(self.up(x))) + self.down.bias

    model = Stack(Twice)
    styles = of_all_blocks({"up": COLUMN, "down": ROW, "norm": WHOLE})
    for _, said, _ in checked(model, styles, 2, lambda mine: mine(X)):
        assert said == []

    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
            nn.init.zeros_(self.down.bias)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.gelu(self.up(x)))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Summed()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(x)

    # Each rank adds the bias, and the module around sums what they give.
    plan = ModelPlan(
        "the test",
        of_all_blocks({"inner": Style(Form.SUMMED_OUTPUT), "inner.up": COLUMN}).modules,
        {f"blocks.{i}.inner.down.weight": ROW for i in range(2)},
    )
    assert "output differs by" in refusal(Stack(Outer), plan, 2, lambda mine: mine(X))


class ByToken(Attention):
    """What heads give is scaled by a whole Linear, whose gradient each rank has a part of, and its input's too."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(6, 1)

    def mixed(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return super().mixed(q, k, v, x) * self.score(x).unsqueeze(1)


@pytest.mark.parametrize("first", ["evaluation", "inference", "frozen"])
def test_gradients_of_hidden_states_are_compared_whatever_comes_first(first: str) -> None:
    """A model is evaluated before it trains, or what stands before its blocks is frozen."""

    class Post(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x + self.attention(x))

    def call(mine: nn.Module) -> Tensor:
        with torch.inference_mode() if first == "inference" else torch.set_grad_enabled(first == "frozen"):
            return mine(X)

    message = refusal(layers_of(ByToken, Post), ATTENTION, 2, call)
    assert "gradient of argument [0][0] differs by" in message


def test_a_forward_with_gradients_is_looked_at_after_one_without() -> None:
    """Gradients of further inputs are known there alone."""

    class Biased(Block):
        def forward(self, x: Tensor, *more: Any) -> Tensor:
            return super().forward(x) + self.down(self.up(x) * more[0])

    bias = torch.randn(1, requires_grad=True)
    traffic: list[list[int]] = []

    def call(mine: nn.Module) -> None:
        axis = mine.blocks[0].up._dsrun_tensor_cut.axis  # type: ignore[union-attr]
        counts: list[int] = []
        for grads in (False, False, True, True, False):
            with torch.set_grad_enabled(grads):
                before = axis.traffic.calls.total()
                mine(X, bias.detach() if not grads else bias)
                counts.append(axis.traffic.calls.total() - before)
        traffic.append(counts)

    message = refusal(Stack(Biased), RIGHT, 2, call)
    assert "gradient of argument [0][1] differs by" in message

    def right(mine: nn.Module) -> None:
        axis = mine.blocks[0].up._dsrun_tensor_cut.axis  # type: ignore[union-attr]
        for grads in (False, False, True, True, False):
            with torch.set_grad_enabled(grads):
                before = axis.traffic.calls.total()
                mine(X)
                traffic.append([axis.traffic.calls.total() - before])

    traffic.clear()
    checked(Stack(), RIGHT, 1, right)
    (first,), (second,), (third,), (fourth,), (fifth,) = traffic
    assert first > second
    assert third > fourth
    assert second == fifth


@dataclasses.dataclass
class Output:
    hidden: Tensor


@pytest.mark.parametrize("form", ["dataclass", "object", "dict", "state", "in place"])
def test_what_a_block_gives_is_found_in_any_form(form: str) -> None:
    class Wrapped(Layer):
        def forward(self, x: Any) -> Any:
            if form == "state":  # nothing is returned
                x["hidden"] = super().forward(x["hidden"])
                return None
            if form == "in place":
                x.add_(super().forward(x))
                return None
            y = super().forward(x)
            made = {"dataclass": Output(y), "object": types.SimpleNamespace(hidden=y), "dict": {"hidden": y}}
            return made[form]

    class Model(Stack):
        def forward(self, x: Tensor, *more: Any) -> Tensor:
            x = x * 1.0
            for block in self.blocks:
                if form == "state":
                    state = {"hidden": x}
                    block(state)
                    x = state["hidden"]
                elif form == "in place":
                    block(x)
                else:
                    y = block(x)
                    x = y["hidden"] if form == "dict" else y.hidden
            return x

    def model(kind: type[nn.Module]) -> nn.Module:
        torch.manual_seed(2)
        return Model(lambda: Wrapped(kind))  # type: ignore[arg-type]

    call: Callable[[Any], Tensor] = lambda mine: mine(X).detach()  # noqa: E731
    expected = model(Attention)
    for found, said, _ in checked(expected, ATTENTION, 2, call):
        assert said == []
        torch.testing.assert_close(found, expected(X).detach())
    assert "differs by" in refusal(model(OfAllHeads), ATTENTION, 2, call)


def test_blocks_that_are_never_called_are_compared_by_what_is_in_them() -> None:
    class Direct(Stack):
        def forward(self, x: Tensor, *more: Any) -> Tensor:
            for block in self.blocks:
                x = x + block.attention(block.norm(x))
            return x

    def model(kind: type[nn.Module]) -> nn.Module:
        torch.manual_seed(2)
        return Direct(lambda: Layer(kind))  # type: ignore[arg-type]

    expected = model(Attention)
    for found, said, mine in checked(expected, ATTENTION, 2, lambda mine: mine(X)):
        assert said == []
        torch.testing.assert_close(found, expected(X))
        assert not any(part._forward_pre_hooks for part in mine.modules()), "guards are gone"
    message = refusal(model(OfAllHeads), ATTENTION, 2, lambda mine: mine(X))
    assert "`blocks.0.attention` (OfAllHeads)" in message


def test_a_cut_layer_that_is_called_where_nothing_can_be_compared_is_refused_by_name() -> None:
    class Bare(Stack):
        def forward(self, x: Tensor, *more: Any) -> Tensor:
            for block in self.blocks:
                x = x + block.down(F.gelu(block.up(x)))
            return x

    message = refusal(Bare(), RIGHT, 2, lambda mine: mine(X))
    assert message.startswith("error: model: `blocks.0.up` (Linear) is cut (plan of the test), and is called where its")
    assert '"check": false' in message


def test_models_without_repeated_blocks_are_compared() -> None:
    class Model(nn.Module):
        def __init__(self, norm: bool) -> None:
            super().__init__()
            self.embed = nn.Linear(6, 6)
            self.mlp = nn.ModuleDict({"up": nn.Linear(6, 8), "down": nn.Linear(8, 6)})
            self.norm = norm

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            y = self.mlp["up"](x)
            return x + self.mlp["down"](F.layer_norm(y, y.shape[-1:]) if self.norm else y.sin())

    plan = ModelPlan("the test", {"mlp.up": COLUMN, "mlp.down": ROW})
    # A dict of modules is never called; so the model itself is what is compared.
    expected = Model(False)
    assert "`mlp.up`" in refusal(expected, plan, 2, lambda mine: mine(X))

    class Flat(Model):
        def __init__(self, norm: bool) -> None:
            super().__init__(norm)
            self.up, self.down = self.mlp["up"], self.mlp["down"]
            del self.mlp

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            y = self.up(x)
            return x + self.down(F.layer_norm(y, y.shape[-1:]) if self.norm else y.sin())

    plan = ModelPlan("the test", {"up": COLUMN, "down": ROW})
    for found, said, _ in checked(model := Flat(False), plan, 2, lambda mine: mine(X)):
        assert said == []
        torch.testing.assert_close(found, model(X))
    assert "ranks, the model (Flat) does something else" in refusal(Flat(True), plan, 2, lambda mine: mine(X))


def test_blocks_that_differ_by_an_attribute_are_of_two_kinds() -> None:
    model = layers_of(OfAllHeads)
    for number, block in enumerate(model.blocks):
        block.attention.of_all = number == 1  # type: ignore[union-attr]

    class Sometimes(OfAllHeads):
        of_all: bool

        def of_heads(self, q: Tensor) -> Tensor:
            return super().of_heads(q) if self.of_all else q

    for block in model.blocks:
        block.attention.__class__ = Sometimes  # type: ignore[union-attr]
    assert "`blocks.1` (Layer)" in refusal(model, ATTENTION, 2, lambda mine: mine(X))


def test_a_recomputed_part_of_a_block_is_compared() -> None:
    """`torch.utils.checkpoint` calls it again in the comparison's own backward."""

    class Part(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.utils.checkpoint.checkpoint(self.attention, self.norm(x), use_reentrant=False)

    model = layers_of(Attention, Part)
    for found, said, _ in checked(model, ATTENTION, 2, lambda mine: mine(X)):
        assert said == []
        torch.testing.assert_close(found, model(X))
    assert "differs by" in refusal(layers_of(OfAllHeads, Part), ATTENTION, 2, lambda mine: mine(X))


def test_operations_that_a_script_records_are_those_of_its_own_forward() -> None:
    """As torch's selective recomputation does, which takes the n-th of the second run for the n-th of the first."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorded(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    def call(mine: nn.Module) -> None:
        runs: list[list[str]] = []
        for _ in range(2):
            with Recorded() as recorded:
                mine(X)
            runs.append(recorded.names)
        assert runs[0] == runs[1]

    checked(Stack(), RIGHT, 2, call)


def test_a_refusal_of_the_cut_block_goes_through_as_it_is() -> None:
    class Strict(Block):
        def forward(self, x: Tensor, *more: Any) -> Tensor:
            inner = self.up(x)
            if inner.shape[-1] != 8:
                raise ConfigError("`something` says so", hint="this is the way out")
            return x + self.down(inner)

    def call(mine: nn.Module) -> None:
        with pytest.raises(ConfigError, match="says so"):
            mine(X)

    checked(Stack(Strict), RIGHT, 2, call)


def test_weights_of_which_noise_makes_no_numbers_are_compared_as_they_are() -> None:
    class Inverse(Block):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.eye(6) * 2)

        def forward(self, x: Tensor, *more: Any) -> Tensor:
            exact = self.table.diag().diag() == self.table
            return super().forward(x) * torch.where(exact.all(), 1.0, torch.nan)

    for _, said, _ in checked(Stack(Inverse), RIGHT, 2, lambda mine: mine(X)):
        assert said == []
    wrong = of_all_blocks({"up": COLUMN, "down": Style(Form.ROW, parts=2)})
    assert "output differs by" in refusal(Stack(Inverse), wrong, 2, lambda mine: mine(X))


def test_a_block_that_cannot_be_run_alone_is_told_and_trains() -> None:
    lock = threading.Lock()  # cannot be copied
    model = Stack()
    for found, said, _ in checked(model, RIGHT, 2, lambda mine: mine(X, lock)):
        torch.testing.assert_close(found, model(X))
        assert len(said) == 1
        assert said[0].startswith("tensor parallelism: `blocks.0` cannot be run alone (TypeError: cannot pickle")
        assert said[0].endswith("; its plan is not checked")


def test_parts_of_a_block_that_cannot_be_run_alone_are_compared_in_its_place() -> None:
    class Locked(Layer):
        def forward(self, x: Tensor, *more: Any) -> Tensor:
            return super().forward(x)

    lock = threading.Lock()

    class Twice(Locked):
        """Of two parts."""

        def __init__(self, kind: type[nn.Module] = Attention) -> None:
            super().__init__(kind)
            self.second = kind()

        def forward(self, x: Tensor, *more: Any) -> Tensor:
            return super().forward(x) + self.second(x)

    second = {f"{name.replace('attention', 'second')}": style for name, style in ATTENTION.modules.items()}
    both = ModelPlan("the test", {**ATTENTION.modules, **second})
    for _, said, _ in checked(layers_of(Attention, Twice), both, 2, lambda mine: mine(X, lock)):
        assert len(said) == 1
        assert said[0].endswith("; its parts are compared in its place")
    message = refusal(layers_of(OfAllHeads, Locked), ATTENTION, 2, lambda mine: mine(X, lock))
    assert "`blocks.0.attention` (OfAllHeads)" in message


# What a comparison leaves as it was, and what it does not let go of.


class Bad(nn.Module):
    """A norm of all that a column has cut, where it is switched on."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor, *, bad: bool = True) -> Tensor:
        y = self.up(x)
        return self.down(F.layer_norm(y, y.shape[-1:]) if bad else y.sin())


@pytest.mark.parametrize("kind", ["list", "tensor", "dict", "object"])
def test_what_blocks_keep_in_attributes_is_as_without_a_comparison(kind: str) -> None:
    class Keeping(Block):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Tensor] = []
            self.mean = torch.zeros(())
            self.counts = {"calls": 0}
            self.state = types.SimpleNamespace(calls=0)

        def forward(self, x: Tensor, *more: Any) -> Tensor:
            y = super().forward(x)
            match kind:
                case "list":  # as auxiliary losses of mixtures are kept, with their graphs
                    self.seen.append(y.square().mean())
                    self.last = self.seen[-1]
                    y = y * len(self.seen)
                case "tensor":
                    y = y + self.mean.mul_(0.9).add_(y.detach().mean())
                case "dict":
                    self.counts["calls"] += 1
                    y = y * self.counts["calls"]
                case _:
                    self.state.calls += 1
                    y = y * self.state.calls
            return y

    def call(mine: Any) -> tuple[Tensor, Tensor]:
        y = mine(X)
        loss = y.square().mean() + sum(one for block in mine.blocks for one in block.seen)
        loss.backward()
        return y.detach(), mine.blocks[0].norm.weight.grad

    model = Stack(Keeping)
    expected = call(copy.deepcopy(model))
    for found, said, mine in checked(model, RIGHT, 2, call):
        assert said == []
        torch.testing.assert_close(found, expected)
        assert all(block.counts["calls"] == (kind == "dict") for block in mine.blocks)


def test_a_branch_that_comes_later_is_compared_when_it_comes() -> None:
    class Branching(Block):
        def __init__(self) -> None:
            super().__init__()
            self.extra = Bad()

        def forward(self, x: Tensor, *more: Any) -> Tensor:
            y = super().forward(x)
            return y + self.extra(x, bad=more[0] == "bad") if more else y

    styles = {"up": COLUMN, "down": ROW, "extra.up": COLUMN, "extra.down": ROW}
    model = Stack(Branching)
    for found, said, mine in checked(model, of_all_blocks(styles), 2, lambda one: [one(X), one(X, "good"), one(X)]):
        assert said == []
        torch.testing.assert_close(found, [model(X), model(X, "good"), model(X)])
        assert not any(part._forward_pre_hooks for part in mine.modules())
        assert all("_dsrun_tensor_comparison" not in vars(part) for part in mine.modules())

    def call(mine: nn.Module) -> None:
        mine(X)
        mine(X)
        mine(X, "bad")

    assert "`blocks.0.extra` (Bad)" in refusal(model, of_all_blocks(styles), 2, call)


def test_an_expert_without_tokens_is_compared_when_it_gets_some() -> None:
    """The block around runs it in its own loop, so the expert alone has no column and no row of its own."""

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ModuleList(nn.Linear(6, 8) for _ in range(2))
            self.down = nn.ModuleList(nn.Linear(8, 6) for _ in range(2))

        def forward(self, x: Tensor, *more: Any) -> Tensor:
            number = more[0] if more else 0
            y = self.up[number](x)
            return x + self.down[number](F.layer_norm(y, y.shape[-1:]) if number else y.sin())

    styles = {f"{name}.{number}": style for name, style in (("up", COLUMN), ("down", ROW)) for number in range(2)}
    for found, said, _ in checked(Stack(Loop), of_all_blocks(styles), 2, lambda mine: mine(X)):
        assert said == []
        assert found.isfinite().all()

    def call(mine: nn.Module) -> None:
        mine(X)
        mine(X, 1)

    assert "`blocks.0` (Loop)" in refusal(Stack(Loop), of_all_blocks(styles), 2, call)


def test_blocks_that_differ_by_a_function_or_a_number_are_of_two_kinds() -> None:
    def bad(x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:])

    class Acting(Block):
        act: Callable[[Tensor], Tensor] = F.gelu
        window = 0

        def forward(self, x: Tensor, *more: Any) -> Tensor:
            return x + self.down(bad(self.up(x)) if self.window else self.act(self.up(x)))

    by_function, by_number = Stack(Acting), Stack(Acting)
    for number, block in enumerate(by_function.blocks):
        block.act = bad if number else torch.sin  # type: ignore[assignment]
    for number, block in enumerate(by_number.blocks):
        block.act = torch.sin  # type: ignore[assignment]
        block.window = 4 * number  # type: ignore[assignment]
    for model in (by_function, by_number):
        assert "`blocks.1` (Acting)" in refusal(model, RIGHT, 2, lambda mine: mine(X))


def test_forward_hooks_of_the_script_are_told() -> None:
    model = Stack()
    seen: list[int] = []
    model.blocks[1].up.register_forward_hook(lambda module, args, output: seen.append(output.shape[-1]))  # type: ignore[union-attr]
    model.blocks[0].up.register_forward_hook(lambda module, args, output: seen.append(output.shape[-1]))  # type: ignore[union-attr]
    for _, said, _ in checked(model, RIGHT, 2, lambda mine: mine(X)):
        assert [text.startswith("tensor parallelism: forward hooks of `blocks.0.up` see this") for text in said] == [
            True
        ]
    assert seen == [4] * 4, "a comparison runs none"


def test_blocks_on_slices_of_the_sequence_are_compared_with_whole_sequences() -> None:
    """The second and third block are each of a kind of their own, and are given slices."""
    x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(7))

    class Ends(Stack):
        def __init__(self, kind: type[nn.Module]) -> None:
            super().__init__(lambda: Layer(kind))  # type: ignore[arg-type]
            self.blocks.append(Layer(kind))
            for number, block in enumerate(self.blocks):
                block.label = "abc"[number]  # type: ignore[assignment]

    torch.manual_seed(2)
    model = Ends(Attention)
    names = ("attention.q", "attention.k", "attention.v")
    plan = of_all_blocks({**dict.fromkeys(names, COLUMN), "attention.o": ROW}, numbers=(0, 1, 2))
    for found, said, _ in checked(model, plan, 2, lambda mine: mine(x), slices=True):
        assert said == []
        torch.testing.assert_close(found, model(x))
    for number in range(3):
        wrong = copy.deepcopy(model)
        wrong.blocks[number].attention.__class__ = OfAllHeads  # type: ignore[union-attr]
        message = refusal(wrong, plan, 2, lambda mine: mine(x), slices=True)
        assert f"`blocks.{number}` (Layer)" in message


def test_parts_of_a_block_on_slices_are_compared_where_it_cannot_be_run_alone() -> None:
    x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(7))
    lock = threading.Lock()

    class Locked(Layer):
        def forward(self, x: Tensor, *more: Any) -> Tensor:
            return super().forward(x)

    for found, said, _ in checked(
        model := layers_of(Attention, Locked), ATTENTION, 2, lambda m: m(x, lock), slices=True
    ):
        assert [text.endswith("; its parts are compared in its place") for text in said] == [True]
        torch.testing.assert_close(found, model(x, lock))
    message = refusal(layers_of(OfAllHeads, Locked), ATTENTION, 2, lambda mine: mine(x, lock), slices=True)
    assert "`blocks.0.attention` (OfAllHeads)" in message
