"""A rank's dump of torch's flight recorder becomes a few facts; whatever else lies there is told and never built."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsrun.launcher.agent.start.flight_recorder import RecorderFiles
from dsrun.launcher.agent.watch.nccl_dumps import MOST_BYTES, MOST_STEPS, DumpError, read_dump
from dsrun.launcher.protocol import Collective, Exit, GroupProgress, encode
from support.cli import clean_environment
from support.dumps import dump, entry


def read(value: Any) -> list[GroupProgress]:
    return read_dump(pickle.dumps(value, protocol=2))


def numbers(progress: GroupProgress) -> list[int | None]:
    calls = (progress.completed, progress.waits, progress.queued)
    return [None if call is None else call.number for call in calls]


def test_a_group_says_what_is_done_what_is_waited_for_and_what_was_called_last() -> None:
    waits = entry(57, "nccl:_all_gather_base", state="scheduled", output_sizes=[[32]])
    (group,) = read(dump([entry(55), entry(56), waits, entry(58, state="scheduled")]))
    assert (group.name, group.label, group.members) == ("0", "default_pg", "0-3")
    assert numbers(group) == [56, 57, 58]
    assert group.waits == Collective(
        number=57, name="all_gather", data="[8] Float -> [32] Float", state="scheduled", line="train.py:30"
    )


def test_members_of_a_coalesced_call_which_torch_never_marks_are_done_with_what_comes_after_them() -> None:
    members = [entry(7, "nccl:broadcast", state="scheduled"), entry(7, "nccl:coalesced")]
    (group,) = read(dump([*members, entry(8)]))
    assert numbers(group) == [8, None, 8]
    (group,) = read(dump([entry(6), members[0], entry(7, "nccl:coalesced", state="scheduled")]))
    assert numbers(group) == [6, 7, 7]
    assert group.waits is not None
    assert group.waits.name == "coalesced"


def test_a_collective_that_timed_out_is_not_done_though_the_watchdog_took_it_out() -> None:
    (group,) = read(dump([entry(1), entry(2, state="scheduled", retired=True)]))
    assert numbers(group) == [1, 2, 2]


def test_the_group_that_a_rank_has_waited_in_longest_comes_first() -> None:
    reports = read(
        dump(
            [
                entry(3, group=("5", "undefined")),
                entry(9, group=("0", "default_pg"), state="scheduled", created_ns=200),
                entry(2, group=("4", "tensor"), state="scheduled", created_ns=100),
            ]
        )
    )
    assert [(group.name, group.label) for group in reports] == [("4", "tensor"), ("0", "default_pg"), ("5", "")]


def test_a_send_that_is_not_done_is_told_beside_the_collectives() -> None:
    (group,) = read(dump([entry(4), entry(12, "nccl:send 0->1", is_p2p=True, state="scheduled")]))
    assert group.transfer is not None
    assert (group.transfer.name, group.transfer.number, group.waits) == ("send 0->1", 12, None)
    (group,) = read(dump([entry(12, "nccl:send 0->1", is_p2p=True, state="scheduled"), entry(13, is_p2p=True)]))
    assert group.transfer is None


def test_sizes_that_may_differ_between_ranks_are_not_compared() -> None:
    (group,) = read(dump([entry(1, "nccl:all_to_all", state="scheduled")]))
    assert group.waits is not None
    assert group.waits.data == ""


def test_a_dump_in_json_says_the_same() -> None:
    value = dump([entry(56), entry(57, state="scheduled")])
    assert read_dump(json.dumps(value).encode()) == read(value)


def endless() -> list[Any]:
    """Returns sixty small lists whose text would be of exabytes."""
    value: list[Any] = ["text"]
    for _ in range(60):
        value = [value, value]
    return value


class Attack:
    def __reduce__(self) -> Any:
        return (print, ("built",))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "neither a pickle nor JSON"),
        (b"\x7fELF", "neither a pickle nor JSON"),
        (b"{ not json", "damaged"),
        (b"[" * 100_000, "neither a pickle nor JSON"),
        (b'{"a":' * 100_000, "damaged"),
        (pickle.dumps(dump([entry(1)]))[:-20], "damaged"),
        (pickle.dumps({"version": "2.10", "entries": [Attack()]}), "more than plain values"),
        (pickle.dumps({"version": "2.10", "entries": {1}}, protocol=4), "more than plain values"),
        (b"\x80\x02Nr\xff\xff\xff\xff.", "damaged: it counts 4294967295 values"),
        (pickle.dumps([1]), "no dictionary"),
        (pickle.dumps({"entries": []}), "names no version"),
        (pickle.dumps({"version": 1 << 100_000, "entries": []}), "names no version"),
        (b"\x80\x02}X\x07\x00\x00\x00version" + b"]" * 100_000 + b"a" * 99_999 + b"s.", "names no version"),
        (pickle.dumps({"version": "3.0", "entries": []}), "version '3.0'"),
        (pickle.dumps(dump([entry(1), {"state": "completed"}])), "an entry that is none: KeyError"),
        (pickle.dumps(dump([entry(1, process_group="0")])), "an entry that is none: TypeError"),
        (pickle.dumps(dump([entry(1, op_id=1) | {"collective_seq_id": float("inf")}])), "an entry that is none"),
        (pickle.dumps(dump([], pg_config=[])), "an entry that is none"),
        (pickle.dumps(dump([entry(1 << 100_000)])), "an entry that is none: ValueError"),
        (pickle.dumps(dump([entry(1) | {"state": endless()}])), "an entry that is none: TypeError"),
        (pickle.dumps(dump([entry(1, input_dtypes=[endless()])])), "an entry that is none: TypeError"),
        (pickle.dumps(dump([], pg_config={"0": {"ranks": "[" * 100_000}})), "an entry that is none: RecursionError"),
        (b"\x80\x02](" + b"N" * (MOST_STEPS + 1) + b"e.", "more than 3000000 values"),
        (b"\x80" * (MOST_BYTES + 1), "more than 32 MiB"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_dump_is_told_in_words(data: bytes, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DumpError, match=reason):
        read_dump(data)
    assert capsys.readouterr().out == ""


def test_what_is_told_of_a_dump_is_small_whatever_it_holds() -> None:
    size = list(range(100_000))
    ranks = {"0": {"ranks": str(list(range(0, 200_000, 2)))}}
    (group,) = read(dump([entry(1, state="scheduled", input_sizes=[size] * 100)], pg_config=ranks))
    assert group.members == "", "as if torch had not said them"
    assert len(encode(Exit(rank=0, status=1, time_s=0.0, groups=[group]))) < 5_000


#: A rank that calls collectives over Gloo, with one that its peer never joins, and leaves its own dumps.
GLOO = """
import os, pickle, sys
import torch
import torch.distributed as dist
import torch._C._distributed_c10d as c10d
rank, folder = int(sys.argv[1]), sys.argv[2]
store = dist.FileStore(f"{folder}/store", 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
pair = dist.new_group([0, 1], group_desc="pair")
for _ in range(3):
    dist.all_reduce(torch.ones(4))
dist.broadcast(torch.ones(2), 0, group=pair)
while not all(entry["retired"] for entry in pickle.loads(c10d._dump_fr_trace())["entries"]):
    pass  # Gloo's thread says so a moment later.
if rank == 0:
    pending = dist.all_reduce(torch.ones(7), group=pair, async_op=True)
for kind, text in (("pickle", c10d._dump_fr_trace()), ("json", c10d._dump_fr_trace_json())):
    with open(f"{folder}/{kind}_{rank}", "wb") as file:
        file.write(text)
store.set(f"done {rank}", "")
store.wait(["done 0", "done 1"])
os._exit(0)
"""


@pytest.fixture(scope="module")
def gloo_dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the dumps of two ranks, as this torch writes them."""
    folder = tmp_path_factory.mktemp("gloo")
    (folder / "rank.py").write_text(GLOO)
    env = clean_environment(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    ranks = [
        subprocess.Popen([sys.executable, str(folder / "rank.py"), str(rank), str(folder)], env=env)
        for rank in range(2)
    ]
    assert [rank.wait(timeout=60) for rank in ranks] == [0, 0]
    return folder


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["pickle", "json"])
def test_a_dump_that_torch_itself_wrote_is_read(gloo_dumps: Path, kind: str) -> None:
    ahead, behind = (
        {group.label: group for group in read_dump((gloo_dumps / f"{kind}_{rank}").read_bytes())} for rank in range(2)
    )
    assert numbers(ahead["default_pg"]) == numbers(behind["default_pg"]) == [3, None, 3]
    assert (numbers(ahead["pair"]), numbers(behind["pair"])) == ([1, 2, 2], [1, None, 1])
    waits = ahead["pair"].waits
    assert waits is not None
    # JSON has no stacks.
    assert (waits.name, waits.data) == ("all_reduce", "[7] Float")
    assert waits.line == ("" if kind == "json" else "rank.py:16")


@pytest.mark.timeout(120)
def test_torchs_own_reader_finds_the_same_collectives(gloo_dumps: Path) -> None:
    from torch.distributed.flight_recorder.components import types

    value: Any = pickle.loads((gloo_dumps / "pickle_0").read_bytes())
    ops = [types.Op(one, {one["process_group"][0]: {0, 1}}, one["process_group"][0]) for one in value["entries"]]
    last = ops[-1]
    (pair,) = [group for group in read_dump((gloo_dumps / "pickle_0").read_bytes()) if group.label == "pair"]
    assert pair.waits is not None
    assert (last.type, last.collective_seq_id) == (pair.waits.name, pair.waits.number)
    assert last.input_sizes is not None
    assert f"{last.input_sizes[0]} {last.input_dtypes[0]}" == pair.waits.data


#: A rank alone, whose GPU is busy while NCCL's all_reduce waits behind it.
NCCL = """
import os
import torch
import torch.distributed as dist
torch.cuda.set_device(0)
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
done = torch.ones(4, device="cuda")
dist.all_reduce(done)
torch.cuda.synchronize()
late = torch.ones(8, device="cuda")
torch.cuda._sleep(int(8e9))
dist.all_reduce(late)
print("queued", flush=True)
input()
os._exit(0)
"""


@pytest.mark.cuda
@pytest.mark.gpu_seconds(8)
@pytest.mark.timeout(60)
def test_a_rank_of_nccl_writes_what_its_gpu_has_not_done_when_it_is_asked(tmp_path: Path) -> None:
    env = clean_environment(
        TORCH_FR_BUFFER_SIZE="2000",
        TORCH_NCCL_DUMP_ON_TIMEOUT="1",
        TORCH_FR_DUMP_TEMP_FILE=f"{tmp_path}/nccl_trace_rank_",
        TORCH_NCCL_DEBUG_INFO_PIPE_FILE=f"{tmp_path}/nccl_pipe_rank_",
    )
    files = RecorderFiles(tmp_path / "nccl_trace_rank_0", tmp_path / "nccl_pipe_rank_0.pipe")
    script = tmp_path / "rank.py"
    script.write_text(NCCL)
    with subprocess.Popen(
        [sys.executable, str(script)], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as rank:
        try:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "queued\n"
            assert _wait_until(files.ask, timeout_s=10), "the rank made no pipe"
            assert _wait_until(lambda: files.stamp()[1] > 0, timeout_s=10), "the rank wrote no dump"
            assert _wait_until(lambda: _is_whole(files), timeout_s=10)
        finally:
            rank.kill()
    (group,) = [group for group in read_dump(files.read(most_bytes=MOST_BYTES)) if group.label == "default_pg"]
    assert group.waits is not None
    assert (group.waits.name, group.waits.data) == ("all_reduce", "[8] Float")
    assert group.waits.line == "rank.py:12"
    assert group.completed is not None
    assert group.completed.number < group.waits.number


def _is_whole(files: RecorderFiles) -> bool:
    return files.read(most_bytes=MOST_BYTES)[-1:] == b"."


def _wait_until(condition: Callable[[], bool], *, timeout_s: float) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        threading.Event().wait(0.02)
    return True
