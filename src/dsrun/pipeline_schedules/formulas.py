"""What papers say about schedules, in closed form: bubbles and kept micro batches where all chunks are alike.

`simulate.py` and `live_of` say the same of the actions themselves, and of chunks that are not alike.
"""

from __future__ import annotations

from dsrun.errors import LayoutError

from .generate import ScheduleName


def bubble_ratio(
    name: ScheduleName,
    *,
    ranks: int,
    micros: int,
    virtual: int = 1,
    forward: float = 1.0,
    input_grads: float = 1.0,
    weight_grads: float = 1.0,
) -> float:
    """Returns the time that ranks wait over the time that they compute, where messages take no time.

    (p-1)/(vM) for whole backwards. ZB1P has (p-1)(F+I-W) / (M(F+I+W)), as in its paper, where W is not more than F and
    I, and waits longer where it is. So does breadth first with fewer micro batches than ranks. Both are counted.

    A step of ZB-V has a bubble of (p-1)/(6M), though no rank waits between its own first and last action: they begin
    and end at different times, and papers that say 0 let the next step begin meanwhile. A step here ends with an
    update that needs all gradients.

    Args:
        name: name of the schedule.
        ranks: ranks of the pipeline, p.
        micros: micro batches of a global batch, M.
        virtual: chunks of a rank, v; `zbv` has two and looks at none.
        forward: time of a chunk's forward, F, in any unit.
        input_grads: time of the gradients of its inputs, I.
        weight_grads: time of the gradients of its weights, W.

    Raises:
        LayoutError: there is no closed form: for `zbv` with times that are not alike, and for `zero_bubble` with fewer
            micro batches than ranks.

    Sources: Narayanan et al., 2021, section 2.2; Qi et al., 2023, section 2.
    """
    whole = forward + input_grads + weight_grads
    missing = max(0, ranks - micros)
    match name:
        case "gpipe" | "1f1b" | "interleaved":
            return (ranks - 1) / (virtual * micros)
        case "breadth_first":
            # With too few micro batches, the first rank waits for its next chunk's inputs.
            return (ranks - 1 + (virtual - 1) * missing) / (virtual * micros)
        case "zero_bubble":
            if missing:
                raise LayoutError(
                    f"schedule zero_bubble: there is no closed form for {micros} micro batches on {ranks} ranks",
                    hint="simulate the schedule",
                )
            wait = max(forward, min(input_grads, weight_grads)) + max(0.0, input_grads - weight_grads)
            return (ranks - 1) * wait / (micros * whole)
        case "zbv":
            if not forward == input_grads == weight_grads:
                raise LayoutError(
                    f"schedule zbv: there is no closed form for times {forward}, {input_grads} and {weight_grads} that "
                    "are not alike",
                    hint="simulate the schedule",
                )
            return max(ranks - 1, 4 * (ranks - 1) - 2 * (micros - 1)) / (6 * micros)


def live_micro_batches(name: ScheduleName, *, ranks: int, micros: int, virtual: int = 1) -> float:
    """Returns the most micro batches whose activations a rank keeps, in parts of all its chunks.

    Args:
        name: name of the schedule.
        ranks: ranks of the pipeline.
        micros: micro batches of a global batch.
        virtual: chunks of a rank.
    """
    match name:
        case "gpipe" | "breadth_first":
            return micros
        case "interleaved" if virtual > 1:
            return min(micros, ranks + (ranks - 1) / virtual)
        case _:
            return min(ranks, micros)


def half_interleaved_efficiency(ranks: int, micros: int) -> float:
    """Returns M P / (M P + 2 (P - 1)), the part of a step that ranks compute by a formula in wide use.

    It is that of interleaved 1F1B with v = P/2 chunks a rank: 1 / (1 + (P-1)/(v M)). With other numbers of chunks, and
    with 1F1B above all, ranks wait longer for P > 2; see `bubble_ratio`.

    Args:
        ranks: ranks of the pipeline.
        micros: micro batches of a global batch.
    """
    return micros * ranks / (micros * ranks + 2 * (ranks - 1))
