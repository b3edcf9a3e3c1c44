"""A cut model against the same model whole: values, gradients, what is sent; and what cannot be cut, by name."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsrun.checkpoint_files.index.region import Region, TensorBoxes
from dsrun.errors import ModelError
from dsrun.runtime.layout.cuts import CutParameter, RankPlacement
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.parallel.tensor.cut import is_cut
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
from support.cut_models import (
    MODULES,
    VOCAB,
    WITH_VOCABULARY,
    Compared,
    compare,
    cut_over,
    model_of,
    plan_of,
    whole_values,
)

CUT, PARTIAL = RankPlacement(cut_over=("tensor",)), RankPlacement(summed_over=("tensor",))
VOCABULARY = Style(Form.VOCABULARY)
IDS = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(4))


def losses(model: Any, ids: Tensor) -> Tensor:
    return model(ids, labels=ids, use_cache=False).loss


def logits(model: Any, ids: Tensor) -> Tensor:
    return model(ids, use_cache=False).logits


def compare_model(
    model: Any,
    size: int,
    *,
    modules: Mapping[str, Style] = WITH_VOCABULARY,
    exact: bool = False,
    call: Any = losses,
    ids: Tensor = IDS,
) -> list[Compared]:
    return compare(model, plan_of(model, modules), (ids,), size, exact=exact, call=call)


# Bars: T1 and T2 of the design of parallel axes.


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("Llama", {}),
        ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("Qwen3", {"head_dim": 6}),
        ("Mixtral", {"num_local_experts": 4, "num_key_value_heads": 4}),
    ],
    ids=["Llama", "Llama with biases, tied", "Qwen3", "Mixtral"],
)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.usefixtures("transformers")
def test_loss_and_every_gradient_are_those_of_one_rank(size: int, family: str, values: dict[str, Any]) -> None:
    """With four ranks, each two of them use one head of keys."""
    for found in compare_model(model_of(family, **values), size):
        assert {name: error for name, error in found.errors.items() if not error < 1e-12} == {}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.usefixtures("transformers")
def test_a_block_sends_two_sums_of_hidden_states_forward_and_two_backward(size: int) -> None:
    blocks = 2
    numel = IDS.numel() * 32
    for found in compare_model(model_of("Llama"), size, modules=MODULES):
        for traffic in (found.forward, found.backward):
            assert traffic.calls == Counter(all_reduce=2 * blocks)
            assert traffic.bytes == Counter(all_reduce=2 * blocks * numel * torch.float64.itemsize)


@pytest.mark.parametrize(
    ("heads", "keys", "size"),
    [(6, 3, 3), (6, 3, 2), (10, 5, 4), (4, 1, 2), (8, 2, 8), (6, 6, 4)],
    ids=["three", "3 heads of keys over 2", "5 over 4", "one for all", "each of 2 on 4", "no groups, uneven"],
)
@pytest.mark.usefixtures("transformers")
def test_heads_stay_whole_and_keys_with_their_queries(heads: int, keys: int, size: int) -> None:
    sizes = {"hidden_size": 4 * heads, "num_attention_heads": heads, "num_key_value_heads": keys}
    model = model_of("Llama", attention_bias=True, **sizes)
    for rank, found in enumerate(compare_model(model, size)):
        assert found.worst < 1e-12
        attention = found.model.model.layers[0].self_attn
        mine = keys // size + (rank < keys % size) if keys >= size else 1
        assert attention.num_key_value_groups == (heads // keys if keys >= size else heads // size)
        assert attention.q_proj.weight.shape[0] == attention.num_key_value_groups * mine * 4
        assert attention.k_proj.weight.shape[0] == (mine if keys >= size else keys) * 4
        placement = found.cuts[id(attention.k_proj.weight)].placement
        assert placement == (CUT if keys >= size else PARTIAL)


class Packed(nn.Module):
    """Queries, keys and values in one weight; each two heads of queries share one of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim, self.num_heads, self.num_kv_heads = 2, 6, 3
        self.qkv, self.dense = nn.Linear(8, 24), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, 2)).transpose(-2, -3)
        q, k, v = heads.split([heads.shape[-3] // 4 * 2, heads.shape[-3] // 4, heads.shape[-3] // 4], -3)
        return self.dense(F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(-2, -3).flatten(-2))


@pytest.mark.parametrize("exact", [False, True])
def test_packed_queries_keys_and_values_are_cut_each_by_its_heads(exact: bool) -> None:
    plan = ModelPlan("the test", {"0.qkv": Style(Form.COLUMN, parts=(12, 6, 6)), "0.dense": ROW})
    x = torch.randn(2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    zero, one = compare(nn.Sequential(Packed()).double(), plan, (x,), 2, exact=exact)
    assert max(zero.worst, one.worst) < 1e-13
    runs = {0: [(0, 8), (12, 4), (18, 4)], 1: [(8, 4), (16, 2), (22, 2)]}
    for rank, found in enumerate((zero, one)):
        boxes = found.cuts[id(found.model[0].qkv.weight)].whole
        assert boxes == TensorBoxes((24, 8), tuple(Region((start, 0), (length, 8)) for start, length in runs[rank]))


# The exact mode.


@pytest.mark.parametrize(
    ("family", "values", "modules"),
    [
        ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}, WITH_VOCABULARY),
        (
            "Llama",
            {
                "tie_word_embeddings": True,
                "num_attention_heads": 6,
                "num_key_value_heads": 3,
                "intermediate_size": 46,
            },
            WITH_VOCABULARY,
        ),
        ("Mixtral", {"num_local_experts": 4, "num_key_value_heads": 4}, MODULES),
        (
            "Phi3",
            {"pad_token_id": 0},
            {
                "qkv_proj": GATHERED_COLUMN,
                "gate_up_proj": Style(Form.COLUMN, parts=2),
                "o_proj": SPLIT_ROW,
                "down_proj": ROW,
                "embed_tokens": Style(Form.HIDDEN, gathers_output=True),
            },
        ),
    ],
    ids=["biases", "tied, uneven", "experts", "packed"],
)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("transformers")
def test_the_exact_mode_has_the_bits_of_one_rank(
    dtype: torch.dtype, size: int, family: str, values: dict[str, Any], modules: Mapping[str, Style]
) -> None:
    """Lengths are multiples of 32: of what is left, torch's CPU computes an exponential in another way."""
    model = model_of(family, hidden_size=48, **{"head_dim": 8, "intermediate_size": 192, **values}).to(dtype)
    for found in compare_model(model, size, modules=modules, exact=True, ids=torch.cat([IDS, IDS.flip(0)], 1)[:, :16]):
        assert found.same, found.errors


@pytest.mark.usefixtures("transformers")
def test_the_exact_mode_is_right_where_gradients_are_sums_over_ranks_by_nature() -> None:
    """Norms of this rank's heads: outputs have the bits of one rank, their gradients another order of additions."""
    for found in compare_model(model_of("Qwen3", head_dim=6), 2, exact=True, call=logits):
        assert found.errors["output"] == 0.0
        assert found.worst < 1e-12


# Other ways to compute and to send the same.


@pytest.mark.parametrize(
    "options",
    [{"overlaps": True}, {"slices": True}, {"slices": True, "overlaps": True}, {"slices": True, "exact": True}],
    ids=["overlapped", "sliced", "sliced, overlapped", "sliced, exact"],
)
@pytest.mark.parametrize(
    ("family", "values"),
    [("Llama", {"attention_bias": True, "mlp_bias": True}), ("Qwen3", {"head_dim": 6})],
    ids=["Llama with biases", "Qwen3"],
)
@pytest.mark.usefixtures("transformers")
def test_options_change_no_gradient(family: str, values: dict[str, Any], options: dict[str, bool]) -> None:
    """A bias behind a row sees slices of the sequence, or in the exact mode all of it."""
    model = model_of(family, **values)
    for found in compare(model, plan_of(model, WITH_VOCABULARY), (IDS[:, :8],), 2, call=losses, **options):
        assert {name: error for name, error in found.errors.items() if not error < 1e-12} == {}


# What a rank has.


@pytest.mark.usefixtures("transformers")
def test_all_ranks_have_parts_of_the_first_ranks_values() -> None:
    models = [model_of("Mixtral", num_local_experts=2) for _ in range(3)]
    for rank, model in enumerate(models):
        with torch.no_grad():
            for param in model.parameters():
                param.add_(rank)
    first = {name: param.detach().clone() for name, param in models[0].named_parameters()}
    modules = {**WITH_VOCABULARY, "k_proj": WHOLE, "v_proj": WHOLE, "q_proj": WHOLE, "o_proj": WHOLE}

    def body(axis: LoopbackCollectives) -> None:
        model = models[axis.rank]
        cuts = cut_over(model, plan_of(model, modules), axis)
        parts = [name for name, param in model.named_parameters() if id(param) in cuts]
        assert len(parts) == 6
        values = whole_values(model, cuts, axis)
        for name in parts:
            assert torch.equal(values[name], first[name]), name

    LoopbackWorld(3).run(body)


def test_each_part_is_said_with_its_boxes_and_nothing_else_of_the_model_is_touched() -> None:
    def make() -> nn.Module:
        return nn.ModuleDict(
            {
                "up": nn.Linear(6, 5),
                "down": nn.Linear(5, 6),
                "norm": nn.LayerNorm(6),
                "embed": nn.Embedding(7, 6, padding_idx=5),
                "left": nn.Linear(6, 6),
            }
        )

    models: list[Any] = [make() for _ in range(2)]
    plan = ModelPlan(
        "the test",
        {"up": COLUMN, "down": ROW, "norm": Style(Form.PARTIAL_GRADIENT), "embed": VOCABULARY, "left": WHOLE},
    )
    untouched = [param for model in models for key in ("norm", "left") for param in model[key].parameters()]
    kept = [param.detach().clone() for param in untouched]

    def body(axis: LoopbackCollectives) -> dict[str, CutParameter]:
        model = models[axis.rank]
        params = dict(model.named_parameters())
        cuts = cut_over(model, plan, axis)
        assert is_cut(model)
        assert all(param is params[name] for name, param in model.named_parameters()), (
            "parameters stay the same objects"
        )
        assert all(param.is_contiguous() for param in model.parameters())
        return {name: cuts[id(param)] for name, param in params.items() if id(param) in cuts}

    zero, one = LoopbackWorld(2).run(body)
    partial = {"norm.weight": CutParameter(PARTIAL), "norm.bias": CutParameter(PARTIAL)}
    assert zero == partial | {
        "up.weight": CutParameter(CUT, TensorBoxes((5, 6), (Region((0, 0), (3, 6)),))),
        "up.bias": CutParameter(CUT, TensorBoxes((5,), (Region((0,), (3,)),))),
        "down.weight": CutParameter(CUT, TensorBoxes((6, 5), (Region((0, 0), (6, 3)),))),
        "embed.weight": CutParameter(CUT, TensorBoxes((7, 6), (Region((0, 0), (4, 6)),))),
    }
    assert one == partial | {
        "up.weight": CutParameter(CUT, TensorBoxes((5, 6), (Region((3, 0), (2, 6)),))),
        "up.bias": CutParameter(CUT, TensorBoxes((5,), (Region((3,), (2,)),))),
        "down.weight": CutParameter(CUT, TensorBoxes((6, 5), (Region((0, 3), (6, 2)),))),
        "embed.weight": CutParameter(CUT, TensorBoxes((7, 6), (Region((4, 0), (3, 6)),))),
    }
    assert [model["embed"].padding_idx for model in models] == [None, 1]
    assert [(model["up"].out_features, model["down"].in_features) for model in models] == [(3, 3), (2, 2)]
    assert all(torch.equal(param, value) for param, value in zip(untouched, kept, strict=True))


def test_a_weight_that_is_frozen_or_has_another_dtype_keeps_that() -> None:
    models = [nn.Sequential(nn.Linear(4, 4).bfloat16().requires_grad_(False)) for _ in range(2)]

    def body(axis: LoopbackCollectives) -> tuple[torch.dtype, bool]:
        cut_over(models[axis.rank], ModelPlan("the test", {"0": GATHERED_COLUMN}), axis)
        weight = models[axis.rank][0].weight
        return weight.dtype, weight.requires_grad

    assert LoopbackWorld(2).run(body) == [(torch.bfloat16, False)] * 2


class Tied(nn.Module):
    """A model whose output layer is its embedding."""

    def __init__(self, tokens: int = 11) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(tokens, 6), nn.Linear(6, tokens, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.sin(self.embed(ids)))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("exact", [False, True])
def test_a_tied_weight_stays_one_and_has_the_gradient_of_both_uses(exact: bool, size: int) -> None:
    plan = ModelPlan("the test", {"embed": VOCABULARY, "head": GATHERED_COLUMN})
    for found in compare(Tied().double(), plan, (torch.tensor([[1, 10, 3]]),), size, exact=exact):
        assert found.worst < 1e-13
        assert found.model.head.weight is found.model.embed.weight
        assert len(found.cuts) == 1


class Headed(nn.Module):
    """Attention that divides its width by a number of heads that it keeps, as models of old do."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.num_heads, self.all_head_size, self.name = heads, 8, "attention"
        self.query, self.key, self.value, self.dense = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], self.num_heads, self.all_head_size // self.num_heads)
        q, k, v = (part(x).view(shape).transpose(-2, -3) for part in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v).transpose(-2, -3)
        return self.dense(y.reshape(*x.shape[:-1], self.all_head_size))


HEADED = {"query": COLUMN, "key": COLUMN, "value": COLUMN, "dense": ROW}


def test_numbers_of_what_a_rank_has_are_divided() -> None:
    model = nn.Sequential(Headed()).double()
    plan = ModelPlan(
        "the test",
        {f"0.{name}": style for name, style in HEADED.items()},
        attributes={"0": ("num_heads", "all_head_size", "name", "no_such_number")},
    )
    x = torch.randn(2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for found in compare(model, plan, (x,), 2):
        assert found.worst < 1e-13
        attention = found.model[0]
        assert (attention.num_heads, attention.all_head_size, attention.name) == (2, 4, "attention")


# What cannot be cut.


class Tailed(nn.Linear):
    """A Linear with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


class Grouped(nn.Module):
    """Queries' heads with fewer heads of keys."""

    def __init__(self, queries: int, keys: int, *, kind: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.head_dim, self.num_heads = 2, queries
        self.q_proj, self.o_proj = nn.Linear(8, 2 * queries), nn.Linear(2 * queries, 8)
        self.k_proj, self.v_proj = kind(8, 2 * keys), kind(8, 2 * keys)


GROUPED = {"q_proj": COLUMN, "k_proj": COLUMN, "v_proj": COLUMN, "o_proj": ROW}


def refusal(
    make: Callable[[], nn.Module],
    plan: ModelPlan,
    size: int,
    *,
    exact: bool = False,
    cut_before: ModelPlan | None = None,
) -> ModelError:
    """Returns the one error that every rank raises; no rank has sent anything, or changed its model."""
    models = [make() for _ in range(size)]

    def body(axis: LoopbackCollectives) -> ModelError:
        model = models[axis.rank]
        if cut_before is not None:
            cut_over(model, cut_before, axis)
        before = {name: (type(part), copy.copy(part.__dict__)) for name, part in model.named_modules()}
        values = {name: param.detach().clone() for name, param in model.named_parameters()}
        calls = Counter(axis.traffic.calls)
        with pytest.raises(ModelError) as caught:
            cut_over(model, plan, axis, exact=exact)
        assert axis.traffic.calls == calls
        assert {name: (type(part), part.__dict__) for name, part in model.named_modules()} == before
        assert all(torch.equal(param, values[name]) for name, param in model.named_parameters())
        return caught.value

    first, *others = LoopbackWorld(size).run(body)
    assert all(error.render() == first.render() for error in others)
    return first


def alone(module: Callable[[], nn.Module], style: Style) -> tuple[Callable[[], nn.Module], ModelPlan]:
    return lambda: nn.ModuleDict({"part": module()}), ModelPlan("the test", {"part": style})


def inside(module: Callable[[], nn.Module], styles: Mapping[str, Style]) -> tuple[Callable[[], nn.Module], ModelPlan]:
    plan = ModelPlan("the test", {f"part.{name}": style for name, style in styles.items()})
    return lambda: nn.ModuleDict({"part": module()}), plan


@pytest.mark.parametrize(
    ("case", "size", "message"),
    [
        pytest.param(
            alone(lambda: nn.LayerNorm(4), COLUMN),
            2,
            "`part` (LayerNorm) is no Linear, and is to be cut as column (plan of the test)",
            id="a norm by columns",
        ),
        pytest.param(
            alone(lambda: nn.Embedding(4, 4), ROW),
            2,
            "`part` (Embedding) is no Linear, and is to be cut as row (plan of the test)",
            id="an embedding as a Linear",
        ),
        pytest.param(
            alone(lambda: nn.Conv2d(4, 4, 1), ROW),
            2,
            "`part` (Conv2d) is no Linear, and is to be cut as row (plan of the test)",
            id="a convolution",
        ),
        pytest.param(
            alone(lambda: nn.Linear(4, 4), VOCABULARY),
            2,
            "`part` (Linear) is no Embedding, and is to be cut as vocabulary (plan of the test)",
            id="a Linear over its tokens",
        ),
        pytest.param(
            alone(lambda: nn.Linear(4, 4), Style(Form.HIDDEN)),
            2,
            "`part` (Linear) is no Embedding, and is to be cut as hidden (plan of the test)",
            id="a Linear as an embedding",
        ),
        pytest.param(
            alone(lambda: Tailed(4, 4), ROW),
            2,
            "`part` (Tailed) has a forward of its own, which adds the bias once a rank (plan of the test)",
            id="a row that adds its bias itself",
        ),
        pytest.param(
            alone(lambda: nn.Linear(4, 5), Style(Form.COLUMN, parts=2)),
            2,
            "`part.weight` (Linear) has 5 along dim 0, which is no 2 equal parts (plan of the test)",
            id="parts that are not equal",
        ),
        pytest.param(
            alone(lambda: nn.Linear(4, 8), Style(Form.COLUMN, parts=(4, 2))),
            2,
            "`part.weight` (Linear) has 8 along dim 0, which is not 4 + 2 (plan of the test)",
            id="lengths that are not the whole",
        ),
        pytest.param(
            alone(lambda: nn.Linear(4, 2), COLUMN),
            3,
            "`part.weight` (Linear) has 2 along dim 0, too few for 3 ranks (plan of the test)",
            id="fewer columns than ranks",
        ),
        pytest.param(
            alone(lambda: nn.Embedding(2, 4), VOCABULARY),
            3,
            "`part.weight` (Embedding) has 2 along dim 0, too few for 3 ranks (plan of the test)",
            id="fewer tokens than ranks",
        ),
        pytest.param(
            alone(lambda: nn.Embedding(4, 4, max_norm=1.0), VOCABULARY),
            2,
            "`part` (Embedding) has max_norm, which needs whole vectors and what is looked up (plan of the test)",
            id="an embedding that changes its vectors",
        ),
        pytest.param(
            alone(lambda: nn.Embedding(4, 4, scale_grad_by_freq=True), VOCABULARY),
            2,
            "`part` (Embedding) has scale_grad_by_freq, which needs whole vectors and what is looked up "
            "(plan of the test)",
            id="an embedding that counts what is looked up",
        ),
        pytest.param(
            inside(lambda: Grouped(6, 3), GROUPED),
            4,
            "`part.q_proj` (Linear) has 6 heads of queries and 3 of keys, which 4 ranks cannot share "
            "(plan of the test)",
            id="heads that ranks cannot share",
        ),
        pytest.param(
            inside(lambda: Grouped(4, 2, kind=Tailed), GROUPED),
            4,
            "`part.k_proj` (Tailed) has 2 heads of keys for 4 ranks, and is not built so that several can use one "
            "(plan of the test)",
            id="keys that cannot be repeated",
        ),
        pytest.param(
            inside(lambda: Grouped(2, 2), GROUPED),
            4,
            "`part.q_proj` (Linear) has 2 heads of queries and 2 of keys, which 4 ranks cannot share "
            "(plan of the test)",
            id="more ranks than heads",
        ),
        pytest.param(
            (Tied, ModelPlan("the test", {"embed": Style(Form.HIDDEN, gathers_output=True), "head": GATHERED_COLUMN})),
            2,
            "`head.weight` (Linear) is one weight with `embed.weight`, which is cut in another way (plan of the test)",
            id="a tied weight in two ways",
        ),
        pytest.param(
            (Tied, ModelPlan("the test", {"head": GATHERED_COLUMN})),
            2,
            "`embed.weight` (Embedding) is one weight with `head.weight`, which is cut, and stays whole itself "
            "(plan of the test)",
            id="a tied weight that the plan names once",
        ),
        pytest.param(
            (
                lambda: nn.ModuleDict({"part": Headed(3)}),
                ModelPlan("the test", {"part.dense": Style(Form.WHOLE)}, attributes={"part": ("num_heads",)}),
            ),
            2,
            "`part` (Headed) has num_heads 3, which is no multiple of 2 ranks (plan of the test)",
            id="an attribute that does not divide",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(
    case: tuple[Callable[[], nn.Module], ModelPlan], size: int, message: str
) -> None:
    error = refusal(*case, size)
    assert f"model: {message}" in [problem.message for problem in error.problems]
    assert all(problem.hint for problem in error.problems)


def test_the_exact_mode_refuses_heads_that_are_repeated() -> None:
    error = refusal(*inside(lambda: Grouped(4, 2), GROUPED), 4, exact=True)
    assert [problem.message for problem in error.problems] == [
        f"model: `part.{name}` (Linear) repeats heads, of which the exact mode knows nothing (plan of the test)"
        for name in ("k_proj", "v_proj")
    ]
    assert {problem.hint for problem in error.problems} == {"leave `exact` out"}


def test_all_that_is_wrong_is_told_at_once() -> None:
    def make() -> nn.Module:
        return nn.ModuleDict(
            {"norm": nn.LayerNorm(4), "few": nn.Linear(4, 1), "good": nn.Linear(4, 4), "odd": Headed(3)}
        )

    plan = ModelPlan(
        "the test",
        {"norm": COLUMN, "few": GATHERED_COLUMN, "good": GATHERED_COLUMN},
        attributes={"odd": ("num_heads",)},
    )
    error = refusal(make, plan, 2)
    assert [problem.message.split("`")[1] for problem in error.problems] == ["norm", "few.weight", "few.bias", "odd"]


def test_a_model_is_cut_once() -> None:
    make, plan = alone(lambda: nn.Linear(4, 4), GATHERED_COLUMN)
    error = refusal(make, plan, 2, cut_before=plan)
    assert "an earlier engine has cut it over the tensor axis" in error.render()


@pytest.mark.parametrize(
    "plan",
    [
        ModelPlan("the test", {"part": COLUMN, "nothing": COLUMN}),
        ModelPlan("the test", {"part": COLUMN}, {"part.nothing": COLUMN}),
    ],
)
def test_a_plan_of_names_that_the_model_has_not_is_a_fault_of_its_source(plan: ModelPlan) -> None:
    models = [nn.ModuleDict({"part": nn.Linear(4, 4)}) for _ in range(2)]

    def body(axis: LoopbackCollectives) -> None:
        with pytest.raises(AssertionError, match=r"the test names what is not in the model: \['(part\.)?nothing'\]"):
            cut_over(models[axis.rank], plan, axis)

    LoopbackWorld(2).run(body)
