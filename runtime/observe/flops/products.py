"""What operations of torch multiply: a table from an operation to its FLOPs, and to those of its backward.

A multiplication and an addition are two FLOPs. Matrix products, convolutions and attention count; additions, norms,
activations and sums do not: they are a few per cent in all, and wait for memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from torch import Tensor

from .attention import HEADS_FIRST, HEADS_LAST, attention_products, flex_products


@dataclass(frozen=True, slots=True)
class Work:
    """What an operation multiplies.

    Attributes:
        forward: FLOPs of the operation.
        gradients: Products of its backward: (tensors, one of which has to need a gradient, FLOPs).
        again: FLOPs that a backward computes again, as a fused one does that keeps no scores.
        is_attention: Whether FLOPs grow with tokens and length, and not with tokens alone.
    """

    forward: int
    gradients: tuple[tuple[tuple[Tensor, ...], int], ...]
    again: int = 0
    is_attention: bool = False


def work_of(name: str, given: Mapping[str, Any], out: Any) -> Work | None:
    """Returns what an operation multiplies; None where it is in no table.

    Args:
        name: Name of the operation without its overload, such as `aten::mm`.
        given: Arguments by the names of its schema.
        out: Result of the operation.
    """
    if name in HEADS_FIRST or name in HEADS_LAST:
        scores, values, operands = attention_products(name, given)
        return _attention(scores, values, operands)
    if name == "flex_attention":
        operands = given["query"], given["key"], given["value"]
        scores, values = flex_products(*operands, given["block_mask"])
        return _attention(scores, values, operands)
    formula = _TABLE.get(name)
    return None if formula is None else formula(given, out)


def is_uncounted(name: str) -> bool:
    """Whether an operation that no table has may multiply much: operations of libraries, and some of torch's."""
    space = name.partition("::")[0]
    return name in _UNKNOWN or (space not in _KNOWN_SPACES and "backward" not in name)


#: Operations of torch that multiply in ways their arguments do not tell.
_UNKNOWN = frozenset(
    f"aten::{name}"
    for name in (
        "_cdist_forward",
        "_cudnn_attention_forward",
        "_cudnn_rnn",
        "_native_multi_head_attention",
        "_sparse_mm",
        "_sparse_semi_structured_mm",
        "_transformer_encoder_layer_fwd",
        "_triton_multi_head_attention",
        "_triton_scaled_dot_attention",
        "_trilinear",
        "gru",
        "linalg_qr",
        "linalg_svd",
        "lstm",
        "miopen_rnn",
        "mkldnn_rnn_layer",
    )
)
#: Namespaces whose other operations move, compare and add.
_KNOWN_SPACES = frozenset(
    ("aten", "prim", "prims", "c10d", "_c10d_functional", "symm_mem", "profiler", "inductor", "debugprims", "dsrun")
)


def _product(a: str, b: str) -> Callable[[Mapping[str, Any], Any], Work]:
    """Returns the formula of a matrix product [..., M, K] x [..., K, N] of two arguments."""

    def work(given: Mapping[str, Any], _out: Any) -> Work:
        left, right = given[a], given[b]
        columns = right.shape[-1] if right.dim() > 1 else 1
        return _of_two(2 * left.numel() * columns, left, right)

    return work


def _linear(given: Mapping[str, Any], _out: Any) -> Work:
    x, weight = given["input"], given["weight"]
    rows = x.numel() // max(1, x.shape[-1])
    return _of_two(2 * rows * weight.numel(), x, weight)


def _linear_loss(given: Mapping[str, Any], out: Any) -> Work:
    """torch's loss of a linear layer; with a loss for each token its backward makes the logits again."""
    work = _linear({"input": given["input"], "weight": given["linear_weight"]}, out)
    return work if "reduction" in given else replace(work, again=work.forward)


def _convolution(given: Mapping[str, Any], out: Any) -> Work:
    x, weight = given.get("input", given.get("self")), given["weight"]
    assert isinstance(x, Tensor), "a convolution has an input"
    # Each position of the output, or of the input of a transposed one, meets the whole weight.
    positions = prod((x if given.get("transposed") else out).shape[2:])
    return _of_two(2 * x.shape[0] * positions * weight.numel(), x, weight)


def _grouped(given: Mapping[str, Any], _out: Any) -> Work:
    """Rows of [M, K] meet a matrix of [G, K, N] each; other forms are products of what they hold."""
    left, right = _operand(given, "self", "mat_a"), _operand(given, "mat2", "mat_b")
    return _of_two(2 * left.numel() * right.shape[-1], left, right)


def _operand(given: Mapping[str, Any], *names: str) -> Tensor:
    return next(given[name] for name in names if name in given)


def _of_two(flops: int, left: Tensor, right: Tensor) -> Work:
    return Work(flops, (((left,), flops), ((right,), flops)))


def _attention(scores: int, values: int, operands: tuple[Tensor, Tensor, Tensor]) -> Work:
    q, k, v = operands
    gradients = (((v,), values), ((q, k), values), ((q,), scores), ((k,), scores))
    return Work(scores + values, gradients, again=scores, is_attention=True)


_TABLE: Mapping[str, Callable[[Mapping[str, Any], Any], Work]] = {
    "aten::mm": _product("self", "mat2"),
    "aten::_int_mm": _product("self", "mat2"),
    "aten::addmm": _product("mat1", "mat2"),
    "aten::addmm_": _product("mat1", "mat2"),
    "aten::_addmm_activation": _product("mat1", "mat2"),
    "aten::bmm": _product("self", "mat2"),
    "aten::baddbmm": _product("batch1", "batch2"),
    "aten::baddbmm_": _product("batch1", "batch2"),
    "aten::addbmm": _product("batch1", "batch2"),
    "aten::mv": _product("self", "vec"),
    "aten::addmv": _product("mat", "vec"),
    "aten::dot": _product("self", "tensor"),
    "aten::_scaled_mm": _product("self", "mat2"),
    "aten::_scaled_mm_v2": _product("self", "mat2"),
    "aten::_grouped_mm": _grouped,
    "aten::_scaled_grouped_mm": _grouped,
    "aten::linear": _linear,
    "torch_nn::_linear_cross_entropy_batch_chunked": _linear_loss,
    "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction": _linear_loss,
    "aten::convolution": _convolution,
    "aten::_convolution": _convolution,
    "aten::convolution_overrideable": _convolution,
    "aten::cudnn_convolution": _convolution,
    "aten::cudnn_convolution_transpose": lambda given, out: _convolution({**given, "transposed": True}, out),
    "aten::mkldnn_convolution": _convolution,
    "aten::miopen_convolution": _convolution,
    "aten::_slow_conv2d_forward": _convolution,
}
