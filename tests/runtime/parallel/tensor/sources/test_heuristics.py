"""Names of layers make pairs of columns and rows where their lengths fit; the rest stays whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dsrun.runtime.parallel.tensor.sources.heuristics import plan_of
from dsrun.runtime.parallel.tensor.styles import COLUMN, ROW, Form, Style

#: A name, inputs, outputs; (name, width) of a norm.
Layer = tuple[str, int, int] | tuple[str, int]


def block_of(*layers: Layer) -> nn.Module:
    root = nn.Module()
    for name, *lengths in layers:
        *parents, last = name.split(".")
        around = root
        for part in parents:
            if part not in dict(around.named_children()):
                around.add_module(part, nn.Module())
            around = around.get_submodule(part)
        around.add_module(last, nn.Linear(lengths[0], lengths[1]) if len(lengths) == 2 else nn.LayerNorm(lengths[0]))
    return root


def found(*layers: Layer) -> dict[str, Style] | None:
    """Returns the styles in the second of two equal blocks."""
    with torch.device("meta"):
        plan = plan_of(nn.Sequential(nn.ModuleList(block_of(*layers) for _ in range(2))))
    if plan is None:
        return None
    assert len(plan.modules) % 2 == 0
    return {name.removeprefix("0.1."): style for name, style in plan.modules.items() if name.startswith("0.1.")}


def square(*names: str) -> list[Layer]:
    return [(name, 8, 8) for name in names]


MLP: list[Layer] = [("mlp.up_proj", 8, 16), ("mlp.down_proj", 16, 8)]
CUT_MLP = {"mlp.up_proj": COLUMN, "mlp.down_proj": ROW}


@pytest.mark.parametrize(
    ("columns", "row"),
    [
        (("a.q_proj", "a.k_proj", "a.v_proj"), "a.o_proj"),
        (("a.q_proj", "a.k_proj", "a.v_proj"), "a.out_proj"),
        (("a.query", "a.key", "a.value"), "a.dense"),
        (("a.self.query", "a.self.key", "a.self.value"), "a.output.dense"),
        (("a.wq", "a.wk", "a.wv"), "a.wo"),
        (("a.q", "a.k", "a.v"), "a.o"),
        (("a.to_q", "a.to_k", "a.to_v"), "a.to_out.0"),
        (("m.fc1",), "m.fc2"),
        (("m.c_fc",), "m.c_proj"),
        (("m.gate_proj", "m.up_proj"), "m.down_proj"),
        (("m.w1", "m.w3"), "m.w2"),
        (("intermediate.dense",), "output.dense"),
        (("e.3.w1", "e.3.w3"), "e.3.w2"),
    ],
)
def test_names_of_columns_and_of_the_row_behind_them(columns: tuple[str, ...], row: str) -> None:
    assert found(*square(*columns, row)) == {**dict.fromkeys(columns, COLUMN), row: ROW}


def test_the_order_in_which_layers_were_made_does_not_matter_inside_a_module() -> None:
    assert found(*square("m.w1", "m.w2", "m.w3")) == {"m.w1": COLUMN, "m.w3": COLUMN, "m.w2": ROW}
    styles = found(*square("a.to_out.0", "a.to_q", "a.to_k", "a.to_v"))
    assert styles == {**dict.fromkeys(("a.to_q", "a.to_k", "a.to_v"), COLUMN), "a.to_out.0": ROW}


def test_a_row_without_columns_beside_it_takes_those_before_it() -> None:
    layers = square("a.self.query", "a.self.key", "a.self.value", "a.output.dense")
    styles = found(*layers, ("intermediate.dense", 8, 16), ("output.dense", 16, 8))
    assert styles == {
        **dict.fromkeys(("a.self.query", "a.self.key", "a.self.value", "intermediate.dense"), COLUMN),
        **dict.fromkeys(("a.output.dense", "output.dense"), ROW),
    }


@pytest.mark.parametrize(
    ("packed", "parts"),
    [
        ([("a.qkv", 8, 24), ("a.proj", 8, 8)], 3),
        ([("a.c_attn", 8, 24), ("a.c_proj", 8, 8)], 3),
        ([("a.qkv_proj", 8, 16), ("a.o_proj", 8, 8)], (8, 4, 4)),
        ([("a.query_key_value", 8, 24), ("a.dense", 8, 8)], 1),
        ([("m.gate_up_proj", 8, 32), ("m.down_proj", 16, 8)], 2),
        ([("m.fc1", 8, 32), ("m.fc2", 16, 8)], 2),
    ],
)
def test_several_in_one_weight_are_cut_each_by_itself(packed: list[Layer], parts: int | tuple[int, ...]) -> None:
    column, row = packed[0][0], packed[1][0]
    assert found(*packed) == {column: Style(Form.COLUMN, parts=parts), row: ROW}


def test_keys_and_values_may_be_fewer() -> None:
    styles = found(("a.q_proj", 8, 8), ("a.k_proj", 8, 4), ("a.v_proj", 8, 4), ("a.o_proj", 8, 8))
    assert styles == {**dict.fromkeys(("a.q_proj", "a.k_proj", "a.v_proj"), COLUMN), "a.o_proj": ROW}


@pytest.mark.parametrize(
    "attention",
    [
        [("a.q_proj", 8, 8), ("a.k_proj", 8, 3), ("a.v_proj", 8, 3), ("a.o_proj", 8, 8)],
        [("a.q_proj", 8, 6), ("a.k_proj", 8, 8), ("a.v_proj", 8, 8), ("a.o_proj", 8, 8)],
        [("a.qkv", 8, 25), ("a.proj", 8, 8)],
        [("a.o_proj", 8, 8)],
        [("a.gate", 8, 4)],
    ],
)
def test_what_does_not_fit_stays_whole(attention: list[Layer]) -> None:
    assert found(*attention, *MLP) == CUT_MLP


def test_a_router_is_no_gate() -> None:
    experts = [(f"mlp.experts.{place}.{name}", 8, 8) for place in range(2) for name in ("w1", "w2", "w3")]
    styles = found(("mlp.gate", 8, 2), *experts)
    assert styles is not None
    assert "mlp.gate" not in styles
    assert len(styles) == len(experts)


def test_a_norm_of_each_head_has_a_part_of_its_gradient() -> None:
    attention = square("a.q_proj", "a.k_proj", "a.v_proj", "a.o_proj")
    styles = found(*attention, ("a.q_norm", 4), ("a.k_norm", 4))
    assert styles is not None
    assert {name: style for name, style in styles.items() if "norm" in name} == dict.fromkeys(
        ("a.q_norm", "a.k_norm"), Style(Form.PARTIAL_GRADIENT)
    )


def test_a_norm_of_all_heads_keeps_them_together() -> None:
    attention = square("a.q_proj", "a.k_proj", "a.v_proj", "a.o_proj")
    assert found(*attention, ("a.q_norm", 8), ("a.k_norm", 8), *MLP) == CUT_MLP


def test_numbers_and_columns_of_heads_are_cut_with_them() -> None:
    with torch.device("meta"):
        blocks = nn.ModuleList(block_of(*square("a.q", "a.k", "a.v", "a.o")) for _ in range(2))
        attention = blocks[0].get_submodule("a")
        attention.sinks = nn.Parameter(torch.zeros(4))
        attention.add_module("relative_attention_bias", nn.Embedding(16, 4))
        plan = plan_of(nn.Sequential(blocks))
    assert plan is not None
    assert plan.parameters == {"0.0.a.sinks": COLUMN}
    assert plan.modules["0.0.a.relative_attention_bias"] == Style(Form.HIDDEN)


def test_a_stack_with_a_block_that_has_no_pair_has_no_plan() -> None:
    class Block(nn.Module):
        def __init__(self, *names: str) -> None:
            super().__init__()
            self.inner = block_of(*square(*names))

    blocks = nn.ModuleList([Block("up_proj", "down_proj"), Block("up_proj", "elsewhere")])
    assert plan_of(nn.Sequential(blocks)) is None
    assert plan_of(nn.Sequential(nn.ModuleList([blocks[0], Block("up_proj", "down_proj")]))) is not None


def test_layers_whose_weights_torch_reads_itself_stay_whole() -> None:
    """The fast path of evaluation would take a part for the whole, and no forward of a Linear is called."""
    layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2))
    assert plan_of(nn.Sequential(layers)) is None


def test_layers_outside_of_blocks_are_not_looked_at() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"up_proj": nn.Linear(8, 8), "down_proj": nn.Linear(8, 8)})
    assert plan_of(model) is None
