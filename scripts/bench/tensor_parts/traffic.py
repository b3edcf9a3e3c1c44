"""What a step of dsrun sends over its axes, and what the shape of the model says that it has to send.

[Note: bytes on the wire] Collectives count the whole buffer that a rank hands over. Of an all-reduce's, 2 (t - 1) / t
go over the wire from each rank, and (t - 1) / t of another collective's.
"""

from __future__ import annotations

from typing import Any

from teams.contest import Options

from .job import Job


def sent_in_step(options: Options, job: Job) -> dict[str, tuple[int, float]]:
    """Returns calls and bytes on the wire of a step by axes and collective, on rank 0; see [Note: bytes on the wire].

    Args:
        options: Ways of measuring.
        job: a job of dsrun's.
    """
    with options.team(job) as team:
        team.step(2)  # in the first one a block is compared with the whole one
        before = team.ask("traffic")[0]
        team.step(1)
        after = team.ask("traffic")[0]
    found: dict[str, tuple[int, float]] = {}
    for axes, counted in after.items():
        for collective in counted["bytes"]:
            calls, nbytes = (_more(counted, before[axes], what, collective) for what in ("calls", "bytes"))
            if calls:
                found[f"{axes}, {collective}"] = calls, nbytes * _share(collective, job.ranks)
    return found


def expected_bytes(job: Job) -> dict[str, float]:
    """Returns bytes on the wire of a step by what is sent; see [Note: bytes on the wire].

    A block sums its hidden states twice forward and twice backward (Megatron-LM, Shoeybi et al., 2019, section 3), or
    gathers and scatters slices of them, which is as much. The loss of cut logits sends a few numbers a token more.
    """
    width = 2 if job.bf16 else 4
    hidden = job.samples * job.seq * job.hidden * width
    logits = job.samples * job.seq * job.vocab * width
    sum_, gather = _share("all_reduce", job.ranks), _share("all_gather", job.ranks)
    whole_weights = (job.vocab + 2 * job.layers + 1) * job.hidden
    found = {
        "blocks": 4 * job.layers * hidden * sum_,
        "gradient of the output layer's input": hidden * sum_,
        "gradients of whole weights (embedding, norms)": whole_weights * width * sum_,
    }
    if job.tensor_options.get("sequence_parallel"):
        found["slices at both ends of the stack"] = 2 * hidden * gather
    if job.tensor_options.get("vocab_parallel_lm_head") is False:
        found["logits"] = logits * gather
    return found


def _share(collective: str, ranks: int) -> float:
    return (2 if collective == "all_reduce" else 1) * (ranks - 1) / ranks


def _more(after: dict[str, Any], before: dict[str, Any], what: str, collective: str) -> int:
    return after[what][collective] - before[what].get(collective, 0)
