"""Rules of known models cut the layers that these have, and no others."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import nn

from dsrun.config.sections.parallel import TensorParallel
from dsrun.runtime.parallel.tensor.sources import presets
from dsrun.runtime.parallel.tensor.sources.partition_config import plan_of
from dsrun.runtime.parallel.tensor.styles import COLUMN, ROW, WHOLE, Style

GATED = {"mlp.gate_proj": COLUMN, "mlp.up_proj": COLUMN, "mlp.down_proj": ROW}
ATTENTION = {**{f"self_attn.{name}_proj": COLUMN for name in "qkv"}, "self_attn.o_proj": ROW}
LLAMA = {**ATTENTION, **GATED, "self_attn.rotary": None, "mlp.down_project": None, "attn.o_proj": None}


def packed(parts: int) -> Style:
    return Style(COLUMN.form, parts=parts)


EXPECTED: dict[str, dict[str, Style | None]] = {
    "llama": LLAMA,
    "qwen2": LLAMA,
    "bloom": {
        "self_attention.query_key_value": COLUMN,
        "self_attention.dense": ROW,
        "mlp.dense_h_to_4h": COLUMN,
        "mlp.dense_4h_to_h": ROW,
    },
    "chatglm": {
        "self_attention.query_key_value": packed(3),
        "self_attention.dense": ROW,
        "mlp.dense_h_to_4h": packed(2),
        "mlp.dense_4h_to_h": ROW,
    },
    "mixtral": {
        **ATTENTION,
        **{f"block_sparse_moe.experts.{place}.w{one}": COLUMN for place in (0, 11) for one in (1, 3)},
        **{f"block_sparse_moe.experts.{place}.w2": ROW for place in (0, 11)},
        "block_sparse_moe.gate": WHOLE,
    },
    "deepseek_v2": {
        "self_attn.q_a_proj": WHOLE,
        "self_attn.q_b_proj": COLUMN,
        "self_attn.kv_a_proj_with_mqa": WHOLE,
        "self_attn.kv_b_proj": COLUMN,
        "self_attn.o_proj": ROW,
        "mlp.experts.3.gate_proj": COLUMN,
        "mlp.experts.3.up_proj": COLUMN,
        "mlp.experts.3.down_proj": ROW,
        "mlp.gate": WHOLE,
        "mlp.shared_experts.gate_proj": COLUMN,
        "mlp.shared_experts.up_proj": COLUMN,
        "mlp.shared_experts.down_proj": ROW,
    },
    "phi3": {
        "self_attn.qkv_proj": packed(3),
        "self_attn.o_proj": ROW,
        "mlp.gate_up_proj": packed(2),
        "mlp.down_proj": ROW,
    },
}


def model_with(names: list[str]) -> nn.Module:
    """Returns a model whose Linears have these names."""
    root = nn.Module()
    for name in names:
        *parents, last = name.split(".")
        around = root
        for part in parents:
            if part not in dict(around.named_children()):
                around.add_module(part, nn.Module())
            around = around.get_submodule(part)
        with torch.device("meta"):
            around.add_module(last, nn.Linear(12, 12))
    return root


@pytest.mark.parametrize("name", presets.NAMES)
def test_a_known_model_is_cut_at_the_layers_that_it_has(name: str) -> None:
    prefix = "model.layers.7."
    model = model_with([prefix + end for end in [*EXPECTED[name], "lm_head", "mlp.router"]])
    plan = plan_of(model, presets.rules_of(name), source=name)
    assert plan.modules == {prefix + end: style for end, style in EXPECTED[name].items() if style is not None}


def test_the_config_takes_the_names_that_are_known() -> None:
    (literal, _) = get_args(TensorParallel.model_fields["preset_model"].annotation)
    while not all(isinstance(one, str) for one in get_args(literal)):
        literal = get_args(literal)[0]
    assert set(get_args(literal)) == set(presets.NAMES) == set(EXPECTED)
