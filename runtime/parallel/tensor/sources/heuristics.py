"""A plan from names alone: Linears of each block that are called as columns and rows are, where their lengths fit.

[Note: pairs]
A row takes what columns give, so a pair is made of the Linears of one module, `q_proj` to `o_proj`; or, where a row has
no columns beside it (`attention.output.dense`), of those that stand before it in the block. The outputs of a column are
as long as the inputs of its row; those of keys and values may be shorter; those of several in one weight are known by
the name. What does not fit stays whole. A stack with a block that has no pair has no plan.

What stands between queries and their row has parts, too: a norm of each head has a part of its gradient, and a number
for each head is cut. A norm of all heads together needs them all, so such queries stay whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ....stacks import find_stacks
from ..styles import COLUMN, ROW, Form, ModelPlan, Style
from .attributes import attributes_of

SOURCE = "the names of its layers"
_QUERIES = ("q", "query", "q_proj", "query_proj", "wq", "q_lin", "to_q", "linear_q")
_KEYS = ("k", "key", "k_proj", "key_proj", "wk", "k_lin", "to_k", "linear_k")
_VALUES = ("v", "value", "v_proj", "value_proj", "wv", "v_lin", "to_v", "linear_v")
#: Queries, keys and values in one weight: side by side, or head by head, which is one part.
_PACKED_ATTENTION = ("qkv", "qkv_proj", "c_attn", "wqkv", "to_qkv")
_BY_HEAD = ("query_key_value",)
_WIDE = (
    *("gate", "up", "gate_proj", "up_proj", "w1", "w3", "fc1", "fc_1", "lin1", "linear1", "linear_1", "c_fc", "fc_in"),
    *("wi", "wi_0", "wi_1", "dense_h_to_4h", "intermediate.dense"),
)
_PACKED_WIDE = ("gate_up_proj", "gate_up", "w12", "up_gate_proj")
_ROWS = (
    *("o", "out", "o_proj", "out_proj", "wo", "out_lin", "linear_out", "to_out", "down", "down_proj", "w2", "fc2"),
    *("fc_2", "lin2", "linear2", "linear_2", "c_proj", "fc_out", "dense_4h_to_h", "dense", "proj"),
)
_COLUMNS = (*_QUERIES, *_KEYS, *_VALUES, *_PACKED_ATTENTION, *_BY_HEAD, *_WIDE, *_PACKED_WIDE)
#: Norms of queries and keys, of each head or of all together.
_NORMS = (
    *("q_norm", "k_norm", "norm_q", "norm_k", "query_norm", "key_norm", "q_layernorm", "k_layernorm"),
    *("query_layernorm", "key_layernorm", "q_ln", "k_ln"),
)
#: Parameters with a number for each head, and embeddings with a column for each.
_NUMBERS_OF_HEADS = ("sinks",)
_COLUMNS_OF_HEADS = ("relative_attention_bias",)
#: torch's own, whose fast path reads the weights and calls no Linear.
_READ_AS_A_WHOLE = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.MultiheadAttention)


@dataclass(frozen=True, slots=True)
class _Linear:
    """One Linear of a block.

    Attributes:
        name: qualified name in the model.
        role: name that says what it is for, in lower case: its last part, or the last two of `intermediate.dense`.
        inputs: length of its inputs.
        outputs: length of its outputs.
    """

    name: str
    role: str
    inputs: int
    outputs: int

    @property
    def parent(self) -> str:
        """Qualified name of the module that it is a child of; that of a list of layers is left out."""
        parent, _, last = self.name.rpartition(".")
        return parent.rpartition(".")[0] if last.isdigit() else parent


def plan_of(model: nn.Module) -> ModelPlan | None:
    """Returns the plan that the names of a model's layers suggest, see [Note: pairs]; None where they suggest none.

    Args:
        model: any model; only names, classes and shapes are read.
    """
    modules: dict[str, Style] = {}
    parameters: dict[str, Style] = {}
    for stack in find_stacks(model, skip=lambda _: False):
        blocks = [_pairs_in(linears_of(block, name), model) for name, block in stack.blocks]
        if all(blocks):
            for found in blocks:
                modules.update(found)
    for parent in dict.fromkeys(name.rpartition(".")[0] for name, style in modules.items() if style == ROW):
        around = model.get_submodule(parent)
        own = [key for key, _ in around.named_parameters(recurse=False)]
        parameters.update({f"{parent}.{key}": COLUMN for key in own if key in _NUMBERS_OF_HEADS})
        biases = [key for key, child in around.named_children() if isinstance(child, nn.Embedding)]
        modules.update({f"{parent}.{key}": Style(Form.HIDDEN) for key in biases if key in _COLUMNS_OF_HEADS})
    return ModelPlan(SOURCE, modules, parameters, attributes_of(model, modules)) if modules else None


def linears_of(block: nn.Module, name: str) -> list[_Linear]:
    """Returns the Linears of a block, in order of registration, without those that something else reads the weights of.

    Args:
        block: the block.
        name: its qualified name.
    """
    apart = [part for part in block.modules() if isinstance(part, _READ_AS_A_WHOLE)]
    inside = {id(module) for part in apart for module in part.modules()}
    return [
        _Linear(f"{name}.{child}", _role(child), module.in_features, module.out_features)
        for child, module in block.named_modules()
        if isinstance(module, nn.Linear) and id(module) not in inside
    ]


def kind_of(role: str) -> str | None:
    """Returns what a Linear of that name would be: "column", "row" or None."""
    return "column" if role in _COLUMNS else "row" if role in _ROWS else None


def guesses_in(block: nn.Module, name: str) -> dict[str, dict[str, Any]]:
    """Returns what each Linear of a block may be, for a person to look at: `partition_type` and `shape`, by its name.

    Names count first. A module's Linears whose names say nothing may be the column in front of its row and the row
    behind its column: the first of them, and the last, if the one gives as much as the other takes.

    Args:
        block: the block.
        name: its qualified name.
    """
    linears = linears_of(block, name)
    found = {one.name: kind_of(one.role) or "skip" for one in linears}
    for parent in dict.fromkeys(one.parent for one in linears):
        beside = [one for one in linears if one.parent == parent]
        unknown = [one for one in beside if found[one.name] == "skip"]
        column = [*(one for one in beside if found[one.name] == "column"), *unknown][:1]
        row = [*unknown, *(one for one in beside if found[one.name] == "row")][-1:]
        if column and row and column != row and column[0].outputs == row[0].inputs:
            found[column[0].name], found[row[0].name] = "column", "row"
    rows = [one for one in linears if found[one.name] == "row"]
    return {
        one.name: {"partition_type": found[one.name], **(_shape(one, rows) if found[one.name] == "column" else {})}
        for one in linears
    }


def _shape(column: _Linear, rows: Sequence[_Linear]) -> dict[str, Any]:
    """Returns the `shape` of a column with several pieces side by side, by its name and the row that it fits."""
    nearest = sorted(rows, key=lambda row: row.parent != column.parent)
    style = next((style for row in nearest if (style := _column(column, row.inputs)) is not None), COLUMN)
    if style.parts == 1:
        return {}
    return {"shape": [style.parts if isinstance(style.parts, int) else list(style.parts), -1]}


def _role(name: str) -> str:
    parts = [part for part in name.lower().split(".") if not part.isdigit()]
    return "intermediate.dense" if parts[-2:] == ["intermediate", "dense"] else parts[-1]


def _pairs_in(linears: Sequence[_Linear], model: nn.Module) -> dict[str, Style]:
    """Returns the styles of a block's Linears, and of norms between them; empty where none are a pair."""
    found: dict[str, Style] = {}
    used: set[str] = set()
    rows = [one for one in linears if kind_of(one.role) == "row"]
    columns = [one for one in linears if kind_of(one.role) == "column"]
    for row in rows:
        beside = [one for one in columns if one.parent == row.parent]
        if not beside:
            continue
        used.update((row.name, *(one.name for one in beside)))
        norms = _norms_in(model.get_submodule(row.parent))
        styles = {} if row.inputs in norms.values() else _pair(beside, row)
        if styles:
            found.update(styles)
            found.update({f"{row.parent}.{name}": Style(Form.PARTIAL_GRADIENT) for name in norms})
    for before, row in _left_over([one for one in linears if one.name not in used]):
        found.update(_pair(before, row))
    return found


def _norms_in(module: nn.Module) -> dict[str, int]:
    """Returns the lengths of the weights of the norms of queries and keys that a module has, by their names."""
    norms = ((name, child) for name, child in module.named_children() if name in _NORMS)
    return {
        name: max(param.numel() for param in child.parameters()) for name, child in norms if list(child.parameters())
    }


def _left_over(linears: Sequence[_Linear]) -> Iterator[tuple[list[_Linear], _Linear]]:
    """Yields rows, each with the columns between it and the row before."""
    before: list[_Linear] = []
    for one in linears:
        if kind_of(one.role) == "column":
            before.append(one)
        elif kind_of(one.role) == "row":
            yield before, one
            before = []


def _pair(columns: Sequence[_Linear], row: _Linear) -> dict[str, Style]:
    """Returns the styles of a row and of those columns that give what it takes; empty where they do not."""
    styles = {one.name: style for one in columns if (style := _column(one, row.inputs)) is not None}
    gives = any(one.name in styles and one.role not in (*_KEYS, *_VALUES) for one in columns)
    lacks = any(one.name not in styles and one.role in (*_KEYS, *_VALUES) for one in columns)
    return {**styles, row.name: ROW} if gives and not lacks else {}


def _column(one: _Linear, length: int) -> Style | None:
    """Returns the style of a column in front of a row that takes inputs of a length; None where it does not fit."""
    if one.role in (*_KEYS, *_VALUES):
        return COLUMN if one.outputs <= length and length % one.outputs == 0 else None
    if one.role in _BY_HEAD:
        return COLUMN if length < one.outputs <= 3 * length else None
    if one.role in _PACKED_ATTENTION:
        rest = one.outputs - length
        if rest == 2 * length:
            return replace(COLUMN, parts=3)
        is_grouped = rest > 0 and rest % 2 == 0 and length % (rest // 2) == 0
        return replace(COLUMN, parts=(length, rest // 2, rest // 2)) if is_grouped else None
    if one.outputs == 2 * length and one.role in (*_PACKED_WIDE, *_WIDE):
        return replace(COLUMN, parts=2)
    return COLUMN if one.outputs == length and one.role not in _PACKED_WIDE else None
