"""Whether contenders trained the same thing: their losses are held against each other. Pure, nothing is run here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

#: How far the losses of a step may lie apart, as a share: all train bf16 with fp32 masters. One model with one start
#: differs by rounding alone.
SAME_START = 0.005
#: Contenders that build the model by other means (on the device, or in bf16 by `zero.Init`) start from other weights.
OTHER_START = 0.03


def compare(parts: Mapping[str, Mapping[str, Any]], *, first: str, beginning: str, tolerance: float) -> dict[str, Any]:
    """Holds every contender's losses against those of the first that ran, `first` if it did.

    Args:
        parts: rows of the check by name; a row's result has `contender` and `rows`, these have `tokens` and `losses`.
        first: name of the contender that the others are held against.
        beginning: prefix of the names of the rows to compare.
        tolerance: largest allowed difference between two losses, as a share.

    Returns:
        a row: ok with the largest share by contender, failed with the two contenders and the step, or not run.
    """
    results = [part.get("result", {}) for name, part in parts.items() if name.startswith(beginning)]
    # Who computes alone, without an optimizer, trains nothing.
    ran = [one for one in results if one.get("rows") and one["contender"] != "compute"]
    ran.sort(key=lambda result: result["contender"] != first)
    if len(ran) < 2:
        return {"state": "not run", "why": "fewer than two contenders ran"}
    shares: dict[str, float] = {}
    wrong: list[str] = []
    base = ran[0]
    for other in ran[1:]:
        for row, expected in zip(other["rows"], base["rows"], strict=False):
            step, share = _furthest(row["losses"], expected["losses"])
            name = other["contender"]
            shares[name] = max(share, shares.get(name, 0.0))
            # Not `>`: a loss that is no number is no agreement.
            if not share <= tolerance:
                wrong.append(
                    f"{name} and {base['contender']} train different things: losses {row['losses'][step]:.5f} and "
                    f"{expected['losses'][step]:.5f} in step {step} of {row['tokens']} tokens"
                )
    result = {"against": base["contender"], "tolerance": tolerance, "largest difference": shares}
    if wrong:
        return {"state": "failed", "why": "; ".join(wrong), "result": result}
    return {"state": "ok", "result": result}


def _furthest(losses: Sequence[float], expected: Sequence[float]) -> tuple[int, float]:
    """Returns the step in which two lie furthest apart, and how far, as a share; no number is infinitely far."""
    shares = [
        abs(one - other) / abs(other) if one - other == one - other else float("inf")
        for one, other in zip(losses, expected, strict=True)
    ]
    step = max(range(len(shares)), key=shares.__getitem__)
    return step, shares[step]
