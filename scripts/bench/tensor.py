"""Tensor parallelism against torch's DTensor and DeepSpeed's AutoTP: speed of a step, cost of a layer, bytes sent.

    python scripts/bench/tensor.py [--deepspeed-python PYTHON] [--only steps linear ...] [--runs 5] [--json F]

All contenders train one Llama of transformers on the same tokens, two ranks that share every layer, one thread a rank,
AdamW, nothing clipped; in bf16 with fp32 masters. torch is what transformers itself does with the model's plan
(`apply_tensor_parallelism`: DTensor), in a training loop of plain torch. They take turns (see `teams/contest.py`), and
losses must agree, or the section fails. A machine with fewer idle cores than ranks shows other figures: what runs
beside it keeps both ranks waiting.

Sections:
    steps     a step in fp32, of dsrun also with other options, and one rank that has the whole model
    bf16      the same in bf16
    linear    what a cut Linear of 16 x 16 costs its host beside a plain one: one rank, two threads, two processes
    bytes     calls and bytes of a step by axes, beside what the shape of the model says

DeepSpeed belongs into an environment of its own, and is left out without one:
    python -m venv /tmp/ds && DS_BUILD_OPS=0 /tmp/ds/bin/pip install torch deepspeed==0.19.8 transformers==5.20.2
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace

from teams.contest import Options, run
from tensor_parts import linears
from tensor_parts.job import Job
from tensor_parts.traffic import expected_bytes, sent_in_step
from zero_peers.figures import Figures

#: How far losses of contenders may lie apart, by the larger one: roundings in another order.
_TOLERANCE = {"fp32": 1e-5, "bf16": 2e-3}
_STEPS_OF_A_TURN = 2
_LLAMA = Job("plain", ranks=2)
_TINY = Job("plain", ranks=2, hidden=64, layers=2, heads=4, key_heads=2, inner=96, vocab=256, samples=2, seq=16)
#: Keys of dsrun's section `tensor_parallel`, by how rows name them.
_WHOLE_LOGITS, _SLICES = "dsrun, whole logits", "dsrun, slices of the sequence"
_OPTIONS = {
    _WHOLE_LOGITS: {"vocab_parallel_lm_head": False},
    _SLICES: {"sequence_parallel": True},
    "dsrun, overlapped sums": {"tp_overlap_comm": True},
}
#: ZeRO stages of DeepSpeed; with one data rank there is nothing for dsrun to share out.
_STAGES = (0, 1)
_CALLS = 100
_ONE_RANK = "one rank"
_FORWARD, _BOTH = linears.WHATS


def _job(options: Options) -> Job:
    return _TINY if options.quick else _LLAMA


# Sections


def steps(options: Options) -> list[Figures]:
    """Times steps of two ranks in fp32; the smallest jobs leave out options, which `bytes` has."""
    return [_steps(options, _job(options), "fp32", dsrun_options={} if options.quick else _OPTIONS)]


def bf16(options: Options) -> list[Figures]:
    """Times steps of two ranks in bf16."""
    return [_steps(options, replace(_job(options), bf16=True), "bf16", dsrun_options={})]


def _steps(options: Options, job: Job, precision: str, *, dsrun_options: Mapping[str, dict[str, bool]]) -> Figures:
    jobs = [("one rank", replace(job, contender="plain", ranks=1))]
    if "dsrun" in options.contenders:
        jobs.append(("dsrun", replace(job, contender="dsrun")))
        jobs += [(row, replace(job, contender="dsrun", tensor_options=given)) for row, given in dsrun_options.items()]
    if "torch" in options.contenders:
        jobs.append(("torch", replace(job, contender="torch")))
    if "deepspeed" in options.contenders:
        jobs += [(f"deepspeed, stage {stage}", replace(job, contender="deepspeed", stage=stage)) for stage in _STAGES]
    taken = options.take_turns(jobs, tolerance=_TOLERANCE[precision], steps=_STEPS_OF_A_TURN)
    shape = f"{job.layers} blocks of {job.hidden}, {job.samples} x {job.seq} tokens"
    table = Figures(f"A step of a Llama, {shape}, t 2, {precision}", "s")
    for row, found in taken.items():
        for step in found:
            table.add(row, step["step_s"])
            table.add(f"{row}, CPU of all ranks", step["cpu_s"])
    table.demand_ratio("dsrun", "torch", most=0.9)
    for stage in _STAGES:
        table.demand_ratio("dsrun", f"deepspeed, stage {stage}", most=1.0)
    for row in taken:
        table.notes[row] = f"{table.ratio('one rank', row):.3f} times as fast as one rank"
    return table


def linear(options: Options) -> list[Figures]:
    """Times layers alone."""
    calls = 10 if options.quick else _CALLS
    here = linears.alone()
    with options.team(replace(_LLAMA, contender="linear")) as team:
        return [
            _costs(_ONE_RANK, options.runs, lambda: here.times(calls)),
            _costs("two ranks, threads of a process", options.runs, lambda: linears.times_on_threads(calls, ranks=2)),
            _costs("two ranks, processes that share memory", options.runs, lambda: team.ask(f"times {calls}")[0]),
        ]


def _costs(place: str, runs: int, times: Callable[[], linears.Costs]) -> Figures:
    table = Figures(f"Processor time of a Linear of {linears.WIDTH} x {linears.WIDTH}, {place}", "us")
    most_us = 5.0 if place == _ONE_RANK else 25.0
    calls_us: dict[str, list[float]] = {}
    for _ in range(runs):
        for layer, costs in times().items():
            for what, (cpu_us, call_us) in costs.items():
                table.add(f"{layer}, {what}", cpu_us)
                calls_us.setdefault(f"{layer}, {what}", []).append(call_us)
    for row, found in calls_us.items():
        table.notes[row] = f"{statistics.median(found):.3g} us with waits"
    for layer, plain in linears.PLAIN_OF.items():
        for what in linears.WHATS:
            _demand_more(table, f"{layer}, {what}", f"{plain}, {what}", most_us)
    if place != _ONE_RANK:  # what is left for the layer itself
        _demand_more(table, f"row, {_FORWARD}", f"{linears.WITH_SUM}, {_FORWARD}", most_us)
        _demand_more(table, f"row, {_BOTH}", f"{linears.WITH_SUM}, {_BOTH}", most_us)
        _demand_more(table, f"column, {_BOTH}", f"{linears.WITH_SUM}, {_BOTH}", most_us)
    return table


def _demand_more(table: Figures, row: str, other: str, most_us: float) -> None:
    more_us = statistics.median(
        mine - theirs for mine, theirs in zip(table.values[row], table.values[other], strict=True)
    )
    table.demand(f"{row}, over {other} <= {most_us:g} us", more_us, most=most_us)


def sent(options: Options) -> list[Figures]:
    """Counts what a step sends; sums that are overlapped are the same sums."""
    return [_sent(options, row, _OPTIONS.get(row, {})) for row in ("dsrun", _WHOLE_LOGITS, _SLICES)]


def _sent(options: Options, name: str, given: dict[str, bool]) -> Figures:
    job = replace(_job(options), contender="dsrun", tensor_options=given)
    table = Figures(f"Bytes on the wire from a rank in a step: {name}", "KiB")
    found, expected = sent_in_step(options, job), expected_bytes(job)
    for row, (calls, nbytes) in found.items():
        table.add(row, nbytes / 1024, f"{calls} calls")
    for row, nbytes in expected.items():
        table.add(f"by formula: {row}", nbytes / 1024)
    by_formula = sum(nbytes for _, nbytes in found.values()) / sum(expected.values())
    table.demand("found by formula >= 1 and <= 1.03", by_formula, least=1.0, most=1.03)
    return table


SECTIONS: dict[str, Callable[[Options], list[Figures]]] = {
    "steps": steps,
    "bf16": bf16,
    "linear": linear,
    "bytes": sent,
}


if __name__ == "__main__":
    run(SECTIONS, about=__doc__, runs=5, has_quick=True)
