"""Which blocks each chunk has, and what blocks and ends cost to compute: operations a token, from shapes alone.

Runs and cuts nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn

from dsrun.errors import ModelError
from dsrun.pipeline_schedules.partition import balance, by_pattern, explicit, uniform

from ....stacks import Stack, numel_of
from ..stages import Partition
from .uses import Slot, Uses, phases_of

_EXPERTS_USED = ("top_k", "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
_ATTENTION = re.compile("attention|attn", re.I)
_EXPERTS = re.compile("expert", re.I)


def partition_of(
    stack: Stack, slots: Sequence[Slot], uses: Uses, chunks: int, method: str | Sequence[int], length: int
) -> Partition:
    """Returns which blocks each chunk has.

    Args:
        stack: stack of the model.
        slots: places of parameters outside of it.
        uses: times of their uses.
        chunks: number of chunks.
        method: way to share blocks out, see `cut_model`.
        length: tokens of a sequence.

    Raises:
        ModelError: the method is unknown.
        ConfigError: bounds or pattern do not fit the blocks, or these are fewer than the chunks.
    """
    names = tuple(name for name, _ in stack.blocks)
    blocks = [block for _, block in stack.blocks]
    costs: list[float] = []
    if not isinstance(method, str):
        bounds = explicit(tuple(method), len(blocks), chunks)
    elif method == "uniform":
        bounds = uniform(len(blocks), chunks)
    elif method.startswith("type:"):
        bounds = by_pattern([type(block).__name__ for block in blocks], method[len("type:") :], chunks)
    elif method == "parameters":
        first, last = _end_sums(stack, slots, uses, by_numel=True)
        costs = _with_ends([float(numel_of(block)) for block in blocks], first, last)
        bounds = balance(costs, chunks)
    elif method == "cost":
        first, last = _end_sums(stack, slots, uses, by_numel=False)
        costs = _with_ends([_block_cost(block, sequence_length=length) for block in blocks], first, last)
        bounds = balance(costs, chunks)
    else:
        raise ModelError(
            f"model: `pipeline.partition` is {method!r}; expected `cost`, `parameters`, `uniform`, "
            "`type:REGEX` or bounds"
        )
    return Partition(tuple(bounds), names, tuple(costs))


def _end_sums(stack: Stack, slots: Sequence[Slot], uses: Uses, *, by_numel: bool) -> tuple[float, float]:
    sums = [0.0, 0.0]
    for slot in slots:
        for phase in sorted(phases_of(stack, slot, uses)):
            is_behind = phase == len(stack.blocks)
            is_lookup = isinstance(slot.owner, nn.Embedding) and not is_behind
            sums[is_behind] += slot.param.numel() if by_numel else _slot_cost(slot, is_lookup=is_lookup)
    return sums[0], sums[1]


def _block_cost(block: nn.Module, *, sequence_length: int) -> float:
    """Returns the operations of a block's forward, a token.

    Args:
        block: block of a stack; on the meta device too.
        sequence_length: tokens of a sequence, for attention.
    """
    used = _experts_used(block)
    matrices, widths = 0.0, Counter[int]()
    for name, module in block.named_modules():
        if isinstance(module, nn.Embedding):
            continue
        for param in module.parameters(recurse=False):
            if param.dim() < 2:
                continue
            share = 1.0
            if param.dim() > 2 and _EXPERTS.search(f"{name} {type(module).__name__}") and used is not None:
                share = min(1.0, used / param.shape[0])
            if used is not None and (count := _listed_experts(block, name)):
                share = min(1.0, used / count)
            matrices += share * param.numel()
            widths.update(param.shape[-2:])
    width = min(widths, key=lambda size: (-widths[size], size), default=0)
    attention = 4.0 * sequence_length * width if _has_attention(block) else 0.0
    return 2.0 * matrices + attention


def _slot_cost(slot: Slot, *, is_lookup: bool) -> float:
    """Returns the operations of a use of a parameter outside of the stack, a token.

    Args:
        slot: place of the parameter.
        is_lookup: whether rows of it are looked up, which costs nothing.
    """
    return 0.0 if is_lookup or slot.param.dim() < 2 else 2.0 * slot.param.numel()


def _with_ends(costs: Sequence[float], first: float, last: float) -> list[float]:
    """Returns costs of blocks in which the first block counts what comes before it, the last what comes behind it."""
    summed = list(costs)
    summed[0] += first
    summed[-1] += last
    return summed


def _has_attention(block: nn.Module) -> bool:
    return any(
        _ATTENTION.search(f"{name.rpartition('.')[2]} {type(module).__name__}") or hasattr(module, "num_heads")
        for name, module in block.named_modules()
    ) or isinstance(getattr(block, "heads", None), int)


def _experts_used(block: nn.Module) -> int | None:
    """Returns how many experts a token uses, where the block says so."""
    for value in _attributes(block):
        return value
    return None


def _attributes(block: nn.Module) -> Iterator[int]:
    for module in block.modules():
        for name in _EXPERTS_USED:
            value = getattr(module, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                yield value


def _listed_experts(block: nn.Module, name: str) -> int:
    """Returns how many experts are in the list that a part of a block is in; 0: it is in none."""
    parts = name.split(".")
    for index, part in enumerate(parts[:-1]):
        if part == "experts" and parts[index + 1].isdigit():
            return len(list(block.get_submodule(".".join(parts[: index + 1])).children()))
    return 0
