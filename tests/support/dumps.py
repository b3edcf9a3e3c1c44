"""Dumps of torch's flight recorder as torch 2.11 to 2.14 write them for NCCL, and what lets Gloo's ranks write some."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

FRAMES = [
    {"name": "all_reduce", "filename": "/env/lib/python3.12/site-packages/torch/distributed/c10d.py", "line": 3},
    {"name": "step", "filename": "/home/me/train.py", "line": 30},
    {"name": "<module>", "filename": "/home/me/train.py", "line": 80},
]


def entry(
    number: int,
    call: str = "nccl:all_reduce",
    *,
    state: str = "completed",
    group: tuple[str, str] = ("0", "default_pg"),
    size: int = 8,
    is_p2p: bool = False,
    created_ns: int | None = None,
    **more: Any,
) -> dict[str, Any]:
    """One entry as torch 2.11 to 2.14 write it for NCCL."""
    return {
        "frames": FRAMES,
        "record_id": number,
        "pg_id": 0,
        "process_group": group,
        "collective_seq_id": 0 if is_p2p else number,
        "p2p_seq_id": number if is_p2p else 0,
        "op_id": number,
        "profiling_name": call,
        "time_created_ns": number if created_ns is None else created_ns,
        "input_sizes": [[size]],
        "input_dtypes": ["Float"],
        "output_sizes": [[size]],
        "output_dtypes": ["Float"],
        "state": state,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": state == "completed",
        "timeout_ms": 600000,
        "is_p2p": is_p2p,
        **more,
    }


def dump(entries: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}
    return {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": list(entries), **more}


#: Module of a rank: what NCCL's monitor does with the rank's pipe, which Gloo has not, though it records collectives.
#: The first dump of a collective takes seconds of a core, for torch looks up symbols: it is made beside the first
#: steps, so that one that is asked for comes at once. `has_dumped` is set then.
MONITOR = """
import os, pickle, threading
from torch._C._distributed_c10d import _dump_fr_trace
opened, has_dumped = threading.Event(), threading.Event()
def dump_when_asked():
    pipe = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + os.environ["RANK"] + ".pipe"
    os.mkfifo(pipe)
    descriptor = os.open(pipe, os.O_RDWR)
    opened.set()
    while not pickle.loads(_dump_fr_trace())["entries"]:
        has_dumped.wait(0.05)
    has_dumped.set()
    while os.read(descriptor, 128):
        with open(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + os.environ["RANK"], "wb") as file:
            file.write(_dump_fr_trace())
threading.Thread(target=dump_when_asked, daemon=True).start()
opened.wait()
"""
