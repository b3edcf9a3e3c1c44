"""Which heads a module says that it has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from dsrun.runtime.parallel.tensor.heads import Heads, heads_of
from support.cut_models import model_of


class Attention(nn.Module):
    """What is looked at: some columns, and some attributes.

    Args:
        columns: lengths of outputs by name.
        attributes: further attributes.
    """

    def __init__(self, columns: dict[str, int], **attributes: Any) -> None:
        super().__init__()
        for name, length in columns.items():
            self.add_module(name, nn.Linear(4, length))
        for name, value in attributes.items():
            setattr(self, name, value)


LLAMA_LIKE = {"q_proj": 32, "k_proj": 8, "v_proj": 8}


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        pytest.param(Attention(LLAMA_LIKE, head_dim=4, num_key_value_groups=4), Heads(8, 2), id="by lengths"),
        pytest.param(
            Attention(LLAMA_LIKE, config=SimpleNamespace(num_attention_heads=8, num_key_value_heads=2)),
            Heads(8, 2),
            id="by the configuration",
        ),
        pytest.param(
            Attention(
                LLAMA_LIKE,
                head_dim=4,
                num_key_value_groups=4,
                config=SimpleNamespace(num_attention_heads=64, num_key_value_heads=64),
            ),
            Heads(8, 2),
            id="lengths before a configuration of another part of the model",
        ),
        pytest.param(Attention({"qkv": 48}, num_heads=4, num_kv_heads=2), Heads(4, 2), id="packed"),
        pytest.param(Attention({"qkv": 48}, n_head=4), Heads(4, 4), id="no number of keys: as many as queries"),
        pytest.param(Attention({"wq": 16, "wk": 16}, num_heads=4), Heads(4, 4), id="as many of each"),
        pytest.param(
            Attention({"q_b_proj": 48, "kv_b_proj": 64}, num_heads=4, config=SimpleNamespace(num_key_value_heads=3)),
            Heads(4, 4),
            id="keys that do not divide the queries are none",
        ),
        pytest.param(Attention({"q_proj": 4}, num_heads=4, multi_query_group_num=1), Heads(4, 1), id="multi-query"),
        pytest.param(Attention({"up": 8}), None, id="no heads"),
        pytest.param(
            Attention({"gate_proj": 8, "down_proj": 8}, config=SimpleNamespace(num_attention_heads=8)),
            None,
            id="an MLP that knows its model's configuration",
        ),
        pytest.param(nn.Linear(4, 4), None, id="a leaf"),
    ],
)
def test_heads_are_found(module: nn.Module, expected: Heads | None) -> None:
    assert heads_of(module) == expected


@pytest.mark.parametrize(
    ("heads", "size", "groups", "repeats"),
    [
        (Heads(8, 8), 2, 8, False),
        (Heads(8, 2), 2, 2, False),
        (Heads(12, 3), 2, 3, False),  # uneven: no head of keys leaves its queries
        (Heads(8, 2), 4, 8, True),
        (Heads(8, 1), 2, 8, True),
    ],
)
def test_lengths_are_dealt_by_heads_of_keys_as_long_as_there_is_one_for_each_rank(
    heads: Heads, size: int, groups: int, repeats: bool
) -> None:
    assert heads.groups(size) == groups
    assert heads.repeats(size) is repeats


@pytest.mark.parametrize(
    ("family", "values", "expected"),
    [
        ("Llama", {}, Heads(8, 2)),
        ("Qwen3", {"head_dim": 6}, Heads(8, 2)),
        ("Mixtral", {"num_local_experts": 2}, Heads(8, 2)),
        ("Phi3", {"pad_token_id": 0}, Heads(8, 2)),  # one weight for queries, keys and values
        ("OPT", {"ffn_dim": 46, "word_embed_proj_dim": 32}, Heads(8, 8)),
        ("GPTNeoX", {"num_key_value_heads": 8}, Heads(8, 8)),
    ],
)
def test_the_heads_of_transformers_attention_and_none_of_what_is_beside_it(
    family: str, values: dict[str, Any], expected: Heads
) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed; pip install -e '.[test-zoo]'")
    found = {
        type(part).__name__: heads
        for part in model_of(family, num_hidden_layers=1, **values).modules()
        if (heads := heads_of(part)) is not None
    }
    assert {name: heads for name, heads in found.items() if "Attention" in name} == {f"{family}Attention": expected}
    assert not [name for name in found if "MLP" in name or "Experts" in name]
