"""Pipelines against torch.distributed.pipelining and DeepSpeed's: speed of a step, idle time, cost of an action.

    python scripts/bench/pipeline.py [--deepspeed-python PYTHON] [--only steps schedules ...] [--runs 9] [--json F]

All contenders train one model, cut at the same layers, on the same micro batches, clipped by the norm over all stages,
one thread a rank, each in processes of its own, which live through the section and take turns of a few steps: figures
of a round are neighbours in time, and ratios are medians of ratios within a round. The first step of a turn does not
count, for in training a step follows another. A step is the slowest rank's. Losses must agree, or the section fails. A
machine with fewer idle cores than ranks shows other figures: what runs beside it takes the turns of a stage.

Sections:
    steps     a step of a small GPT, 2 ranks, 8 micro batches, fp32, and one rank without a pipeline
    schedules the same step under each schedule that a contender has, and the best of each
    sleeping  a step of 4 ranks whose stages sleep, 10 ms forward and 20 ms backward: what is lost is the pipeline's
    actions   processor time of the executor an action, stages that compute nothing

DeepSpeed belongs into an environment of its own, and is left out without one; its pipeline has no interleaving:
    python -m venv /tmp/ds && DS_BUILD_OPS=0 /tmp/ds/bin/pip install torch deepspeed==0.19.8
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pipeline_parts.empty_stages import seconds_an_action
from pipeline_parts.job import Job
from teams.contest import Options, run
from zero_peers.figures import Figures

#: How far losses of contenders may lie apart, by the larger one: roundings of fp32 in another order.
_LOSS_TOLERANCE = 1e-4
_GPT = Job("plain", ranks=2, model="gpt", layers=8, micros=8, hidden=256, seq=128)
#: Schedules that each contender has, with the chunks a rank.
_SCHEDULES: dict[str, tuple[tuple[str, int], ...]] = {
    "dsrun": (("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zbv", 2)),
    "torch": (("1f1b", 1), ("interleaved", 2), ("zbv", 2)),
    "deepspeed": (("1f1b", 1),),
}
_SLEEP = Job("plain", ranks=4, model="sleep", layers=4, micros=8, forward_ms=10.0)


# Sections


def steps(options: Options) -> list[Figures]:
    """Times steps of two ranks."""
    job = _GPT
    ideal = job.ranks * job.micros / (job.micros + job.ranks - 1)
    table = Figures(f"A step, {job.layers} blocks of {job.hidden}, {job.seq} tokens, p 2, M {job.micros}, fp32", "s")
    jobs = [(name, replace(job, contender=name)) for name in options.contenders]
    jobs.append(("one rank", replace(job, contender="plain", ranks=1)))
    taken = options.take_turns(jobs, tolerance=_LOSS_TOLERANCE)
    for row, found in taken.items():
        for step in found:
            table.add(row, step["step_s"])
            table.add(f"{row}, CPU of all ranks", step["cpu_s"])
    table.demand_ratio("dsrun", "torch", most=0.95)
    table.demand_ratio("dsrun", "deepspeed", most=0.8)
    # One rank takes `ideal` times as long as two whose only loss is the bubble.
    table.demand_ratio("one rank", "dsrun", least=0.93 * ideal)
    for row in options.contenders:
        table.notes[row] = f"{table.ratio('one rank', row):.3f} times as fast as one rank; at best {ideal:.3f}"
    return [table]


def schedules(options: Options) -> list[Figures]:
    """Times steps of two ranks by schedule: what a user gets who chooses the best that each contender has."""
    table = Figures(f"The step by schedule, {_GPT.layers} blocks of {_GPT.hidden}, p 2, M {_GPT.micros}, fp32", "s")
    jobs = [
        (f"{name} {schedule}", replace(_GPT, contender=name, schedule=schedule, chunks=chunks))
        for name in options.contenders
        for schedule, chunks in _SCHEDULES[name]
    ]
    taken = options.take_turns(jobs, tolerance=_LOSS_TOLERANCE)
    for row, found in taken.items():
        for step in found:
            table.add(row, step["step_s"])
    if "dsrun" in options.contenders:
        own = min((row for row in taken if row.startswith("dsrun ")), key=table.median)
        for peer in options.contenders:
            if peer != "dsrun":
                best = min((row for row in taken if row.startswith(f"{peer} ")), key=table.median)
                table.demand_ratio(own, best, most={"torch": 0.95, "deepspeed": 0.8}[peer])
    return [table]


def sleeping(options: Options) -> list[Figures]:
    """Times steps whose stages sleep; what is above the schedule's own length is messages and bookkeeping."""
    tables: list[Figures] = []
    for schedule, chunks in (("1f1b", 1), ("interleaved", 2)):
        job = replace(_SLEEP, schedule=schedule, chunks=chunks, layers=_SLEEP.ranks * chunks)
        job = replace(job, forward_ms=_SLEEP.forward_ms / chunks)
        # M forwards and backwards of a rank, and p - 1 of one chunk that the first and the last rank wait.
        ideal_s = (job.micros + (job.ranks - 1) / chunks) * 3 * _SLEEP.forward_ms / 1e3
        table = Figures(f"A step of 4 ranks that sleep, {schedule}, M {job.micros}; {ideal_s:.4g} s at best", "s")
        names = [name for name in options.contenders if name != "deepspeed" or chunks == 1]
        taken = options.take_turns([(name, replace(job, contender=name)) for name in names], tolerance=_LOSS_TOLERANCE)
        for row, found in taken.items():
            for step in found:
                table.add(row, step["step_s"])
        for row in taken:
            table.notes[row] = f"{table.median(row) / ideal_s:.3f} x the best"
        if "dsrun" in taken:
            table.demand("dsrun by the best <= 1.03", table.median("dsrun") / ideal_s, most=1.03)
        tables.append(table)
    return tables


def actions(options: Options) -> list[Figures]:
    """Times the executor alone."""
    table = Figures("Processor time of the executor an action: 2 ranks, 1f1b, M 64, stages that compute nothing", "us")
    for _ in range(options.runs):
        table.add("first rank", seconds_an_action(0) * 1e6)
        table.add("last rank", seconds_an_action(1) * 1e6)
    for row in table.values:
        table.demand(f"{row} <= 30", table.median(row), most=30.0)
    return [table]


SECTIONS: dict[str, Callable[[Options], list[Figures]]] = {
    "steps": steps,
    "schedules": schedules,
    "sleeping": sleeping,
    "actions": actions,
}


if __name__ == "__main__":
    run(SECTIONS, about=__doc__, runs=9)
