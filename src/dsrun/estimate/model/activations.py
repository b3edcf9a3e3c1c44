"""Bytes that forward keeps for backward, by the layers of a transformer.

What attention keeps is counted as a fused kernel's; what another one keeps on top is told, see `attention.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from dsrun.estimate.model.architecture import Architecture
from dsrun.estimate.run.recomputation import RecomputationPlan
from dsrun.estimate.run.settings import RunSettings

_FP32_BYTES = 4
#: Block inputs on the GPU while the others are in host memory: in use, on the way out, on the way in.
_IN_FLIGHT = 3
#: Elements that share a scale where inputs are packed to 8 bits.
_PACKED_BLOCK = 128


@dataclass(frozen=True, slots=True)
class ActivationBytes:
    """Bytes of one rank when most is held.

    Attributes:
        layers: bytes of the blocks' activations that lie where the rank computes.
        logits: bytes of the output layer and its loss, or of what a block's backward works with if that is more: the
            former are gone when the latter begins.
        on_host: bytes kept of the blocks in host memory.
        on_disk: bytes kept of the blocks in a file on disk.
    """

    layers: int
    logits: int
    on_host: int = 0
    on_disk: int = 0


def activation_bytes(
    shape: Architecture, settings: RunSettings, *, attention: int = 0, live: float = 1, has_head: bool = True
) -> ActivationBytes:
    """Returns what is kept when most is held, by the formulas of docs/guides/activations.md.

    Args:
        shape: the transformer.
        settings: format, tokens, recomputation and what is cut over ranks.
        attention: bytes that attention of one block keeps beyond queries, keys, values and its output.
        live: micro batches that are held at once; several in pipeline stages. A memory budget is for all of them.
        has_head: whether the output layer is here; it is not on most pipeline stages.
    """
    tokens = settings.tokens_per_micro_step
    block = block_bytes_per_token(shape, settings) * tokens + attention
    ends = ceil(live) * logit_bytes_per_token(shape, settings) if has_head else 0
    logits = max(ends, working_bytes_per_token(shape, settings)) * tokens
    stack = settings.recomputed(shape.layers)
    if not stack.blocks:
        return ActivationBytes(ceil(live * shape.layers * block), logits)
    stored = stored_input_bytes(shape, settings)
    waiting = min(_IN_FLIGHT, stack.segments) if settings.activations_on_cpu else stack.segments
    inputs = waiting * stored
    if stack.products:
        inputs += shape.layers * product_bytes_per_token(shape, settings) * tokens
    results = stack.blocks * kept_result_bytes_per_token(shape, settings, keeps_products=stack.products) * tokens
    kept = (shape.layers - stack.blocks) * block
    layers = inputs + results + max(kept, _live_bytes(stack, shape, settings, block))
    waits = results if settings.activations_on_cpu else inputs + results
    layers += ceil((live - 1) * (waits + kept))  # of the other micro batches nothing is computed again meanwhile
    if settings.memory_budget is not None:
        layers = max(layers, min(settings.memory_budget, ceil(live * shape.layers * block)))
    away = ceil(live * stack.segments) * stored if settings.activations_on_cpu else 0
    if settings.activation_buffers is None:
        return ActivationBytes(layers, logits, away)
    buffered = min(settings.activation_buffers, stack.segments) * stored
    return ActivationBytes(layers, logits, buffered, disk_inputs(stack.segments) * stored)


def disk_inputs(segments: int) -> int:
    """Returns how many of the kept inputs are written to a file: those put last are still on the device."""
    return max(0, segments - (_IN_FLIGHT - 1))


def forwards_again(shape: Architecture | None, settings: RunSettings, *, live: float = 1) -> float:
    """Returns how many forwards of the blocks are made beyond the first one, e.g. 1.0 for every block.

    Of `memory_budget` as few as the budget asks for, without copies to the host and without packing.

    Args:
        shape: the transformer, or a pipeline stage's part of it; None: it is not known.
        settings: format, tokens and recomputation.
        live: micro batches that are held at once.
    """
    if shape is None:
        return 1.0 if settings.recompute == "blocks" else 0.0
    forwards = settings.recomputed(shape.layers).forwards
    if settings.memory_budget is not None:
        tokens = settings.tokens_per_micro_step
        block = block_bytes_per_token(shape, settings) * tokens
        results = kept_result_bytes_per_token(shape, settings, keeps_products=False) * tokens
        saved = block - stored_input_bytes(shape, settings) - results
        over = live * shape.layers * block - settings.memory_budget
        forwards = min(shape.layers, max(0, ceil(over / (live * saved))))
    return forwards / max(1, shape.layers)  # a stage may have the embedding or the head alone


def stored_input_bytes(shape: Architecture, settings: RunSettings) -> int:
    """Returns what is stored of one kept block input: whole, cut over ranks, or in 8 bits with a scale for 128."""
    cut = settings.tensor_parallel if settings.cut_activations else settings.sequence_parts
    numel = shape.hidden * settings.tokens_per_micro_step // cut
    if settings.packed_activations:
        return numel + _FP32_BYTES * -(-numel // _PACKED_BLOCK)
    return numel * settings.compute_bytes


def _live_bytes(stack: RecomputationPlan, shape: Architecture, settings: RunSettings, block: int) -> int:
    """What a recomputed segment holds in its backward beyond what waits for it, its first input being among that."""
    tokens = settings.tokens_per_micro_step
    one_input = shape.hidden * settings.compute_bytes * tokens // settings.sequence_parts
    live = stack.longest * block if stack.at_once else (stack.longest - 1) * one_input + block
    if stack.products:
        # Products are among what a block saves, but for the two that are added to its width.
        added = _sums_per_token(shape, settings) * settings.compute_bytes
        live -= (product_bytes_per_token(shape, settings) - added) * tokens
    if settings.packed_activations:
        return live + one_input  # what is unpacked is a tensor of its own, and so is what it is rounded from
    return live if settings.cut_activations else live - one_input


def block_bytes_per_token(shape: Architecture, settings: RunSettings) -> int:
    """Returns what one block keeps of one token.

    Inputs and outputs of both norms; queries, keys, values and attention's output; of the MLP what its matrices and
    its activation function read: two tensors, with a gate four. Norms are not cut by tensor parallelism, but by slices
    of the sequence; what these are gathered to for cut layers is kept whole.

    Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022, section 4.1; here
    without dropout and without the attention matrix, which fused kernels do not keep
    (Dao et al., FlashAttention, 2022).
    """
    whole = 2 * shape.hidden + 2 * shape.hidden // settings.sequence_parts
    cut = _attention_per_token(shape, settings) + (4 if shape.gated else 2) * _intermediate_per_token(shape, settings)
    return (whole + cut) * settings.compute_bytes


def product_bytes_per_token(shape: Architecture, settings: RunSettings) -> int:
    """Returns the results of one block's matrix products and attention, of one token.

    Of those that read the block's width, and attention's, a tensor-parallel rank has its part; of the two that give the
    block's width each rank has a part of the sum, for the whole sequence. With slices of the sequence it keeps none of
    these, but its slices of the sums.
    """
    cut = _attention_per_token(shape, settings) + (2 if shape.gated else 1) * _intermediate_per_token(shape, settings)
    return (_sums_per_token(shape, settings) + cut) * settings.compute_bytes


def _sums_per_token(shape: Architecture, settings: RunSettings) -> int:
    """Returns the values of the products that give the block's width, as far as these are kept."""
    return 2 * shape.hidden if settings.sequence_parts == 1 else 0


def _attention_per_token(shape: Architecture, settings: RunSettings) -> int:
    """Returns the values of queries, keys, values and attention's output that the rank with most of a layer has."""
    return 2 * sum(shape.widths_on_rank(settings.tensor_parallel))


def _intermediate_per_token(shape: Architecture, settings: RunSettings) -> int:
    """Returns the values of one tensor as wide as the MLP that the rank with most of a layer has."""
    return -(-shape.intermediate // settings.tensor_parallel)


def kept_result_bytes_per_token(shape: Architecture, settings: RunSettings, *, keeps_products: bool) -> int:
    """Returns what a recomputed block keeps of one token because making it again would involve tensor-parallel ranks.

    The sums of its two rows, whole or slices of the sequence. A whole one takes the place of the product, which is
    there where products are kept. What slices are gathered to for columns is gathered again.

    Args:
        shape: the transformer.
        settings: ranks that share a layer, and format.
        keeps_products: whether products are kept, too.
    """
    if settings.tensor_parallel == 1 or (keeps_products and settings.sequence_parts == 1):
        return 0
    return 2 * shape.hidden // settings.sequence_parts * settings.compute_bytes


def working_bytes_per_token(shape: Architecture, settings: RunSettings) -> int:
    """Returns what backward itself works with: the gradient of a block's widest state, of one token."""
    widest = (2 if shape.gated else 1) * _intermediate_per_token(shape, settings)
    return max(shape.hidden, widest) * settings.compute_bytes


def logit_bytes_per_token(shape: Architecture, settings: RunSettings) -> int:
    """Returns what output layer and loss hold of one token when backward begins.

    Logits in compute format, and in fp32 the log-probabilities that cross entropy keeps and their gradient; of a
    vocabulary that is cut over ranks, a rank's part.
    """
    return -(-shape.vocab // settings.tensor_parallel) * (settings.compute_bytes + 2 * _FP32_BYTES)
