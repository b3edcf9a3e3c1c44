"""What cut modules give, forward and backward, against the same modules whole, and what they send for it."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.parallel.tensor.modules import cut_state_of
from dsrun.runtime.parallel.tensor.styles import (
    COLUMN,
    GATHERED_COLUMN,
    ROW,
    SPLIT_ROW,
    Form,
    ModelPlan,
    Style,
)
from support.cut_models import compare, cut_over, model_of, plan_of

F32, F64 = torch.float32, torch.float64
ITEM = F64.itemsize
WIDTH = 6


def seeded(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def fp64(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(2)
    return make().double()


class MLP(nn.Module):
    """Gate and up by columns, down by rows."""

    def __init__(self, inner: int = 10, *, bias: bool = True) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, inner, bias=bias)
        self.up = nn.Linear(WIDTH, inner, bias=bias)
        self.down = nn.Linear(inner, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


MLP_PLAN = ModelPlan("the test", {"gate": COLUMN, "up": COLUMN, "down": ROW})


class Packed(nn.Module):
    """Gate and up in one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(WIDTH, 20)
        self.down = nn.Linear(10, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Attention(nn.Module):
    """Queries of one input, keys and values of it or of another one; called in an order of one's own."""

    def __init__(self, order: str = "qkv") -> None:
        super().__init__()
        self.order = order
        self.q, self.k, self.v = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)
        self.o = nn.Linear(8, WIDTH)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        given = {"q": x, "k": x if y is None else y, "v": x if y is None else y}
        made = {name: self.get_submodule(name)(given[name]) for name in self.order}
        q, k, v = (made[name].unflatten(-1, (-1, 2)).transpose(-2, -3) for name in "qkv")
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2))


ATTENTION_PLAN = ModelPlan("the test", {"q": COLUMN, "k": COLUMN, "v": COLUMN, "o": ROW})


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_columns_and_a_row_give_what_they_give_whole(size: int, bias: bool) -> None:
    """The bias behind a row is added once, its gradient is whole; ten columns are uneven over three ranks."""
    for found in compare(fp64(lambda: MLP(bias=bias)), MLP_PLAN, (seeded(2, 3, WIDTH),), size):
        assert found.worst < 1e-13
        sent = 2 * 3 * WIDTH * ITEM
        assert (found.forward.calls, found.forward.bytes) == (Counter(all_reduce=1), Counter(all_reduce=sent))
        assert (found.backward.calls, found.backward.bytes) == (Counter(all_reduce=1), Counter(all_reduce=sent))


@pytest.mark.parametrize(
    ("style", "forward", "backward"),
    [
        (GATHERED_COLUMN, Counter(all_gather=1), Counter(all_reduce=1)),
        (Style(Form.COLUMN, gathers_output=True, parts=(3, 2)), Counter(all_gather=1), Counter(all_reduce=1)),
        (SPLIT_ROW, Counter(all_reduce=1), Counter(all_gather=1)),
        (Style(Form.ROW, splits_input=True, parts=2), Counter(all_reduce=1), Counter(all_gather=1)),
    ],
)
@pytest.mark.parametrize("size", [2, 3])
def test_a_layer_alone_takes_and_gives_the_whole(
    size: int, style: Style, forward: Counter[str], backward: Counter[str]
) -> None:
    model = fp64(lambda: nn.Sequential(nn.Linear(6, 5)))
    for found in compare(model, ModelPlan("the test", {"0": style}), (seeded(2, 6),), size):
        assert found.worst < 1e-13
        assert found.forward.calls == forward
        assert found.backward.calls == backward


@pytest.mark.parametrize("size", [2, 3])
def test_gate_and_up_in_one_weight_are_each_cut(size: int) -> None:
    plan = ModelPlan("the test", {"gate_up": Style(Form.COLUMN, parts=2), "down": ROW})
    for found in compare(fp64(Packed), plan, (seeded(2, 3, WIDTH),), size):
        assert found.worst < 1e-13


class ScaledEmbedding(nn.Embedding):
    """An embedding with a forward of its own, as Gemma has."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) * 3.0


@pytest.mark.parametrize("kind", [nn.Embedding, ScaledEmbedding])
@pytest.mark.parametrize("padding", [None, 0, 5, -1])
@pytest.mark.parametrize("size", [2, 3])
def test_an_embedding_is_cut_over_its_tokens(size: int, padding: int | None, kind: type[nn.Embedding]) -> None:
    """No rank looks a token of another one up; the row of padding gets no gradient, wherever it lies."""
    model = fp64(lambda: nn.Sequential(kind(11, WIDTH, padding_idx=padding)))
    ids = torch.tensor([[0, 5, 10, 5], [3, 0, 7, 10]])
    for found in compare(model, ModelPlan("the test", {"0": Style(Form.VOCABULARY)}), (ids,), size):
        assert found.worst < 1e-13
        assert found.forward.calls == Counter(all_reduce=1)
        assert found.forward.bytes == Counter(all_reduce=8 * WIDTH * ITEM)
        assert found.backward.calls == Counter()


@pytest.mark.parametrize("token", [-1, 11, 1000])
def test_a_token_that_is_in_no_part_is_refused_on_every_rank_as_whole(token: int) -> None:
    """Every rank would take it for another one's, and its vector would be zeros."""
    models = [nn.Sequential(nn.Embedding(11, WIDTH)) for _ in range(2)]

    def body(axis: LoopbackCollectives) -> None:
        model = models[axis.rank]
        cut_over(model, ModelPlan("the test", {"0": Style(Form.VOCABULARY)}), axis)
        with pytest.raises(IndexError, match="out of range"):
            model(torch.tensor([3, token]))

    LoopbackWorld(2).run(body)


class Project(nn.Module):
    """An embedding with a Linear behind it."""

    def __init__(self, kind: type[nn.Embedding] = nn.Embedding) -> None:
        super().__init__()
        self.embed = kind(11, 7, padding_idx=3)
        self.project = nn.Linear(7, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.project(self.embed(ids))


@pytest.mark.parametrize("kind", [nn.Embedding, ScaledEmbedding])
@pytest.mark.parametrize("size", [2, 3])
def test_an_embedding_is_cut_over_its_columns(size: int, kind: type[nn.Embedding]) -> None:
    ids = torch.tensor([[0, 5, 10, 3], [3, 0, 7, 10]])
    plans = {
        "parts": {"embed": Style(Form.HIDDEN), "project": ROW},
        "gathered": {"embed": Style(Form.HIDDEN, gathers_output=True)},
    }
    for modules in plans.values():
        for found in compare(fp64(lambda: Project(kind)), ModelPlan("the test", modules), (ids,), size):
            assert found.worst < 1e-13


@pytest.mark.parametrize(("implementation", "dtype", "bound"), [("eager", F64, 1e-12), ("grouped_mm", F32, 1e-5)])
@pytest.mark.parametrize("size", [2, 4])
def test_experts_are_cut_inside_and_their_sums_are_made_once(
    size: int, implementation: str, dtype: torch.dtype, bound: float
) -> None:
    """Mixtral's block: one sum of outputs; gradients of hidden states and of routing weights are summed."""
    pytest.importorskip("transformers", reason="transformers is not installed; pip install -e '.[test-zoo]'")
    model = model_of(
        "Mixtral",
        num_local_experts=4,
        num_hidden_layers=1,
        hidden_size=16,
        intermediate_size=16,
        experts=implementation,
    )
    block = nn.Sequential(model.model.layers[0].mlp).to(dtype)
    for found in compare(block, plan_of(block), (seeded(2, 5, 16).to(dtype),), size):
        assert found.worst < bound
        hidden, routing = 2 * 5 * 16 * dtype.itemsize, 2 * 5 * 2 * dtype.itemsize
        assert (found.forward.calls, found.forward.bytes) == (Counter(all_reduce=1), Counter(all_reduce=hidden))
        assert (found.backward.calls, found.backward.bytes) == (
            Counter(all_reduce=2),
            Counter(all_reduce=hidden + routing),
        )


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("low_rank", [12, None])
def test_the_last_columns_that_go_to_heads_at_once_have_their_gradient_summed(
    low_rank: int | None, exact: bool
) -> None:
    """DeepSeek-V2's attention: the rotary part of the keys is whole, and each rank's heads use it."""
    pytest.importorskip("transformers", reason="transformers is not installed; pip install -e '.[test-zoo]'")
    model = model_of(
        "DeepseekV2",
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=low_rank,
        kv_lora_rank=8,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=6,
        first_k_dense_replace=1,
        n_routed_experts=2,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=1,
        moe_intermediate_size=8,
    )
    styles = {**plan_of(model).modules, "model.layers.0.self_attn.kv_a_proj_with_mqa": Style(Form.SHARED_TAIL, tail=4)}
    ids = torch.arange(10).view(2, 5)
    for found in compare(
        model,
        ModelPlan("the test", styles),
        (ids,),
        2,
        exact=exact,
        call=lambda model, ids: model(ids, use_cache=False).logits,
    ):
        # transformers turns the rotary part in fp32
        assert found.worst < 1e-5, max(found.errors.items(), key=lambda item: item[1])
        assert found.errors["output"] < 1e-6


class Last(nn.Module):
    """A module without weights whose outputs are sums over the last dim."""

    def forward(self, x: Tensor) -> Tensor | None:
        return x.sum(-1, keepdim=True)


class Summing(nn.Module):
    """Columns, and sums over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.last = nn.Linear(WIDTH, 7), Last()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.last(torch.sin(self.up(x))))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_a_whole_module_gives_parts_of_a_sum(size: int, exact: bool) -> None:
    plan = ModelPlan("the test", {"up": COLUMN, "last": Style(Form.SUMMED_OUTPUT)})
    for found in compare(fp64(Summing), plan, (seeded(2, WIDTH),), size, exact=exact):
        assert found.worst < 1e-13


class Experts(nn.Module):
    """Two matrices in one parameter each, and an expert that gives its input back, as LongCat has."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, 5, WIDTH))
        self.down = nn.Parameter(torch.randn(2, WIDTH, 5))
        self.same = nn.Identity()

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        inner = torch.einsum("bi,eoi->beo", x, self.up).sin()
        return torch.einsum("beo,eio,be->bi", inner, self.down, weights) + self.same(x) * weights[:, :1]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_what_each_rank_would_add_to_a_sum_is_divided(size: int, exact: bool) -> None:
    model = fp64(lambda: nn.ModuleDict({"experts": Experts()}))
    plan = ModelPlan(
        "the test",
        {"experts": Style(Form.EXPERTS), "experts.same": Style(Form.DIVIDED_INPUT)},
        {"experts.up": COLUMN, "experts.down": ROW},
    )
    for found in compare(
        model,
        plan,
        (seeded(3, WIDTH), seeded(3, 2)),
        size,
        exact=exact,
        call=lambda model, *given: model.experts(*given),
    ):
        assert found.worst < 1e-13


@pytest.mark.parametrize("order", ["qkv", "vqk", "kvq"])
def test_siblings_with_one_input_share_one_sum_of_its_gradient(order: str) -> None:
    for found in compare(fp64(lambda: Attention(order)), ATTENTION_PLAN, (seeded(2, 3, WIDTH),), 2):
        assert found.worst < 1e-13
        assert found.backward.calls == Counter(all_reduce=1)


@pytest.mark.parametrize("order", ["qkv", "vqk", "kqv"])
def test_siblings_with_two_inputs_sum_the_gradient_of_each(order: str) -> None:
    x, y = seeded(2, 3, WIDTH), seeded(2, 4, WIDTH)
    for found in compare(fp64(lambda: Attention(order)), ATTENTION_PLAN, (x, y), 2):
        assert found.worst < 1e-13
        assert found.backward.calls == Counter(all_reduce=2)


def test_siblings_are_called_again_with_the_same_input_and_with_others() -> None:
    def call(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return model(x) + model(x).sin() + model(y, x) + model(x, y)

    for found in compare(fp64(Attention), ATTENTION_PLAN, (seeded(2, 3, WIDTH), seeded(2, 4, WIDTH)), 2, call=_twice):
        assert found.worst < 1e-13
    for found in compare(fp64(Attention), ATTENTION_PLAN, (seeded(2, 3, WIDTH), seeded(2, 3, WIDTH)), 2, call=call):
        assert found.worst < 1e-13


def _twice(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A step that looks first, without gradients, and is stopped in the middle once."""
    with torch.no_grad():
        seen = model(x, y)
    model.get_submodule("q")(x)  # and no other sibling
    return model(x, y) + model(x).mean(1, keepdim=True) + seen


def test_an_input_that_is_changed_between_siblings_is_another_one() -> None:
    class Between(MLP):
        def forward(self, x: Tensor) -> Tensor:
            x = x * 1.0
            gate = self.gate(x)  # frozen, so the input is not needed again
            x.mul_(2.0)
            return self.down(F.silu(gate) * self.up(x))

    model = fp64(Between)
    model.get_submodule("gate").requires_grad_(False)
    for found in compare(model, MLP_PLAN, (seeded(2, WIDTH),), 2):
        assert found.worst < 1e-13


def test_without_gradients_nothing_but_outputs_is_sent() -> None:
    model = fp64(MLP)
    expected = model(seeded(2, WIDTH))
    models = [copy.deepcopy(model) for _ in range(2)]

    def body(axis: LoopbackCollectives) -> Counter[str]:
        cut_over(models[axis.rank], MLP_PLAN, axis)
        before = Counter(axis.traffic.calls)
        with torch.no_grad():
            torch.testing.assert_close(models[axis.rank](seeded(2, WIDTH).requires_grad_()), expected)
        with torch.inference_mode():
            torch.testing.assert_close(models[axis.rank](seeded(2, WIDTH)), expected)
        return axis.traffic.calls - before

    assert LoopbackWorld(2).run(body) == [Counter(all_reduce=2)] * 2


@pytest.mark.parametrize(("use_reentrant", "sums"), [(True, 2), (False, 1)])
def test_a_recomputation_sums_outputs_again_and_gradients_once(use_reentrant: bool, sums: int) -> None:
    """One of torch's two kinds stops where the row has its input, before the outputs are summed."""

    def call(model: nn.Module, x: Tensor) -> Tensor:
        made: Any = checkpoint(model, x, use_reentrant=use_reentrant)
        return made.sin()

    for found in compare(fp64(Attention), ATTENTION_PLAN, (seeded(2, 3, WIDTH),), 2, call=call):
        assert found.worst < 1e-13
        assert found.forward.calls == Counter(all_reduce=1)
        assert found.backward.calls == Counter(all_reduce=sums)


@pytest.mark.parametrize("backward", [True, False])
def test_no_activation_is_kept_behind_a_block_whose_columns_have_unlike_inputs(backward: bool) -> None:
    """As in cross attention: what is kept for a sibling that never comes is an activation of each block."""
    models = [fp64(Attention) for _ in range(2)]
    seen: list[list[weakref.ref[Tensor]]] = [[], []]

    def body(axis: LoopbackCollectives) -> None:
        model = models[axis.rank]
        cut_over(model, ATTENTION_PLAN, axis)
        x, y = seeded(2, 3, WIDTH).requires_grad_() * 1.0, seeded(2, 4, WIDTH).requires_grad_() * 1.0
        seen[axis.rank] += [weakref.ref(x), weakref.ref(y)]
        out = model(x, y)
        if backward:
            out.sum().backward()
        axis.barrier()  # the world of threads keeps what was moved last

    LoopbackWorld(2).run(body)
    gc.collect()
    assert [ref() for refs in seen for ref in refs] == [None] * 4


def test_a_column_that_is_never_called_keeps_no_more_than_the_last_input() -> None:
    class Values(Attention):
        def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
            return self.o(self.q(x) + self.v(x))

    models = [fp64(Values) for _ in range(2)]
    seen: list[list[weakref.ref[Tensor]]] = [[], []]

    def body(axis: LoopbackCollectives) -> None:
        cut_over(models[axis.rank], ATTENTION_PLAN, axis)
        for _ in range(3):
            x = seeded(2, 3, WIDTH).requires_grad_() * 1.0
            seen[axis.rank].append(weakref.ref(x))
            models[axis.rank](x).sum().backward()

    LoopbackWorld(2).run(body)
    gc.collect()
    assert [[ref() is None for ref in refs] for refs in seen] == [[True, True, False]] * 2


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_copy_of_a_cut_model_is_cut_alike_and_shares_no_inputs_with_it(overlaps: bool) -> None:
    for found in compare(
        fp64(Attention),
        ATTENTION_PLAN,
        (seeded(2, 3, WIDTH),),
        2,
        prepare=lambda model: _with_grads_of(model),
        overlaps=overlaps,
    ):
        assert found.errors["output"] < 1e-13
        assert found.errors["input 0"] < 1e-13
        assert found.backward.calls == Counter(all_reduce=1), "the copy's columns share their input too"


def _with_grads_of(model: nn.Module) -> nn.Module:
    made = copy.deepcopy(model)
    states = [cut_state_of(module) for module in (made.q, made.k, model.q)]  # type: ignore[arg-type]
    assert all(state is not None for state in states)
    ours, sibling, theirs = (state.inputs for state in states if state is not None)
    assert ours is sibling
    assert ours is not theirs
    assert type(made) is type(model)
    assert isinstance(made.q, nn.Linear)
    return made


def test_a_cut_module_is_still_what_it_was_and_says_how_it_is_cut() -> None:
    models = [fp64(lambda: nn.ModuleDict({"mlp": MLP(), "embed": ScaledEmbedding(11, WIDTH)})) for _ in range(2)]
    plan = ModelPlan(
        "the test", {"mlp.gate": COLUMN, "mlp.up": COLUMN, "mlp.down": ROW, "embed": Style(Form.VOCABULARY)}
    )

    def body(axis: LoopbackCollectives) -> list[str]:
        model: Any = models[axis.rank]
        cut_over(model, plan, axis)
        assert isinstance(model.mlp.gate, nn.Linear)
        assert isinstance(model.embed, ScaledEmbedding)
        assert type(model.embed).__name__ == "ScaledEmbedding"
        assert [name for name, _ in model.named_parameters()] == [
            *(f"mlp.{name}.{key}" for name in ("gate", "up", "down") for key in ("weight", "bias")),
            "embed.weight",
        ]
        assert (model.mlp.gate.in_features, model.mlp.gate.out_features) == (WIDTH, 5)
        assert (model.mlp.down.in_features, model.mlp.down.out_features) == (5, WIDTH)
        return [repr(model.mlp.gate), repr(model.mlp.down), repr(model.embed)]

    assert LoopbackWorld(2).run(body) == [
        [
            f"Linear(in_features=6, out_features=5, bias=True, column {rank} of 2)",
            f"Linear(in_features=5, out_features=6, bias=True, row {rank} of 2)",
            f"ScaledEmbedding({tokens}, 6, vocabulary {rank} of 2)",
        ]
        for rank, tokens in ((0, 6), (1, 5))
    ]


class Halved(nn.Linear):
    """A Linear with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) / 2


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_forward_of_a_subclass_and_hooks_work_as_before(overlaps: bool) -> None:
    class Own(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.gate = Halved(WIDTH, 10)
            self.down = Halved(10, WIDTH, bias=False)
            self.up.register_forward_hook(lambda module, args, out: out * 2)
            self.down.register_forward_pre_hook(lambda module, args: (args[0] * 3,))

    for found in compare(fp64(Own), MLP_PLAN, (seeded(2, WIDTH),), 2, overlaps=overlaps):
        assert found.worst < 1e-13


def test_what_a_row_of_a_subclass_keeps_of_its_product_is_no_sum() -> None:
    class Keeping(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            self.kept = super().forward(input)
            return self.kept

    class Own(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.down = Keeping(10, WIDTH, bias=False)

    model = fp64(Own)
    models = [copy.deepcopy(model) for _ in range(2)]

    def body(axis: LoopbackCollectives) -> tuple[Tensor, Tensor]:
        model: Any = models[axis.rank]
        cut_over(model, MLP_PLAN, axis)
        with torch.no_grad():
            return model(seeded(2, WIDTH)), model.down.kept

    (total, first), (_, second) = LoopbackWorld(2).run(body)
    torch.testing.assert_close(first + second, total)


def test_modules_are_called_by_the_names_of_their_arguments() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

        def forward(self, ids: Tensor) -> Tensor:
            return self.down(input=torch.sin(self.up(input=self.embed(input=ids))))

    plan = ModelPlan("the test", {"embed": Style(Form.VOCABULARY), "up": COLUMN, "down": ROW})
    for found in compare(fp64(Named), plan, (torch.tensor([[1, 2, 10]]),), 2):
        assert found.worst < 1e-13


def test_dtypes_under_autocast_are_those_of_the_whole_module() -> None:
    models = [MLP().requires_grad_() for _ in range(2)]

    def body(axis: LoopbackCollectives) -> tuple[torch.dtype, torch.dtype]:
        with torch.autocast("cpu", torch.bfloat16):
            before = models[axis.rank](torch.ones(2, WIDTH)).dtype
            cut_over(models[axis.rank], MLP_PLAN, axis)
            return before, models[axis.rank](torch.ones(2, WIDTH)).dtype

    assert LoopbackWorld(2).run(body) == [(torch.bfloat16, torch.bfloat16)] * 2


@pytest.mark.parametrize("overlaps", [False, True])
def test_gradients_under_autocast_are_those_of_the_whole_module(overlaps: bool) -> None:
    def call(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    torch.manual_seed(2)
    for found in compare(MLP(), MLP_PLAN, (seeded(4, WIDTH).float(),), 2, call=call, overlaps=overlaps):
        assert found.worst < 0.02


@pytest.mark.parametrize("exact", [False, True])
def test_frozen_weights_have_no_gradient_and_pass_on_that_of_their_inputs(exact: bool) -> None:
    model = fp64(lambda: MLP()).requires_grad_(False)
    for found in compare(model, MLP_PLAN, (seeded(2, WIDTH),), 2, exact=exact):
        assert found.worst < 1e-13
        assert all(param.grad is None for param in found.model.parameters())


def test_an_input_without_a_gradient_has_none_summed() -> None:
    class Constant(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.detach())

    for found in compare(fp64(Constant), MLP_PLAN, (seeded(2, WIDTH).float().double(),), 2, call=lambda m, x: m(x)):
        assert found.errors["output"] < 1e-13
        assert found.backward.calls == Counter()
