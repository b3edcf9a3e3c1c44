"""Rules of a config cut what their patterns name, the first that matches, in the parts that their shapes say."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dsrun.config.sections.parallel import LayerSpec
from dsrun.errors import ModelError
from dsrun.runtime.parallel.tensor.sources.partition_config import model_type_of, plan_of
from dsrun.runtime.parallel.tensor.styles import COLUMN, GATHERED_COLUMN, ROW, WHOLE, Form, ModelPlan, Style


class Block(nn.Module):
    """A block with a norm of heads, which has a bias, too."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 12)
        self.norm = nn.LayerNorm(6)
        self.down = nn.Linear(12, 6)


def model_of(**children: nn.Module) -> nn.Module:
    with torch.device("meta"):
        blocks = nn.ModuleList(Block() for _ in range(2))
    return nn.ModuleDict({"blocks": blocks, **children})


def rule(patterns: Any, kind: str = "column", **keys: Any) -> LayerSpec:
    given = {"patterns": (patterns,) if isinstance(patterns, str) else tuple(patterns), "partition_type": kind, **keys}
    return LayerSpec.model_validate(given)


def planned(*rules: LayerSpec, model: nn.Module | None = None, strict: bool = False) -> ModelPlan:
    return plan_of(model_of() if model is None else model, rules, source="`rules`", strict=strict)


def test_patterns_are_of_whole_names_of_parameters_and_biases_go_along() -> None:
    plan = planned(rule(r".*\.up\.weight$"), rule(r"blocks\.\d+\.down\.", "row"))
    assert plan.modules == {
        "blocks.0.up": COLUMN,
        "blocks.0.down": ROW,
        "blocks.1.up": COLUMN,
        "blocks.1.down": ROW,
    }
    assert plan.parameters == {}
    assert plan.source == "`rules`"


@pytest.mark.parametrize("pattern", [r"\.up\.weight$", r".*\.up$", r"up", r".*\.up\.bias$"])
def test_a_pattern_that_is_not_of_a_weights_name_from_its_beginning_cuts_nothing(pattern: str) -> None:
    assert planned(rule(pattern)).modules == {}


def test_the_first_rule_that_matches_counts() -> None:
    plan = planned(rule(r".*0\.up\.weight", "skip"), rule([r".*\.nothing", r".*\.up\.weight"]))
    assert plan.modules == {"blocks.0.up": WHOLE, "blocks.1.up": COLUMN}


def test_a_rule_that_matches_a_bias_alone_changes_nothing() -> None:
    plan = planned(rule(r".*\.up\.weight"), rule(r".*\.up\.", "skip"))
    assert plan.modules == {"blocks.0.up": COLUMN, "blocks.1.up": COLUMN}
    assert planned(rule(r".*\.up\.bias", "skip")).modules == {}


def test_a_broad_pattern_leaves_norms_and_convolutions_alone() -> None:
    model = model_of(convolution=nn.Conv1d(4, 4, 2))
    linears = {"blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"}
    assert set(planned(rule(r".*"), model=model).modules) == linears


def test_a_skipped_norm_may_have_its_gradients_summed() -> None:
    plan = planned(rule(r".*\.norm\.weight$", "skip", grad_allreduce=True))
    assert plan.modules == dict.fromkeys(("blocks.0.norm", "blocks.1.norm"), Style(Form.PARTIAL_GRADIENT))


def test_an_output_layer_may_be_put_together() -> None:
    model = model_of(head=nn.Linear(6, 8))
    assert planned(rule(r"head\.weight", gather_output=True), model=model).modules == {"head": GATHERED_COLUMN}


@pytest.mark.parametrize(
    ("spec", "style"),
    [
        (rule("embed", "row"), Style(Form.VOCABULARY)),
        (rule("embed", "column"), Style(Form.HIDDEN)),
        (rule("embed", "column", gather_output=True), Style(Form.HIDDEN, gathers_output=True)),
        (rule("embed", "row", partition_dim=0), Style(Form.VOCABULARY)),
    ],
)
def test_an_embeddings_inputs_are_its_tokens(spec: LayerSpec, style: Style) -> None:
    assert planned(spec, model=model_of(embed=nn.Embedding(8, 6))).modules == {"embed": style}


@pytest.mark.parametrize("keys", [{"shape": (2, -1)}, {"partition_dim": 0}])
def test_an_embedding_has_no_shape(keys: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"`embed.weight` is \[8, 6\], and its rule of `rules` has a `shape` or a"):
        planned(rule("embed", **keys), model=model_of(embed=nn.Embedding(8, 6)))


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({}, 1),
        ({"partition_dim": 0}, 1),
        ({"shape": (-1, -1)}, 1),
        ({"shape": (2, -1), "partition_dim": 0}, 2),
        ({"shape": (3, 6)}, 3),
        ({"shape": ((6, 3, 3), -1)}, (6, 3, 3)),
        ({"shape": ((4, 4, 4), -1)}, 3),
        ({"shape": (3, -1, 6), "partition_dim": 1}, 3),
        ({"shape": (3, (2, 2), 6), "partition_dim": 1}, 6),
        ({"shape": (2, (4, 2), 6), "partition_dim": 1}, (4, 2, 4, 2)),
        ({"shape": ((2, 1), 4, 6), "partition_dim": 0}, (8, 4)),
    ],
)
def test_a_shape_says_what_stands_side_by_side_in_a_columns_outputs(keys: dict[str, Any], parts: Any) -> None:
    plan = planned(rule(r".*\.up\.weight", **keys))
    assert plan.modules["blocks.0.up"] == Style(Form.COLUMN, parts=parts)


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"shape": (-1, 2)}, 2),
        ({"shape": (-1, (8, 4)), "partition_dim": 1}, (8, 4)),
        ({"shape": (2, -1, 3), "partition_dim": 2}, 3),
        ({"partition_dim": 1}, 1),
    ],
)
def test_a_shape_says_what_stands_side_by_side_in_a_rows_inputs(keys: dict[str, Any], parts: Any) -> None:
    plan = planned(rule(r".*\.down\.weight", "row", **keys))
    assert plan.modules["blocks.0.down"] == Style(Form.ROW, parts=parts)


@pytest.mark.parametrize(
    ("kind", "keys", "reason"),
    [
        ("column", {"shape": (5, -1)}, "asks for 5 equal parts of 12"),
        ("column", {"shape": ((6, 3), -1)}, "has shape [[6, 3], -1]"),
        ("column", {"shape": (2, 5)}, "has shape [2, 5]"),
        ("column", {"shape": (5, -1, 6), "partition_dim": 1}, "has shape [5, -1, 6]"),
        ("column", {"shape": (-1, 2), "partition_dim": 1}, "cuts inputs as a column"),
        ("column", {"partition_dim": 1}, "cuts inputs as a column"),
        ("row", {"partition_dim": 0}, "cuts outputs as a row"),
        ("row", {"shape": (3, -1, 6)}, "cuts outputs as a row"),
    ],
)
def test_a_shape_that_is_not_the_weights_is_refused(kind: str, keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError) as error:
        planned(rule(r".*\.up\.weight", kind, **keys))
    assert [problem.message for problem in error.value.problems] == [
        f"model: `blocks.{place}.up.weight` is [12, 6], and its rule of `rules` {reason}" for place in range(2)
    ]


@pytest.mark.parametrize(("kind", "last"), [("column", "up"), ("row", "down")])
def test_the_hint_has_shapes_that_fit(kind: str, last: str) -> None:
    name = rf".*\.{last}\.weight"
    with pytest.raises(ModelError) as error:
        planned(rule(name, kind, shape=(7, -1) if kind == "column" else (-1, 7)))
    hint = error.value.problems[0].hint or ""
    shapes = [json.loads(one) for one in re.findall(r"\[(?:\[.*?\]|-1|\d+), (?:\[.*?\]|-1|\d+)\]", hint)]
    assert len(shapes) == 4, hint
    found = []
    for shape in shapes:
        given = tuple(tuple(item) if isinstance(item, list) else item for item in shape)
        found.append(planned(rule(name, kind, shape=given)).modules[f"blocks.0.{last}"].parts)
    assert found == [2, 3, 4, (8, 4)]
    assert hint.endswith("see `dsrun config explain tensor_parallel.partition_config.layer_specs.shape`")


class Experts(nn.Module):
    """Experts in one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.zeros(4, 12, 6))
        self.down = nn.Parameter(torch.zeros(4, 6, 12))


def test_weights_of_experts_are_cut_by_their_own_names_and_their_module_with_them() -> None:
    plan = planned(
        rule(r"experts\.gate_up$", shape=(4, 2, 6), partition_dim=1),
        rule(r"experts\.down$", "row"),
        model=model_of(experts=Experts()),
    )
    assert plan.modules == {"experts": Style(Form.EXPERTS)}
    assert plan.parameters == {"experts.gate_up": Style(Form.COLUMN, parts=2), "experts.down": ROW}
    some = planned(rule(r"experts\.down$", "row"), rule(r"experts\.", "skip"), model=model_of(experts=Experts()))
    assert (some.modules, some.parameters) == ({"experts": Style(Form.EXPERTS)}, {"experts.down": ROW})


def test_experts_have_the_number_that_the_shape_says() -> None:
    with pytest.raises(ModelError, match=r"`experts.gate_up` is \[4, 12, 6\], and its rule of `rules` has shape"):
        planned(rule(r"experts\.gate_up$", shape=(3, 2, 6), partition_dim=1), model=model_of(experts=Experts()))


def test_a_rule_may_be_for_some_types_of_models() -> None:
    model = model_of()
    some = rule(r".*\.up\.weight", model_types=("Llama", "qwen2"))
    assert planned(some, model=model).modules == {}
    model.get_submodule("blocks").config = SimpleNamespace(model_type="LLAMA")
    assert model_type_of(model) == "llama"
    assert set(planned(some, model=model).modules) == {"blocks.0.up", "blocks.1.up"}
    assert planned(rule(r".*\.up\.weight", model_types=("bloom",)), model=model).modules == {}


def test_strict_rules_name_every_linear_that_they_leave_out() -> None:
    model = model_of(head=nn.Linear(6, 8), embed=nn.Embedding(8, 6))
    with pytest.raises(ModelError) as error:
        planned(rule(r".*\.up\.weight"), rule(r".*0\.down\.weight", "row"), model=model, strict=True)
    assert [problem.message for problem in error.value.problems] == [
        f"model: no rule of `rules` matches `{name}.weight`, and `strict_mode` is true"
        for name in ("blocks.1.down", "head")
    ]
    whole = rule(r"head\.weight", "skip")
    plan = planned(rule(r".*\.up\.weight"), rule(r".*\.down\.weight", "row"), whole, model=model, strict=True)
    assert plan.modules["head"] == WHOLE


def test_skipped_latent_attention_shares_the_columns_that_go_to_all_heads() -> None:
    class Latent(nn.Module):
        qk_rope_head_dim = 2

        def __init__(self) -> None:
            super().__init__()
            self.kv_a_proj_with_mqa = nn.Linear(6, 5)
            self.kv_b_proj = nn.Linear(3, 12)

    model = model_of(attention=Latent())
    rules = (rule(r".*\.kv_b_proj\.weight"), rule(r".*\.kv_a_proj_with_mqa\.weight", "skip"))
    assert planned(*rules, model=model).modules == {
        "attention.kv_b_proj": COLUMN,
        "attention.kv_a_proj_with_mqa": Style(Form.SHARED_TAIL, tail=2),
    }
