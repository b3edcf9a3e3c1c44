"""Every module whose plan may be wrong lies in a region; blocks that do the same are of one kind."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from torch import nn

from dsrun.errors import ModelError
from dsrun.runtime.parallel.tensor.comparison.regions import Kind, kinds_of_regions
from dsrun.runtime.parallel.tensor.styles import COLUMN, GATHERED_COLUMN, ROW, SPLIT_ROW, WHOLE, Form, ModelPlan, Style


def tree(**children: nn.Module) -> nn.Module:
    module = nn.Module()
    for name, child in children.items():
        module.add_module(name, child)
    return module


def linears(*names: str) -> nn.Module:
    return tree(**{name: nn.Linear(4, 4) for name in names})


def block() -> nn.Module:
    return tree(attention=linears("q", "o"), mlp=linears("up", "down"), norm=nn.LayerNorm(4))


def model(blocks: int = 3) -> nn.Module:
    return tree(embed=nn.Embedding(8, 4), layers=nn.ModuleList(block() for _ in range(blocks)), head=nn.Linear(4, 8))


STYLES: Mapping[str, Style] = {"attention.q": COLUMN, "attention.o": ROW, "mlp.up": COLUMN, "mlp.down": ROW}


def plan(styles: Mapping[str, Style] = STYLES, blocks: int = 3, **more: Style) -> ModelPlan:
    inside = {f"layers.{number}.{name}": style for number in range(blocks) for name, style in styles.items()}
    return ModelPlan("the test", {**inside, **more})


def shown(kind: Kind) -> tuple[list[str], list[str], list[list[str]]]:
    return kind.names, kind.alone, [one.names for one in kind.inner]


def test_blocks_are_one_kind_and_hold_the_smallest_modules_with_a_column_and_a_row() -> None:
    (kind,) = kinds_of_regions(model(), plan(embed=Style(Form.VOCABULARY), head=GATHERED_COLUMN))
    names = [f"layers.{number}" for number in range(3)]
    assert shown(kind) == (names, [], [[f"{one}.attention" for one in names], [f"{one}.mlp" for one in names]])
    assert [one.open for one in kind.inner] == [["q", "o"], ["up", "down"]]
    assert len(kind.wholes) == len(kind.inner[0].wholes) == 3


def test_a_pair_that_spans_the_block_is_compared_by_the_block_alone() -> None:
    styles = {"attention.q": COLUMN, "mlp.down": ROW, "norm": Style(Form.PARTIAL_GRADIENT)}
    (kind,) = kinds_of_regions(model(1 + 1), plan(styles, 2))
    assert shown(kind) == (["layers.0", "layers.1"], ["attention.q", "mlp.down", "norm"], [])


def test_experts_are_a_region_by_themselves() -> None:
    (kind,) = kinds_of_regions(model(2), plan({"mlp": Style(Form.EXPERTS), "mlp.up": WHOLE}, 2))
    assert shown(kind) == (["layers.0", "layers.1"], [], [["layers.0.mlp", "layers.1.mlp"]])
    assert kind.inner[0].open == [""]


def test_parameters_with_a_plan_of_their_own_belong_to_their_module() -> None:
    own = {f"layers.{number}.mlp.up.weight": COLUMN for number in range(2)}
    own |= {f"layers.{number}.mlp.down.weight": ROW for number in range(2)}
    (kind,) = kinds_of_regions(model(2), ModelPlan("the test", {}, own))
    assert shown(kind) == (["layers.0", "layers.1"], [], [["layers.0.mlp", "layers.1.mlp"]])


@pytest.mark.parametrize(
    ("key", "value"), [("flag", True), ("name", "other"), ("share", 0.5), ("window", 3), ("window", None)]
)
def test_blocks_that_differ_by_a_plain_attribute_are_of_two_kinds(key: str, value: object) -> None:
    whole = model(2)
    for number, one in enumerate(whole.layers):  # type: ignore[arg-type]
        one.mlp.number = number
        one.mlp.window = 3.5
    assert len(kinds_of_regions(whole, plan(blocks=2))) == 1, "blocks are numbered"
    setattr(whole.layers[1].mlp, key, value)  # type: ignore[index, union-attr]
    first, second = kinds_of_regions(whole, plan(blocks=2))
    assert (first.names, second.names) == (["layers.0"], ["layers.1"])


def test_a_block_of_which_nothing_is_compared_is_no_region() -> None:
    whole = {"attention.q": GATHERED_COLUMN, "attention.o": SPLIT_ROW, "mlp.up": WHOLE}
    assert kinds_of_regions(model(), plan(whole)) == []


def test_outside_of_blocks_the_smallest_module_with_both_is_compared() -> None:
    whole = tree(front=tree(mlp=linears("up", "down"), other=nn.Linear(4, 4)), layers=model().layers)  # type: ignore[arg-type]
    *_, kind = kinds_of_regions(whole, plan(**{"front.mlp.up": COLUMN, "front.mlp.down": ROW}))
    assert shown(kind) == (["front.mlp"], ["up", "down"], [])
    (kind,) = kinds_of_regions(linears("up", "down"), ModelPlan("the test", {"up": COLUMN, "down": ROW}))
    assert shown(kind) == ([""], ["up", "down"], [])


def test_what_is_outside_of_blocks_and_goes_with_nothing_is_refused_by_name() -> None:
    with pytest.raises(ModelError) as caught:
        kinds_of_regions(model(), plan(head=COLUMN))
    assert str(caught.value).startswith(
        "model: `head` (Linear) works on parts, and no column or row goes with it (plan of the test)"
    )
    assert kinds_of_regions(model(), plan(head=COLUMN), apart=["head"])
    around = tree(up=nn.Linear(4, 4), layers=model().layers, down=nn.Linear(4, 4))  # type: ignore[arg-type]
    with pytest.raises(ModelError) as caught:
        kinds_of_regions(around, plan(up=COLUMN, down=ROW))
    assert "`up` (Linear) is outside of the repeated blocks" in caught.value.render()
    assert "`down` (Linear) is outside of the repeated blocks" in caught.value.render()
