"""Which lengths of a module that attends belong together: heads are dealt to ranks whole, keys with their queries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

_QUERIES = ("q_proj", "query", "query_proj", "wq", "q", "to_q")
_KEYS = ("k_proj", "key", "key_proj", "wk", "k", "to_k", "k_b_proj", "kv_b_proj")
_OF_KEYS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "multi_query_group_num")
_OF_QUERIES = ("num_heads", "num_attention_heads", "n_heads", "n_head")
#: Ratio of queries' heads to keys', as transformers' attention keeps it.
GROUP_SIZE = "num_key_value_groups"


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of one module that attends.

    Attributes:
        queries: heads of queries.
        keys: heads of keys and values; as many groups of queries' heads go with one each.
    """

    queries: int
    keys: int

    def groups(self, size: int) -> int:
        """Returns into how many equal groups its lengths are dealt: one a head of keys, or of queries.

        Args:
            size: ranks.
        """
        return self.keys if self.keys >= size else self.queries

    def repeats(self, size: int) -> bool:
        """Whether there are fewer heads of keys than ranks, so that several ranks use one."""
        return self.keys < size


def heads_of(module: nn.Module) -> Heads | None:
    """Returns the heads of a module, whose attributes and configuration name them; None where it has none.

    Args:
        module: module that queries, keys and values are columns of, before it is cut.
    """
    children: Mapping[str, nn.Module] = dict(module.named_children())
    head_dim: Any = getattr(module, "head_dim", None)
    lengths = _lengths(children, _KEYS)
    keys = _number(module, _OF_KEYS)
    queries = _number(module, _OF_QUERIES)
    ratio: Any = getattr(module, GROUP_SIZE, None)
    if isinstance(head_dim, int) and head_dim and lengths and "kv_b_proj" not in children:
        keys = lengths[0] // head_dim
        of_queries = _lengths(children, _QUERIES)
        if isinstance(ratio, int):
            queries = keys * ratio
        elif queries is None and of_queries:
            queries = of_queries[0] // head_dim
    attends = isinstance(head_dim, int) or isinstance(ratio, int) or bool(lengths)
    attends = attends or any(isinstance(getattr(module, name, None), int) for name in (*_OF_QUERIES, "head_size"))
    if not attends or queries is None:
        return None
    if keys is None or queries % keys:
        keys = queries
    return Heads(queries, keys)


def _lengths(children: Mapping[str, nn.Module], names: tuple[str, ...]) -> list[int]:
    return [child.out_features for name, child in children.items() if isinstance(child, nn.Linear) and name in names]


def _number(module: nn.Module, names: tuple[str, ...]) -> int | None:
    for holder in (module, getattr(module, "config", None)):
        for name in names:
            try:
                value = getattr(holder, name, None)
            except RuntimeError:  # a configuration of transformers whose layers differ has no one number
                continue
            if isinstance(value, int) and value > 0:
                return value
    return None
