"""Jobs as a week of training leaves them, for reports: a failure with a restart, a slow rank, figures of the script.

Run as a program it leaves three jobs in a state folder, of which the picture in docs/images was made:
`PYTHONPATH=tests python tests/support/report_jobs.py FOLDER`, then `XDG_STATE_HOME=FOLDER dsrun report ...`.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from dsrun.contract.environment import CHECKPOINT_EVENT
from dsrun.contract.job_paths import JobPaths
from dsrun.contract.step_records import LOG_EVENT, PHASES, SPREAD_EVENT, StepSpread, log_fields, spread_fields
from dsrun.contract.wait_records import WAITS_EVENT, to_fields
from dsrun.launcher.jobs.record import write_json
from support.job_records import leave_job
from support.recorded_runs import a_spread, a_step, a_wait, append_records, log_line, start_line, step_line

STEP_S = 2.1
RANKS = 8
GIB = 1 << 30


def leave_trained_job(
    parent: Path,
    job_id: str,
    *,
    steps: int = 600,
    fails_at: int | None = 430,
    lr: float = 3e-4,
    stage: int = 2,
    slow_rank: int | None = 5,
    seed: int = 1,
) -> Path:
    """Leaves a job that trained a language model on eight GPUs.

    Args:
        parent: Folder of jobs.
        job_id: Id of the job.
        steps: Number of its last step.
        fails_at: Step after which a rank was killed, and the job went on from its last checkpoint; None for no failure.
        lr: Highest learning rate.
        stage: ZeRO stage.
        slow_rank: Rank that the others wait for; None for none.
        seed: Seed of the noise.
    """
    created = datetime(2026, 11, 23, 8, 40, tzinfo=timezone.utc)
    begin_s = created.timestamp() + 48
    words = ("run", "-n", str(RANKS), "pretrain.py", "--lr", f"{lr:g}", "--config", "ds.json")
    folder = leave_job(
        parent,
        job_id,
        created=created,
        started=created + timedelta(seconds=30),
        command=words,
        ranks=RANKS,
        hosts=("gpu1",),
        config="/home/ada/ds.json",
    )
    noise = random.Random(seed)
    run = _Run(noise, lr=lr, steps=steps, slow_rank=slow_rank)
    events: list[dict[str, Any]] = [
        {"event": "waiting", "time": created.timestamp() + 1, "text": "waits for 8 GPUs, held by 20261123-0712-x8m2"},
        {"event": "start", "time": begin_s - 18, "attempt": 0, "world_size": RANKS, "hosts": ["gpu1"], "resume": None},
    ]
    append_records(folder, [{**start_line(time=begin_s, ranks=RANKS), "stage": stage}])
    last = steps if fails_at is None else fails_at
    append_records(folder, run.lines(1, last, begin_s))
    now_s = begin_s + STEP_S * last
    if slow_rank is not None:
        slow = {"rank": slow_rank, "ratio": 1.24, "own_s": 2.0, "others_s": 1.61}
        events.append({"event": "straggler", "time": begin_s + 95, **slow})
    if fails_at is not None:
        resume = fails_at - fails_at % 100
        why = "rank 3 on gpu1 (pid 4711) was killed by SIGKILL: out of memory on the host"
        killed = {"event": "rank_exit", "rank": 3, "host": "gpu1", "status": -9, "oom": None}
        again = {"event": "restart", "attempt": 1, "wait_s": 10.0, "resume": f"/ckpt/step{resume}", "why": why}
        events += [{**killed, "time": now_s + 1}, {**again, "time": now_s + 4}]
        now_s += 40
        start = {
            "event": "start",
            "attempt": 1,
            "world_size": RANKS,
            "hosts": ["gpu1"],
            "resume": f"/ckpt/step{resume}",
        }
        events.append({**start, "time": now_s - 26})
        append_records(folder, [{**start_line(time=now_s, ranks=RANKS), "stage": stage}])
        append_records(folder, run.lines(resume + 1, steps, now_s - STEP_S * resume))
        now_s += STEP_S * (steps - resume)
    events.append({"event": "end", "time": now_s + 3, "outcome": "done", "exit_code": 0, "attempts": 2})
    JobPaths(folder).events.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    _leave_facts(folder, created, now_s + 3, attempts=1 if fails_at is None else 2, stage=stage)
    return folder


class _Run:
    def __init__(self, noise: random.Random, *, lr: float, steps: int, slow_rank: int | None) -> None:
        self._noise = noise
        self._lr = lr
        self._steps = steps
        self._slow_rank = slow_rank

    def lines(self, first: int, last: int, zero_s: float) -> Iterator[dict[str, Any]]:
        noise = self._noise
        for step in range(first, last + 1):
            time_s = zero_s + STEP_S * step
            save_s = 0.9 if step % 100 == 1 and step > 1 else 0.0
            loader_s = 0.3 + 0.04 * noise.random()
            parts = (loader_s, 0.02, 0.48, 1.05, 0.21, save_s, 0.0)
            phases = {name: s * noise.uniform(0.98, 1.02) for name, s in zip(PHASES, parts, strict=True) if s}
            seconds = sum(phases.values())
            warm = min(1.0, step / 60)
            lr = self._lr * warm * 0.5 * (1 + math.cos(math.pi * step / self._steps))
            loss = 2.3 + 8.2 * math.exp(-step * self._lr / 3e-4 / 90) + noise.gauss(0, 0.05)
            skipped = step in (3, 4, 212)
            tokens = 524_288
            rate = 1 / seconds
            yield step_line(
                a_step(
                    step,
                    time=time_s,
                    seconds=seconds,
                    samples=256 * step,
                    lr=lr,
                    applied=not skipped,
                    loss=None if step == 212 else loss,
                    grad_norm=None if skipped else 0.6 + 4 * math.exp(-step / 50) + 0.1 * abs(noise.gauss(0, 1)),
                    total_steps=self._steps,
                    tokens=tokens,
                    tokens_padded=tokens,
                    tokens_per_s=tokens * rate,
                    model_tflops=3400 * rate,
                    hardware_tflops=4350 * rate,
                    mfu=3400 * rate / (8 * 989),
                    hfu=4350 * rate / (8 * 989),
                    memory_bytes=61 * GIB,
                    memory={"gpu": int((58 + noise.random()) * GIB), "cpu": int((21 + step / 400) * GIB)},
                    phases=phases,
                    waits_s=0.22,
                    traffic={"data": 26_400_000_000, "tensor": 4_100_000_000},
                )
            )
            if step % 20 == 0:
                yield from self._comparisons(step, time_s, phases)
                names = {"eval/loss": loss + 0.12, "eval/accuracy": 0.62 - 0.5 * math.exp(-step / 150)}
                yield {**log_line(names, step=step), "time": time_s}
            yield {
                "event": LOG_EVENT,
                "time": time_s,
                **log_fields_of(step, {"entropy": 3.1 * math.exp(-step / 300) + 0.04 * noise.random()}),
            }
            if step % 100 == 0:
                saved = {"path": f"/ckpt/step{step}", "tag": f"step{step}", "step": step, "seconds": 0.9}
                yield {"event": CHECKPOINT_EVENT, "time": time_s, "bytes": 92 * GIB, **saved}

    def _comparisons(self, step: int, time_s: float, phases: dict[str, float]) -> Iterator[dict[str, Any]]:
        slow = self._slow_rank
        seconds = {
            name: StepSpread(
                least=(0.96 * s,) * 20,
                median=(s,) * 20,
                most=((1.28 if slow is not None and name == "forward" else 1.04) * s,) * 20,
                most_rank=1 if slow is None else slow,
            )
            for name, s in phases.items()
        }
        memory = {"gpu": StepSpread(least=(57.0 * GIB,), median=(58.5 * GIB,), most=(61.5 * GIB,), most_rank=7)}
        spread = replace(a_spread(step, ranks=RANKS), seconds=seconds, memory=memory)
        yield {"event": SPREAD_EVENT, "time": time_s, **spread_fields(spread)}
        wait = a_wait(step, ranks=RANKS, slow_rank=0 if slow is None else slow)
        waited = {
            rank: STEP_S * (0.02 if rank == slow else 0.19) * self._noise.uniform(0.7, 1.25) for rank in range(RANKS)
        }
        ordered = sorted(waited.values())
        total = replace(
            wait.total,
            least_s=ordered[0],
            median_s=ordered[RANKS // 2],
            most_s=ordered[-1],
            least_rank=min(waited, key=waited.__getitem__),
            most_rank=max(waited, key=waited.__getitem__),
        )
        label = replace(
            wait.labels[0],
            least_s=0.01,
            median_s=0.8 * total.median_s,
            most_s=0.8 * total.most_s,
            least_rank=total.least_rank,
        )
        record = replace(wait, step_s=STEP_S, waited_s=waited, total=total, labels=(label,))
        yield {"event": WAITS_EVENT, "time": time_s, **to_fields(record)}


def log_fields_of(step: int, values: dict[str, float]) -> dict[str, Any]:
    """The fields of a record of the script's figures."""
    from dsrun.contract.step_records import LogRecord

    return log_fields(LogRecord(step=step, time=0.0, values=values, samples=256 * step))


def _leave_facts(folder: Path, created: datetime, ended_s: float, *, attempts: int, stage: int) -> None:
    ended = datetime.fromtimestamp(ended_s, timezone.utc)
    outcome = {"schema_version": 1, "job_id": folder.name, "outcome": "done", "exit_code": 0, "attempts": attempts}
    outcome |= {"ended": ended.isoformat(), "duration_s": (ended - created).total_seconds(), "run_dir": str(folder)}
    ranks = [{"rank": rank, "host": "gpu1", "pid": 4000 + rank, "status": 0, "log": ""} for rank in range(RANKS)]
    write_json(JobPaths(folder).outcome, {**outcome, "failure": None, "ranks": ranks})
    gpus = [
        {
            "index": at,
            "name": "NVIDIA H100 80GB HBM3",
            "uuid": f"GPU-{at}",
            "usable": True,
            "memory_total_bytes": 80 * GIB,
        }
        for at in range(RANKS)
    ]
    probe = {
        "host": {"name": "gpu1", "os": "Debian 12", "kernel": "6.1.0", "container": None},
        "cpu": {"model": "AMD EPYC 9654", "cores_usable": 96, "cores_present": 96},
        "memory": {"usable_bytes": 1024 * GIB, "total_bytes": 1024 * GIB},
        "gpus": gpus,
        "versions": {"dsrun": "0.2.0", "python": "3.12.4", "torch": "2.13.0", "cuda": "12.8", "nccl": "2.27.5"},
        "driver": "570.86.10",
    }
    git = {"commit": "8d0f3a5c41be", "dirty": False}
    write_json(JobPaths(folder).machine, {"schema_version": 1, "script_digest": None, "git": git, "probe": probe})
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.1}},
        "gradient_clipping": 1.0,
    }
    JobPaths(folder).config_copy.write_text(json.dumps(config, indent=2))


if __name__ == "__main__":
    jobs = Path(sys.argv[1]) / "dsrun" / "jobs"
    leave_trained_job(jobs, "20261123-0840-k3vf")
    leave_trained_job(jobs, "20261123-1105-9wqa", lr=6e-4, fails_at=None, slow_rank=None, seed=2)
    leave_trained_job(jobs, "20261124-0730-t2hd", lr=1e-4, stage=3, fails_at=None, seed=3)
