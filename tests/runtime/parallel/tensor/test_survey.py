"""What stands in the way of a cut is said before it: weights of two names, and weights that a forward reads itself."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsrun.errors import Problem
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.parallel.tensor.styles import COLUMN, GATHERED_COLUMN, ROW, Form, ModelPlan, Style
from dsrun.runtime.parallel.tensor.survey import Survey

VOCABULARY = Style(Form.VOCABULARY)


def problems_of(model: nn.Module, **modules: Style) -> list[Problem]:
    """Returns what stands in the way of a plan, with names whose dots are written `__`."""
    plan = ModelPlan("the test", {name.replace("__", "."): style for name, style in modules.items()})

    def body(axis: LoopbackCollectives) -> list[Problem]:
        return Survey(model, plan, axis, exact=False).problems

    first, second = LoopbackWorld(2).run(body)
    assert first == second
    return first


class Tied(nn.Module):
    """Two Linears and an embedding of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head, self.other = nn.Linear(4, 8, bias=False), nn.Linear(4, 8, bias=False)
        self.head.weight = self.other.weight = self.embed.weight


@pytest.mark.parametrize(
    ("styles", "others"),
    [
        ((GATHERED_COLUMN, GATHERED_COLUMN, VOCABULARY), []),
        ((Style(Form.COLUMN, parts=2), Style(Form.COLUMN, parts=2), Style(Form.VOCABULARY, parts=2)), []),
        ((Style(Form.COLUMN, parts=2), GATHERED_COLUMN, Style(Form.VOCABULARY, parts=2)), ["other"]),
        ((COLUMN, Style(Form.COLUMN, parts=(6, 2)), VOCABULARY), ["other"]),
        ((ROW, COLUMN, VOCABULARY), ["head"]),
    ],
)
def test_one_weight_is_cut_along_one_dim_and_dealt_one_way(
    styles: tuple[Style, Style, Style], others: list[str]
) -> None:
    head, other, embed = styles
    found = problems_of(Tied(), head=head, other=other, embed=embed)
    reason = "is one weight with `embed.weight`, which is cut in another way (plan of the test)"
    assert [problem.message for problem in found] == [f"model: `{name}.weight` (Linear) {reason}" for name in others]
    for problem in found:
        assert "give both names rules of `tensor_parallel.partition_config`" in (problem.hint or "")


class Reads(nn.Module):
    """A model that makes logits of the rows of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList([Inner()])

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.layers[0](self.embed(tokens)), self.embed.weight)


class Inner(nn.Module):
    """Layers some of which are called, and of whose weights some are asked for what any part has."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        is_tensor = isinstance(self.up.weight, Tensor)  # pyright: ignore[reportUnnecessaryIsInstance]
        x = x.to(self.up.weight.dtype).to(self.up.weight.device)
        return self.down(self.up(x)) if is_tensor and self.up.bias is not None else x  # type: ignore[no-any-return]


class ByHand(Inner):
    def forward(this, x: Tensor) -> Tensor:  # pyright: ignore[reportSelfClsParameterName]
        return F.linear(this.up(x), this.down.weight, this.down.bias)


class Around(nn.Module):
    """A model whose forward reads a weight further in."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Reads()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens) @ self.model.embed.weight  # type: ignore[no-any-return]


def test_a_weight_that_a_forward_reads_by_itself_is_refused_with_what_to_do() -> None:
    (problem,) = problems_of(Reads(), embed=VOCABULARY)
    assert problem.message == (
        "model: `embed.weight` (Embedding) is cut, and the forward of Reads uses `self.embed.weight` by itself, "
        "a part here (plan of the test)"
    )
    assert problem.hint == (
        'leave it whole by a rule with "partition_type": "skip" in `tensor_parallel.partition_config`, or call a '
        "module that has the weight: a Linear with `lm_head.weight = embed.weight` is cut with the embedding"
    )
    assert problems_of(Reads()) == []
    assert problems_of(Reads(), layers__0__up=COLUMN, layers__0__down=ROW) == []
    assert [one.message.split("`")[1] for one in problems_of(Around(), model__embed=VOCABULARY)] == [
        "model.embed.weight"
    ] * 2
    found = problems_of(nn.ModuleDict({"part": ByHand()}), part__up=COLUMN, part__down=ROW)
    assert [one.message.split("`")[1::2] for one in found] == [["part.down.weight", "this.down.weight"]]


def test_torchs_own_attention_reads_its_output_layer() -> None:
    with torch.device("meta"):
        model = nn.MultiheadAttention(8, 2)
    (problem,) = problems_of(model, out_proj=ROW)
    assert "`self.out_proj.weight` by itself" in problem.message
