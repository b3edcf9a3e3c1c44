"""Rules of known models, by the names of DeepSpeed's presets: which layers are cut, as a `partition_config` says it."""

from __future__ import annotations

from collections.abc import Mapping

from dsrun.config.sections.parallel import LayerSpec

#: (kind, end of the name without `.weight`, equal parts that stand side by side in the outputs).
_Row = tuple[str, str, int]

_ATTENTION: tuple[_Row, ...] = (("row", r"self_attn\.o_proj", 1), ("column", r"self_attn\.[qkv]_proj", 1))
_GATED: tuple[_Row, ...] = (("row", r"mlp\.down_proj", 1), ("column", r"mlp\.(up|gate)_proj", 1))
_ROWS: Mapping[str, tuple[_Row, ...]] = {
    "llama": (*_ATTENTION, *_GATED),
    "qwen2": (*_ATTENTION, *_GATED),
    "bloom": (
        ("row", r"self_attention\.dense", 1),
        ("column", r"self_attention\.query_key_value", 1),  # a head's query, key and value side by side
        ("row", r"mlp\.dense_4h_to_h", 1),
        ("column", r"mlp\.dense_h_to_4h", 1),
    ),
    "chatglm": (
        ("row", r"self_attention\.dense", 1),
        ("column", r"self_attention\.query_key_value", 3),
        ("row", r"mlp\.dense_4h_to_h", 1),
        ("column", r"mlp\.dense_h_to_4h", 2),
    ),
    "mixtral": (
        *_ATTENTION,
        ("row", r"block_sparse_moe\.experts\.\d+\.w2", 1),
        ("column", r"block_sparse_moe\.experts\.\d+\.w[13]", 1),
        ("skip", r"block_sparse_moe\.gate", 1),
    ),
    "deepseek_v2": (
        ("row", r"self_attn\.o_proj", 1),
        ("skip", r"self_attn\.(q_a_proj|kv_a_proj_with_mqa)", 1),
        ("column", r"self_attn\.(q_b_proj|kv_b_proj)", 1),
        ("row", r"mlp\.experts\.\d+\.down_proj", 1),
        ("column", r"mlp\.experts\.\d+\.(up|gate)_proj", 1),
        ("skip", r"mlp\.gate", 1),
        ("row", r"mlp\.shared_experts\.down_proj", 1),
        ("column", r"mlp\.shared_experts\.(up|gate)_proj", 1),
    ),
    "phi3": (
        ("row", r"self_attn\.o_proj", 1),
        ("column", r"self_attn\.qkv_proj", 3),
        ("row", r"mlp\.down_proj", 1),
        ("column", r"mlp\.gate_up_proj", 2),
    ),
}
NAMES: tuple[str, ...] = tuple(_ROWS)


def rules_of(name: str) -> tuple[LayerSpec, ...]:
    """Returns the rules of a known model.

    Args:
        name: one of `NAMES`.
    """
    return tuple(
        LayerSpec.model_validate(
            {
                "patterns": (rf".*\.{end}\.weight$",),
                "partition_type": kind,
                **({"shape": (parts, -1), "partition_dim": 0} if parts > 1 else {}),
            }
        )
        for kind, end, parts in _ROWS[name]
    )
