"""Draws docs/images/watch.svg: the page of `dsrun watch` about a made-up run of eight ranks that has every row.

No figure in it was measured. A real job is drawn as well: `scripts/watch_picture.py --job FOLDER --output watch.svg`.
"""

from __future__ import annotations

import argparse
import io
import math
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from rich.console import Console
from rich.text import Text

from dsrun.contract.environment import CHECKPOINT_EVENT
from dsrun.contract.step_records import SPREAD_EVENT, StepSpread, spread_fields
from dsrun.contract.wait_records import WAITS_EVENT, to_fields
from dsrun.launcher.dashboard.page import page_rows
from dsrun.launcher.dashboard.run_view import RunView, RunWatcher
from dsrun.launcher.jobs.listing import read_job
from dsrun.launcher.machine.gpus.usage import GpuNow
from support.recorded_runs import BEGIN_S, a_spread, a_step, a_wait, append_records, log_line, start_line, step_line
from support.watched_jobs import leave_files, leave_ranks, running_job

OUT = Path(__file__).parents[1] / "docs" / "images" / "watch.svg"
COLUMNS, LINES = 100, 28
_STEPS, _TOTAL, _STEP_S, _RANKS = 3_120, 8_000, 1.05, 8
_HOSTS = ("node1",) * 4 + ("node2",) * 4


def made_up_records() -> list[dict[str, Any]]:
    """Returns the records of a run that was started again once, with the noise that real ones have."""
    noise = random.Random(0)
    records = [start_line(ranks=_RANKS)]
    for step in range(1, _STEPS + 1):
        seconds = _STEP_S * noise.gauss(1, 0.01)
        loss = 2.55 + 7.5 * math.exp(-step / 160) + 1.2 * math.exp(-step / 1500) + noise.gauss(0, 0.03)
        scale = seconds / 1.05
        phases = {"data": 0.02, "script": 0.01, "forward": 0.29, "backward": 0.61, "step": 0.12}
        fields = {
            "time": BEGIN_S + 40 + _STEP_S * step,
            "seconds": seconds,
            "total_steps": _TOTAL,
            "loss": loss,
            "lr": 3e-4 * min(1, step / 200),
            "grad_norm": 0.4 + 2 * math.exp(-step / 100) + noise.random() / 10,
            "applied": step not in (611, 1402),
            "tokens": 262_144,
            "tokens_per_s": 262_144 / seconds,
            "model_tflops": 3_310 / scale,
            "hardware_tflops": 4_030 / scale,
            "mfu": 0.418 / scale,
            "hfu": 0.509 / scale,
            "memory": {"gpu": 61 << 30, "cpu": 21 << 30},
            "phases": {name: value * scale for name, value in phases.items()},
            "waits_s": 0.08 * scale,
        }
        records.append(step_line(a_step(step, **fields)))
    last = BEGIN_S + 40 + _STEP_S * _STEPS
    memory = {"gpu": StepSpread(least=(60e9,), median=(64e9,), most=(70.4e9,), most_rank=3)}
    spread = replace(a_spread(_STEPS, ranks=_RANKS), memory=memory)
    records.append({"event": SPREAD_EVENT, "time": last, **spread_fields(spread)})
    wait = to_fields(a_wait(_STEPS, ranks=_RANKS, slow_rank=5)) | {"step_s": 1.05}
    wait["waited_s"] = {str(rank): 0.02 if rank == 5 else 0.21 + rank / 500 for rank in range(_RANKS)}
    records.append({"event": WAITS_EVENT, "time": last, **wait})
    saved = {"path": "/ckpt/step3000", "tag": "step3000", "step": 3000, "seconds": 3.4, "bytes": 98 << 30}
    records.append({"event": CHECKPOINT_EVENT, "time": last - 120 * _STEP_S, **saved})
    records.append(log_line({"val/loss": 2.712, "reward": 0.418}, step=3000))
    return records


def made_up_view(folder: Path) -> RunView:
    """Writes the made-up run into a job's folder, and returns what a page shows of it."""
    events = [("restart", {"attempt": 1, "wait_s": 5.0, "why": "rank 6 on node2 (pid 4711) was killed by SIGKILL"})]
    leave_files(folder, events=events, gpu_bytes=80 << 30, host_bytes=512 << 30)
    append_records(folder, made_up_records())
    leave_ranks(folder, _HOSTS)
    view = view_of(folder, _HOSTS)
    now_s = BEGIN_S + 40 + _STEP_S * _STEPS + 3
    gpus = [
        GpuNow(index=index, percent=97 - index, memory_used_bytes=66 << 30, memory_total_bytes=80 << 30)
        for index in range(4)
    ]
    event = replace(view.events[0], time_s=now_s - 2_900)
    return replace(view, now_s=now_s, gpus=gpus, events=[event])


def made_up_rows() -> list[Text]:
    """Returns the rows of the picture of the made-up run."""
    started = datetime.fromtimestamp(BEGIN_S, timezone.utc)
    with (
        tempfile.TemporaryDirectory() as folder,
        running_job(Path(folder), ranks=_RANKS, created=started, started=started) as job,
    ):
        return rows_of(made_up_view(job))


def view_of(folder: Path, hosts: Sequence[str] = ()) -> RunView:
    """Returns what a page shows of a job."""
    job = read_job(folder)
    if job is None:
        raise SystemExit(f"error: {folder} holds no record of a job")
    watcher = RunWatcher(job, hosts)
    watcher.look(at_once=True)
    return watcher.view()


def rows_of(view: RunView) -> list[Text]:
    """Returns the rows of the picture."""
    return page_rows(view, columns=COLUMNS, lines=LINES, keys="q leaves, the job goes on   l log")


def picture(rows: Sequence[Text]) -> str:
    """Returns rows of a page as SVG."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(*rows, sep="\n")
    return console.export_svg(title="dsrun watch")


def main() -> None:
    """Draws the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", type=Path, help="folder of a job to draw in place of the made-up one")
    parser.add_argument("--output", type=Path, default=OUT)
    args = parser.parse_args()
    if args.job is not None:
        rows = rows_of(view_of(args.job))
    else:
        rows = made_up_rows()
    # rich ends rows with blanks.
    args.output.write_text("\n".join(line.rstrip() for line in picture(rows).splitlines()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
