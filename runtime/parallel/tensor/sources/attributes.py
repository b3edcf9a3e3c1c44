"""Numbers that a module counts its own heads and columns by, which are fewer on a rank that has a part of them.

Models of transformers with a plan take these from the tensors' shapes. Others reshape by what they noted when they were
built, so the notes change with the cut. The names are those that DeepSpeed's AutoTP changes, and a few of Llama's and
GPT's first code.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ..styles import Form, Style

_HEADS = (
    "num_heads",
    "n_heads",
    "n_head",
    "num_attention_heads",
    "num_attn_heads",
    "n_local_heads",
    "num_attention_heads_per_partition",
)
_HEADS_OF_KEYS = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_kv_heads",
    "kv_n_heads",
    "num_kv",
    "n_local_kv_heads",
    "num_multi_query_groups_per_partition",
)
_WIDTHS = (
    "all_head_size",
    "embed_dim",
    "hidden_size",
    "hidden_size_per_partition",
    "split_size",
    "inner_dim",
    "d_model",
    "n_embd",
)


def attributes_of(model: nn.Module, modules: Mapping[str, Style]) -> dict[str, tuple[str, ...]]:
    """Returns the names of numbers to be divided by the ranks, by the name of the module that has them.

    These are modules that attend: they have a number of heads, and columns among their own children whose outputs stay
    parts.

    Args:
        model: any model.
        modules: styles by the module's qualified name.
    """
    columns = (name for name, style in modules.items() if style.form is Form.COLUMN and not style.gathers_output)
    parents = dict.fromkeys(name.rpartition(".")[0] for name in columns)
    found: dict[str, tuple[str, ...]] = {}
    for parent in parents:
        module = model.get_submodule(parent)
        if any(_counts(module, name) for name in _HEADS):
            found[parent] = tuple(name for name in (*_HEADS, *_HEADS_OF_KEYS, *_WIDTHS) if _counts(module, name))
    return found


def _counts(module: nn.Module, name: str) -> bool:
    value = module.__dict__.get(name)  # not a property, which follows from others
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
