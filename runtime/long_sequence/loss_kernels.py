"""Which code computes a loss over a vocabulary without whole logits, and how many tokens it takes at a time. Pure.

Nothing is computed here: `chunked_loss.py` is the code of our own, `cross_entropy.py` calls it and the libraries'.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dsrun.errors import ModelError

#: `auto`: Liger on CUDA where it is installed, else `chunks`. See docs/decisions/0023-a-loss-without-whole-logits.md.
LossKernel = Literal["auto", "chunks", "torch", "liger"]
Reduction = Literal["mean", "sum", "none"]

_CALL = "linear_cross_entropy"
#: Fewer tokens than this make matrix products too thin to be worth their launch.
_FEWEST_TOKENS = 128
_WIDE = 4
_CUT = "a vocabulary that is cut over ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCall:
    """What of a call decides which code may compute it.

    Attributes:
        device_type: device type of the hidden states.
        reduction: reduction over the tokens: `mean`, `sum` or `none`.
        label_smoothing: share of the target that is spread over the vocabulary.
        softcap: bound of the logits; None for none.
        is_cut: whether ranks have a part of the vocabulary each.
    """

    device_type: str
    reduction: Reduction
    label_smoothing: float
    softcap: float | None
    is_cut: bool = False


def choose_kernel(asked: LossKernel, call: LossCall, *, installed: Mapping[LossKernel, bool]) -> LossKernel:
    """Returns what computes a call; never `auto`.

    Args:
        asked: the caller's wish.
        call: the call.
        installed: whether torch has its own, and whether Liger is there.

    Raises:
        ModelError: what was asked for by name is not there, or cannot compute this call.
    """
    obstacles = {"torch": _torch_obstacle(call), "liger": _liger_obstacle(call)}
    if asked == "auto":
        return "liger" if installed["liger"] and obstacles["liger"] is None else "chunks"
    if asked == "chunks":
        return asked
    if asked not in obstacles:
        raise ModelError(f"{_CALL}: kernel is {asked!r}; expected 'auto', 'chunks', 'torch' or 'liger'")
    if not installed[asked]:
        raise ModelError(f"{_CALL}: kernel={asked!r} is not installed", hint=_WAY_OUT[asked])
    obstacle = obstacles[asked]
    if obstacle is not None:
        raise ModelError(f"{_CALL}: kernel={asked!r} cannot compute {obstacle}", hint="leave kernel out")
    return asked


_WAY_OUT: Mapping[str, str] = {
    "torch": "torch has it from 2.13 on; leave kernel out for the one of dsrun",
    "liger": "pip install liger-kernel",
}


def _torch_obstacle(call: LossCall) -> str | None:
    if call.is_cut:
        return _CUT
    if call.softcap is not None:
        return "a softcap"
    return "label smoothing" if call.label_smoothing else None


def _liger_obstacle(call: LossCall) -> str | None:
    if call.is_cut:
        return _CUT
    if call.device_type != "cuda":
        return f"on {call.device_type}; it needs CUDA"
    # Its gradients are made before the losses' own gradients are known.
    return "reduction='none'" if call.reduction == "none" else None


def tokens_at_a_time(tokens: int, width: int, vocab: int) -> int:
    """Returns the chunk for which logits take about as much as the hidden states: a power of two, at least 128.

    Source: Liger-Kernel's fused linear cross entropy, which divides by vocabulary over width as well.
    """
    share = -(-tokens * width // max(1, vocab))
    return min(max(tokens, 1), max(_FEWEST_TOKENS, 1 << max(0, share - 1).bit_length()))


@dataclass(frozen=True, slots=True)
class LossBytes:
    """Bytes of one call with `kernel="chunks"`, of which gradients of hidden states and weight are wanted.

    Attributes:
        kept: bytes kept between forward and backward: the two gradients.
        forward: most bytes in forward, those that are kept included.
    """

    kept: int
    forward: int


def loss_bytes(tokens: int, width: int, vocab: int, *, size: int, chunk: int) -> LossBytes:
    """Returns what `chunks` takes, reduced over tokens and without bias, softcap and smoothing.

    A chunk's logits are there in the format of the products and as log-probabilities, and the gradients of these two
    beside them: 3 x 4 bytes, and a fourth of the products' size. Of several chunks in 16 bits the weight's gradient
    is a sum in fp32 until all are done.

    Args:
        tokens: N.
        width: D.
        vocab: V; where it is cut over ranks, the tokens that this rank has.
        size: bytes of an element: 2 or 4.
        chunk: tokens at a time.
    """
    hidden, weight = tokens * width * size, vocab * width * size
    working = min(chunk, tokens) * vocab * (size + 12)
    if chunk >= tokens or size == _WIDE:
        return LossBytes(hidden + weight, hidden + weight + working)
    return LossBytes(hidden + weight, hidden + vocab * width * _WIDE + max(working, weight))
