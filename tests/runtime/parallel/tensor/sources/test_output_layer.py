"""The output layer is found and cut over the vocabulary; modules with one weight are cut alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from dsrun.errors import ModelError
from dsrun.runtime.parallel.tensor.sources.output_layer import align_ties, cut_output_layer, find_output_layer
from dsrun.runtime.parallel.tensor.styles import COLUMN, GATHERED_COLUMN, ROW, SPLIT_ROW, WHOLE, Form, ModelPlan, Style

PATTERNS = ("lm_head", "embed_out")
VOCABULARY = Style(Form.VOCABULARY)
COLUMNS = Style(Form.HIDDEN, gathers_output=True)


class Model(nn.Module):
    """An embedding and an output layer, which may have one weight."""

    def __init__(self, *, tied: bool = True, **more: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.lm_head = nn.Linear(4, 8, bias=False)
        self.up = nn.Linear(4, 4)
        for name, module in more.items():
            self.add_module(name, module)
        if tied:
            self.lm_head.weight = self.embed.weight


def aligned(model: nn.Module, **modules: Style) -> dict[str, Style]:
    return dict(align_ties(model, ModelPlan("test", modules)).modules)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"lm_head": GATHERED_COLUMN}, {"lm_head": GATHERED_COLUMN, "embed": VOCABULARY}),
        ({"embed": VOCABULARY}, {"lm_head": GATHERED_COLUMN, "embed": VOCABULARY}),
        ({"lm_head": SPLIT_ROW}, {"lm_head": SPLIT_ROW, "embed": COLUMNS}),
        ({"embed": COLUMNS}, {"lm_head": SPLIT_ROW, "embed": COLUMNS}),
        ({"lm_head": SPLIT_ROW, "embed": VOCABULARY}, {"lm_head": SPLIT_ROW, "embed": COLUMNS}),
        ({"lm_head": COLUMN, "embed": WHOLE}, {"lm_head": COLUMN, "embed": VOCABULARY}),
        ({}, {}),
        ({"lm_head": WHOLE}, {"lm_head": WHOLE}),
    ],
)
def test_one_weight_is_cut_one_way(given: dict[str, Style], expected: dict[str, Style]) -> None:
    assert aligned(Model(), up=COLUMN, **given) == {"up": COLUMN, **expected}


@pytest.mark.parametrize("given", [{"lm_head": GATHERED_COLUMN}, {"embed": VOCABULARY}, {"lm_head": ROW}])
def test_weights_of_their_own_are_left_as_the_plan_says(given: dict[str, Style]) -> None:
    assert aligned(Model(tied=False), **given) == given


def test_a_weight_that_another_kind_of_module_has_too_stays_whole() -> None:
    class Scores(nn.Module):
        def __init__(self, embed: nn.Embedding) -> None:
            super().__init__()
            self.weight = embed.weight

    model = Model()
    model.add_module("scores", Scores(model.embed))
    assert aligned(model, lm_head=GATHERED_COLUMN) == dict.fromkeys(("embed", "lm_head", "scores"), WHOLE)


def test_a_bias_that_two_modules_have_ties_no_weights() -> None:
    model = Model(tied=False, other=nn.Linear(4, 8))
    model.lm_head.bias = model.get_submodule("other").bias  # pyright: ignore[reportAttributeAccessIssue]
    assert aligned(model, lm_head=GATHERED_COLUMN) == {"lm_head": GATHERED_COLUMN}


def test_the_output_layer_is_the_one_that_the_model_names() -> None:
    class Speaks(Model):
        def get_output_embeddings(self) -> Any:
            return self.up

    assert find_output_layer(Speaks(), PATTERNS) == "up"
    assert find_output_layer(Model(), PATTERNS) == "lm_head"
    assert find_output_layer(nn.ModuleDict({"inner": Model()}), PATTERNS) == "inner.lm_head"


def test_it_is_cut_over_the_vocabulary_whatever_the_plan_says() -> None:
    plan = cut_output_layer(Model(), ModelPlan("test", {"up": COLUMN, "lm_head": SPLIT_ROW}), PATTERNS)
    assert plan.modules == {"up": COLUMN, "lm_head": GATHERED_COLUMN}


class Block(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)


class Stack(nn.Module):
    """Two blocks, and layers around them."""

    def __init__(self, **more: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        for name, module in more.items():
            self.add_module(name, module)


PLACE = "`tensor_parallel.partition_config.lm_head_patterns`"
OUT = "leave out `tensor_parallel.vocab_parallel_lm_head`"
RULE = f'{OUT}, and cut one by a rule of `tensor_parallel.partition_config.layer_specs`, a "column" with '


@pytest.mark.parametrize(
    ("model", "said", "hint"),
    [
        (
            Stack(head=nn.Linear(4, 8)),
            "no Linear called `lm_head` or `embed_out`",
            f'write which one it is: {PLACE}: ["head"], or {OUT}',
        ),
        (
            Stack(lm_head=nn.Linear(4, 8), embed_out=nn.Linear(4, 8)),
            "2 output layers: `lm_head`, `embed_out`",
            f'write which one it is: {PLACE}: ["embed_out"], or {OUT}',
        ),
        (
            nn.ModuleDict({"a": Model(), "b": Model()}),
            "2 output layers: `a.lm_head`, `b.lm_head`",
            f'{RULE}"gather_output": true',
        ),
        (
            Stack(embed=nn.Embedding(8, 4)),
            "no Linear called `lm_head` or `embed_out`",
            f"{OUT}: a Linear outside of the repeated blocks would make the logits",
        ),
    ],
)
def test_no_output_layer_or_several_are_refused_with_the_way_out(model: nn.Module, said: str, hint: str) -> None:
    with pytest.raises(ModelError) as error:
        find_output_layer(model, PATTERNS)
    assert str(error.value) == f"`tensor_parallel.vocab_parallel_lm_head` is true, and the model has {said}"
    assert error.value.hint == hint


@pytest.mark.parametrize(
    ("given", "form"),
    [({"lm_head": GATHERED_COLUMN}, GATHERED_COLUMN), ({"embed": VOCABULARY}, VOCABULARY), ({"lm_head": ROW}, ROW)],
)
def test_parts_side_by_side_are_those_of_the_style_that_counts(given: dict[str, Style], form: Style) -> None:
    (name,) = given
    other = {"lm_head": "embed", "embed": "lm_head"}[name]
    found = aligned(Model(), **{name: replace(form, parts=2)})
    assert (found[name].parts, found[other].parts) == (2, 2)
    both = aligned(Model(), **{name: replace(form, parts=2), other: replace(found[other], parts=4)})
    assert len({style.parts for style in both.values()}) == 1, "the Linear's"
    assert both["embed"].parts == both["lm_head"].parts == (2 if name == "lm_head" else 4)
