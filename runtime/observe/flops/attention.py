"""Which queries and keys attention multiplies: pairs that a mask leaves, where the operation tells its mask.

[Note: pairs] A causal mask over s tokens leaves s (s + 1) / 2 pairs of a query and a key, which is what a fused kernel
computes but for the rest of the blocks on the diagonal. A mask that is a tensor tells nothing without being read: such
attention counts whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

#: Fused operations with heads before positions, [B, H, S, D], and a causal mask that begins at the first key.
HEADS_FIRST = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
)
#: Fused operations with positions before heads, [B, S, H, D], or [T, H, D] where sequences of several lengths are
#: packed; a causal mask ends at the last key.
HEADS_LAST = (
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
    "torch_attn::_varlen_attn",
    "flash_attn::_flash_attn_forward",
    "flash_attn::_flash_attn_varlen_forward",
    "flash_attn_3::_flash_attn_forward",
)

#: `custom_mask_type` of `aten::_efficient_attention_forward`.
_FROM_FIRST_KEY, _TO_LAST_KEY = 1, 2


def visible_pairs(
    queries: int, keys: int, *, left: int | None = None, right: int | None = None, offset: int = 0
) -> int:
    """Returns the pairs of query i and key j with -left <= j - (i + offset) <= right.

    Args:
        queries: Number of queries.
        keys: Number of keys.
        left: Keys that a query sees before its own; None for all.
        right: Keys that a query sees behind its own; None for all, 0 for a causal mask.
        offset: Key that is the own one of the first query.
    """
    until = queries * keys if right is None else _sum_clamped(queries, offset + right + 1, keys)
    before = 0 if left is None else _sum_clamped(queries, offset - left, keys)
    return max(0, until - before)


def attention_products(name: str, given: Mapping[str, Any]) -> tuple[int, int, tuple[Tensor, Tensor, Tensor]]:
    """Returns the FLOPs of a fused attention's two products, scores and values, and its three operands.

    Args:
        name: Name of the operation, one of `HEADS_FIRST` and `HEADS_LAST`.
        given: Arguments of the operation, by name.
    """
    q, k, v = (_first(given, *names) for names in (("query", "q"), ("key", "k"), ("value", "v")))
    first = name in HEADS_FIRST
    heads = q.shape[1] if first else q.shape[-2]
    total = 0
    for count, queries, keys in _lengths(q, k, given, heads_first=first):
        left, right, offset = _mask(name, given, queries, keys)
        total += count * heads * visible_pairs(queries, keys, left=left, right=right, offset=offset)
    return 2 * total * q.shape[-1], 2 * total * v.shape[-1], (q, k, v)


def flex_products(q: Tensor, k: Tensor, v: Tensor, mask: Sequence[Any]) -> tuple[int, int]:
    """Returns the FLOPs of flex_attention's two products; blocks that are not empty count whole.

    Args:
        q: Queries, [B, H, S, D].
        k: Keys, [B, heads of keys, S, D].
        v: Values, like keys.
        mask: Block mask as the operation is given it: numbers of partial and of full blocks, and their sizes.
    """
    batch, heads, queries, _ = q.shape
    keys = k.shape[-2]
    tensors = [part for part in mask if isinstance(part, Tensor) or part is None]
    sizes = [part for part in mask if isinstance(part, int)]
    pairs = batch * heads * queries * keys
    if tensors and tensors[0] is not None and len(sizes) >= 2:
        partial, full = tensors[0], tensors[2]
        blocks = int(partial.sum()) + (0 if full is None else int(full.sum()))
        block = min(sizes[-2], queries) * min(sizes[-1], keys)
        repeats = batch * heads // max(1, partial.shape[0] * partial.shape[1])
        pairs = min(pairs, blocks * block * repeats)
    return 2 * pairs * q.shape[-1], 2 * pairs * v.shape[-1]


def _lengths(q: Tensor, k: Tensor, given: Mapping[str, Any], *, heads_first: bool) -> Sequence[tuple[int, int, int]]:
    """Returns (sequences, queries of each, keys of each); reads the lengths of packed ones."""
    if heads_first:
        return [(q.shape[0], q.shape[-2], k.shape[-2])]
    of_queries = _first(given, "cum_seq_q", "cu_seqlens_q", "cu_seq_q")
    if of_queries is None:
        return [(q.shape[0], q.shape[1], k.shape[1])]
    of_keys = _first(given, "cum_seq_k", "cu_seqlens_k", "cu_seq_k")
    lengths = of_queries.diff().tolist()
    return [
        (1, queries, keys)
        for queries, keys in zip(lengths, lengths if of_keys is None else of_keys.diff().tolist(), strict=True)
    ]


def _mask(name: str, given: Mapping[str, Any], queries: int, keys: int) -> tuple[int | None, int | None, int]:
    """Returns (left, right, offset) of `visible_pairs`."""
    kind = given.get("custom_mask_type")
    if kind is not None:
        offset = keys - queries if kind == _TO_LAST_KEY else 0
        window = given.get("window_size")
        return window - 1 if window else None, 0 if kind in (_FROM_FIRST_KEY, _TO_LAST_KEY) else None, offset
    causal = bool(_first(given, "is_causal", "causal"))
    window = given.get("window_size") or (None, None)
    left, right = (
        given.get(f"window_size_{side}", value) for side, value in zip(("left", "right"), window, strict=True)
    )
    left = None if left is None or left < 0 else left
    right = 0 if causal else None if right is None or right < 0 else right
    return left, right, 0 if name in HEADS_FIRST else keys - queries


def _first(given: Mapping[str, Any], *names: str) -> Any:
    return next((given[name] for name in names if given.get(name) is not None), None)


def _sum_clamped(count: int, shift: int, most: int) -> int:
    """Returns the sum of i + shift, clamped to 0 .. most, over i below `count`."""
    low = min(count, max(0, -shift))
    high = min(count, max(low, most - shift))
    rising = (high - low) * shift + (high * (high - 1) - low * (low - 1)) // 2
    return rising + (count - high) * most
