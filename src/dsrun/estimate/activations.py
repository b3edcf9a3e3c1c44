"""Bytes that forward keeps for backward, by the layers of a transformer. Attention is taken to be fused (SDPA)."""

from __future__ import annotations

from dataclasses import dataclass

from dsrun.estimate.architecture import Architecture
from dsrun.estimate.settings import RunSettings

_FP32_BYTES = 4
#: Block inputs on the GPU while the others are in host memory: in use, on the way out, on the way in.
_IN_FLIGHT = 3


@dataclass(frozen=True, slots=True)
class ActivationBytes:
    """Bytes of one rank at the start of backward.

    Attributes:
        layers: kept of the blocks, where the rank computes.
        logits: of the output layer and its loss.
        on_host: kept of the blocks in host memory.
    """

    layers: int
    logits: int
    on_host: int = 0


def activation_bytes(shape: Architecture, settings: RunSettings) -> ActivationBytes:
    """Returns what one micro batch keeps.

    Args:
        shape: the transformer.
        settings: format, tokens, recomputation and what is cut over ranks.
    """
    tokens = settings.tokens_per_micro_step
    block = block_bytes_per_token(shape, settings) * tokens
    logits = logit_bytes_per_token(shape, settings) * tokens
    if settings.recompute == "none":
        return ActivationBytes(shape.layers * block, logits)
    segments = min(shape.layers, settings.kept_segments or shape.layers)
    cut = settings.tensor_parallel if settings.cut_activations else 1
    one_input = shape.hidden * settings.compute_bytes * tokens // cut
    live = -(-shape.layers // segments) * block
    if settings.activations_on_cpu:
        return ActivationBytes(min(_IN_FLIGHT, segments) * one_input + live, logits, segments * one_input)
    return ActivationBytes(segments * one_input + live, logits)


def block_bytes_per_token(shape: Architecture, settings: RunSettings) -> int:
    """Returns what one block keeps of one token.

    Inputs and outputs of both norms; queries, keys, values and attention's output; of the MLP what its matrices and
    its activation function read: two tensors, with a gate four. Norms are not cut by tensor parallelism.

    Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022, section 4.1; here
    without dropout and without the attention matrix, which fused kernels do not keep
    (Dao et al., FlashAttention, 2022).
    """
    whole = 4 * shape.hidden
    cut = 2 * shape.attention_width + 2 * shape.kv_width + (4 if shape.gated else 2) * shape.intermediate
    return (whole + cut // settings.tensor_parallel) * settings.compute_bytes


def logit_bytes_per_token(shape: Architecture, settings: RunSettings) -> int:
    """Returns what output layer and loss hold of one token when backward begins.

    Logits in compute format, and in fp32 the log-probabilities that cross entropy keeps and their gradient.
    """
    return shape.vocab * (settings.compute_bytes + 2 * _FP32_BYTES)
