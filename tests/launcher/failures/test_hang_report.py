"""Texts of faulthandler, as Python wrote them, become one line that says who is where."""

from __future__ import annotations

import faulthandler
import tempfile
import threading
from pathlib import Path

import pytest

import dsrun
from dsrun.launcher.failures.hang_report import main_thread, verdict
from dsrun.launcher.failures.stack_frames import Frame
from dsrun.launcher.protocol import Collective, GroupProgress, RankStack

SITE = "/env/lib/python3.11/site-packages"
STD = "/usr/lib/python3.11"

#: A rank that waits for a worker of its DataLoader, as Python 3.11 with torch 2.13 wrote it.
LOADER = f"""Thread 0x00007f6ef6fff6c0 (most recent call first):
  File "{STD}/threading.py", line 327 in wait
  File "{STD}/multiprocessing/queues.py", line 231 in _feed
  File "{STD}/threading.py", line 982 in run

Current thread 0x00007f6f1569ab80 (most recent call first):
  File "{STD}/selectors.py", line 415 in select
  File "{STD}/multiprocessing/connection.py", line 947 in wait
  File "{STD}/multiprocessing/connection.py", line 257 in poll
  File "{STD}/multiprocessing/queues.py", line 113 in get
  File "{SITE}/torch/utils/data/dataloader.py", line 1291 in _try_get_data
  File "{SITE}/torch/utils/data/dataloader.py", line 1505 in _next_data
  File "{SITE}/torch/utils/data/dataloader.py", line 725 in __next__
  File "/home/me/train.py", line 11 in main
  File "/home/me/train.py", line 14 in <module>
"""
#: One in a collective of plain torch.
ALL_REDUCE = f"""Current thread 0x00007f6f1569ab80 (most recent call first):
  File "{SITE}/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "{SITE}/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/me/train.py", line 20 in step
  File "/home/me/train.py", line 30 in <module>
"""
#: One that reads its data itself: the user's own function says more than the library that called it.
DATASET = f"""Current thread 0x00007f7aa9003b80 (most recent call first):
  File "/home/me/train.py", line 8 in __getitem__
  File "{SITE}/torch/utils/data/_utils/fetch.py", line 54 in <listcomp>
  File "{SITE}/torch/utils/data/dataloader.py", line 725 in __next__
  File "/home/me/train.py", line 11 in main
"""
EVENT = f"""Current thread 0x00007f7aa9003b80 (most recent call first):
  File "{STD}/threading.py", line 327 in wait
  File "{STD}/threading.py", line 629 in wait
  File "/home/me/train.py", line 5 in <module>
"""
INIT = f"""Current thread 0x00007f7aa9003b80 (most recent call first):
  File "{SITE}/torch/distributed/rendezvous.py", line 189 in _create_c10d_store
  File "{SITE}/torch/distributed/distributed_c10d.py", line 1775 in init_process_group
  File "{SITE}/torch/distributed/c10d_logger.py", line 97 in wrapper
  File "/home/me/train.py", line 3 in <module>
"""
SYNCHRONIZE = f"""Current thread 0x00007f7aa9003b80 (most recent call first):
  File "{SITE}/torch/cuda/__init__.py", line 1040 in synchronize
  File "/home/me/train.py", line 40 in measure
"""


def stack(
    rank: int,
    text: str = "",
    *,
    state: str = "S",
    kernel: str = "",
    collective: str = "",
    phase: str = "",
    step: int | None = None,
    idle_s: float | None = 312.0,
    uses_gpu: bool = False,
    uses_nccl: bool = False,
    groups: list[GroupProgress] | None = None,
    dump_error: str = "",
) -> tuple[str, RankStack]:
    answer = RankStack(
        rank=rank,
        state=state,
        kernel=kernel,
        text=text,
        phase=phase,
        collective=collective,
        step=step,
        idle_s=idle_s,
        uses_gpu=uses_gpu,
        uses_nccl=uses_nccl,
        groups=groups,
        dump_error=dump_error,
    )
    return f"n{rank // 4 + 1}", answer


def headline(*stacks: tuple[str, RankStack], **more: object) -> str:
    return verdict(stacks, silent_s=300.0, **more)[0]  # pyright: ignore[reportArgumentType]


def test_the_odd_one_out_is_named_first_and_those_that_wait_for_it_are_counted() -> None:
    waiting = [stack(rank, ALL_REDUCE, collective="all_gather of unit 12", step=40) for rank in (0, 1, 2, 3, 4, 6, 7)]
    lines = verdict([*waiting, stack(5, LOADER, phase="script", step=40)], silent_s=300.0, stacks_folder="/jobs/j1")
    assert lines == (
        "no progress for 5m 0s: rank 5 is in DataLoader.__next__ (torch/utils/data/dataloader.py:725), "
        "7 ranks wait in all_gather of unit 12",
        "  rank 5 on n2: in main (/home/me/train.py:11), step 40, phase script, last heartbeat 5m 12s ago",
        "  ranks 0-4,6-7 on 2 hosts: in step (/home/me/train.py:20), step 40, last heartbeat 5m 12s ago",
        "all threads: /jobs/j1/rank<N>.stacks.txt",
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (LOADER, "rank 0 is in DataLoader.__next__ (torch/utils/data/dataloader.py:725)"),
        (DATASET, "rank 0 is in __getitem__ (train.py:8)"),
        (EVENT, "rank 0 is in Event.wait (threading.py:629)"),
        (SYNCHRONIZE, "rank 0 is waiting for the GPU in torch.cuda.synchronize (torch/cuda/__init__.py:1040)"),
        (ALL_REDUCE, "rank 0 waits in all_reduce (torch/distributed/distributed_c10d.py:3252)"),
        (INIT, "rank 0 waits in init_process_group (torch/distributed/distributed_c10d.py:1775)"),
    ],
)
def test_a_place_is_called_by_the_name_that_users_know(text: str, said: str) -> None:
    assert headline(stack(0, text)) == f"no progress for 5m 0s: {said}"


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (stack(0, state="T"), "rank 0 is stopped (SIGSTOP or a debugger)"),
        (
            stack(0, state="T", phase="forward", collective="all_reduce of unit 1"),
            "rank 0 is stopped (SIGSTOP or a debugger) during all_reduce of unit 1",
        ),
        (stack(0, EVENT, phase="forward"), "rank 0 is in Event.wait (threading.py:629) during forward"),
        (stack(0, EVENT, phase="script"), "rank 0 is in Event.wait (threading.py:629)"),
        (
            stack(0, DATASET, state="D", kernel="nfs_wait_bit_killable"),
            "rank 0 is in the kernel (nfs_wait_bit_killable), from __getitem__ (train.py:8)",
        ),
        (stack(0, DATASET, state="R"), "rank 0 is busy in __getitem__ (train.py:8)"),
        (stack(0, state="R"), "rank 0 is computing, without a Python stack to show"),
        (stack(0, state="S"), "rank 0 is waiting, without a Python stack to show"),
    ],
)
def test_what_a_rank_cannot_say_its_process_says(entry: tuple[str, RankStack], said: str) -> None:
    assert headline(entry) == f"no progress for 5m 0s: {said}"


def test_a_rank_that_has_ended_already_is_named_before_those_that_wait_for_it() -> None:
    waiting = [stack(rank, ALL_REDUCE) for rank in (0, 1)]
    place = "all_reduce (torch/distributed/distributed_c10d.py:3252)"
    assert (
        headline(*waiting, ended=[3]) == f"no progress for 5m 0s: rank 3 has ended already, ranks 0, 1 wait in {place}"
    )


def test_a_rank_that_has_ended_since_it_was_asked_is_named_once() -> None:
    first, *details = verdict([stack(0, ALL_REDUCE), stack(1, LOADER)], silent_s=300.0, ended=[1])
    assert first.startswith("no progress for 5m 0s: rank 1 has ended already, rank 0 waits in all_reduce ")
    assert not [line for line in details if "rank 1" in line]


def test_ranks_that_still_beat_are_not_among_those_that_hang() -> None:
    well = [stack(rank, EVENT, step=127, idle_s=0.1) for rank in (0, 1)]
    assert headline(stack(2, state="T", step=20), *well) == (
        "no progress for 5m 0s: rank 2 is stopped (SIGSTOP or a debugger), ranks 0, 1 go on"
    )
    # One that came late to a collective beat when it entered, and waits there all the same.
    late = stack(0, ALL_REDUCE, collective="all_reduce of unit 1", idle_s=100.0)
    assert headline(stack(2, EVENT), late).endswith(", rank 0 waits in all_reduce of unit 1")


def test_several_ranks_without_a_stack_are_told_in_the_plural() -> None:
    assert headline(stack(0), stack(1)) == (
        "no progress for 5m 0s: ranks 0, 1 are waiting, without a Python stack to show"
    )


def test_one_that_ends_while_it_is_asked_is_no_riddle() -> None:
    assert headline(stack(0, EVENT), stack(1, state="")).endswith(": rank 0 is in Event.wait (threading.py:629)")


def test_nobody_left_is_said_as_it_is() -> None:
    assert headline(stack(0, state="")).endswith(": all ranks are gone, and no host says how")


def test_a_host_that_does_not_answer_is_named() -> None:
    assert headline(stack(0, EVENT), unanswered=["n9"]).endswith(", host n9 does not answer")


def test_many_places_are_told_up_to_a_number() -> None:
    texts = [EVENT.replace("line 629", f"line {number}") for number in range(20)]
    lines = verdict([stack(rank, text) for rank, text in enumerate(texts)], silent_s=300.0)
    assert lines[0].endswith("others at 12 more places")
    assert len(lines) == 9


def test_the_main_thread_is_found_by_its_signal_or_by_its_place() -> None:
    assert main_thread(LOADER)[-1] == Frame("/home/me/train.py", 14, "<module>")
    # Python 3.14 names threads; and where another thread took the signal, the main one is the last.
    others = LOADER.replace("Current thread", "Thread").replace(" (most", " [python] (most")
    assert main_thread(others)[-1] == Frame("/home/me/train.py", 14, "<module>")
    assert main_thread("Fatal Python error\n") == ()


def test_this_pythons_own_faulthandler_is_understood() -> None:
    release = threading.Event()
    helper = threading.Thread(target=release.wait)
    helper.start()
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        frames = main_thread(file.read())
    release.set()
    helper.join()
    assert frames[0].function == "test_this_pythons_own_faulthandler_is_understood"
    assert frames[0].file == __file__
    assert frames[0].is_users


PACKAGE = Path(dsrun.__file__).parent


@pytest.mark.parametrize(
    ("file", "place"),
    [
        ("/home/me/dsrun/train.py", "train.py:3"),
        ("/home/me/src/dsrun/data.py", "data.py:3"),
        ("/home/me/dsrun/tests/launcher/test_verdict.py", "test_verdict.py:3"),
        (f"{PACKAGE.parents[1]}/tests/train.py", "train.py:3"),
        (f"{PACKAGE.parents[1]}/launcher/failures/hang_report.py", "dsrun/launcher/failures/hang_report.py:3"),
        (f"{PACKAGE}/runtime/optim/norm.py", "dsrun/runtime/optim/norm.py:3"),
        (f"{PACKAGE}/data.py", "dsrun/data.py:3"),
        # Another host's, which has its dsrun in another folder.
        ("/opt/dsrun/src/dsrun/runtime/optim/norm.py", "dsrun/runtime/optim/norm.py:3"),
        (f"/opt/dsrun/{'x/' * 3000}norm.py", "norm.py:3"),
        (f"{SITE}/dsrun/runtime/optim/norm.py", "dsrun/runtime/optim/norm.py:3"),
        ("/home/me/dsrun/.venv/lib/python3.11/site-packages/torch/nn/linear.py", "torch/nn/linear.py:3"),
    ],
)
def test_a_file_is_dsruns_own_by_its_folder_not_by_a_folder_that_is_called_dsrun(file: str, place: str) -> None:
    frame = Frame(file, 3, "f")
    assert (frame.place, frame.is_users) == (place, "/" not in place)


def test_an_environment_that_is_called_torch_makes_nothing_torchs_own() -> None:
    waits = """Current thread 0x00007f7aa9003b80 (most recent call first):
  File "/envs/torch/lib/python3.11/json/decoder.py", line 353 in raw_decode
  File "/home/me/train.py", line 31 in step
"""
    assert headline(stack(0, waits, state="R", uses_nccl=True)) == headline(stack(0, waits, state="R"))


#: One that reads from its GPU (`loss.item()`), in a call of C.
ITEM = """Current thread 0x00007f7aa9003b80 (most recent call first):
  File "/home/me/train.py", line 31 in step
  File "/home/me/train.py", line 40 in <module>
"""
#: The same in dsrun's own step.
NORM = f"""Current thread 0x00007f7aa9003b80 (most recent call first):
  File "{SITE}/dsrun/runtime/optim/norm.py", line 90 in read
  File "/home/me/train.py", line 31 in step
"""


def group(waits: int | None, done: int, name: str = "all_reduce") -> list[GroupProgress]:
    def call(number: int, name: str = name) -> Collective:
        return Collective(number=number, name=name, data="", state="scheduled", line="")

    return [
        GroupProgress(
            name="0",
            label="default_pg",
            members="0-3",
            queued=call(done if waits is None else waits),
            completed=call(done, "all_gather"),
            waits=None if waits is None else call(waits),
        )
    ]


def test_a_rank_that_reads_from_its_gpu_waits_in_the_collective_that_its_recorder_names() -> None:
    stacks = [stack(rank, ITEM, state="R", uses_gpu=True, groups=group(57, 56)) for rank in range(3)]
    stacks.append(stack(3, EVENT, groups=group(None, 56, "all_gather")))
    lines = verdict(stacks, silent_s=300.0, dumps=["/run/nccl_trace_rank_<N>", "n2:/tmp/x_<N>"])
    assert lines[0] == (
        "no progress for 5m 0s: rank 3 is in Event.wait (threading.py:629), "
        "ranks 0, 1, 2 wait in all_reduce 57 of default_pg"
    )
    assert lines[-2:] == (
        "  default_pg: ranks 0, 1, 2 wait in all_reduce 57, rank 3 has not called it (last all_gather 56)",
        "all collectives: /run/nccl_trace_rank_<N>, n2:/tmp/x_<N>",
    )


def test_the_runtimes_own_name_for_what_a_rank_waits_for_counts_more_than_the_recorders() -> None:
    named = "results of gradient norm, last begun reduce_scatter of unit 3"
    assert headline(stack(0, NORM, state="R", collective=named, groups=group(57, 56))).endswith(
        f"rank 0 waits in {named}"
    )


def test_a_mismatch_stands_in_the_first_line_for_all_ranks_seem_to_wait() -> None:
    ranks = [stack(rank, ITEM, state="R", groups=group(57, 56)) for rank in range(3)]
    odd = stack(3, ITEM, state="R", groups=group(57, 56, "broadcast"))
    assert headline(*ranks, odd).startswith(
        "no progress for 5m 0s: default_pg: ranks 0, 1, 2 wait in all_reduce 57, rank 3 is in broadcast 57, "
    )


def test_a_rank_that_waits_for_python_does_not_wait_for_its_gpu_whatever_it_has_queued() -> None:
    assert headline(stack(0, EVENT, groups=group(57, 56))).endswith("rank 0 is in Event.wait (threading.py:629)")


@pytest.mark.parametrize("text", [ITEM, NORM])
def test_without_a_dump_one_that_may_read_from_its_gpu_is_not_said_to_compute(text: str) -> None:
    told = headline(stack(0, text, state="R", uses_gpu=True))
    assert "rank 0 is busy, or waits for its GPU, in step (train.py:31)" in told
    assert "rank 0 is busy in step (train.py:31)" in headline(stack(0, text, state="R"))


#: One whose queue of kernels is full, in an operation of the model.
LINEAR = f"""Current thread 0x00007f7aa9003b80 (most recent call first):
  File "{SITE}/torch/nn/modules/linear.py", line 134 in forward
  File "{SITE}/torch/nn/modules/module.py", line 1786 in _call_impl
  File "/home/me/model.py", line 12 in forward
  File "/home/me/train.py", line 30 in step
"""
#: One whose backward runs on a thread of autograd's.
BACKWARD = f"""Current thread 0x00007f7aa9003b80 (most recent call first):
  File "{SITE}/torch/autograd/graph.py", line 865 in _engine_run_backward
  File "{SITE}/torch/autograd/__init__.py", line 354 in backward
  File "{SITE}/torch/_tensor.py", line 630 in backward
  File "/home/me/train.py", line 32 in step
"""


@pytest.mark.parametrize(
    ("text", "state", "said"),
    [
        (ITEM, "R", "rank 0 waits for the GPU, or computes, in step (train.py:31)"),
        (LINEAR, "R", "rank 0 waits for the GPU, or computes, in forward (model.py:12)"),
        (BACKWARD, "S", "rank 0 waits for the GPU, or computes, in backward (torch/autograd/graph.py:865)"),
        (SYNCHRONIZE, "R", "rank 0 waits for the GPU in torch.cuda.synchronize (torch/cuda/__init__.py:1040)"),
        (SYNCHRONIZE, "S", "rank 0 waits for the GPU in torch.cuda.synchronize (torch/cuda/__init__.py:1040)"),
        # Asleep in a call of C: a file, a lock, `time.sleep`.
        (ITEM, "S", "rank 0 is in step (train.py:31)"),
        (EVENT, "S", "rank 0 is in Event.wait (threading.py:629)"),
        (LOADER, "R", "rank 0 is busy in DataLoader.__next__ (torch/utils/data/dataloader.py:725)"),
    ],
)
def test_a_rank_of_nccl_that_spins_is_said_to_wait_for_its_gpu(text: str, state: str, said: str) -> None:
    assert headline(stack(0, text, state=state, uses_gpu=True, uses_nccl=True)) == f"no progress for 5m 0s: {said}"


def test_of_the_victims_of_a_hang_under_nccl_none_is_named_before_who_is_elsewhere() -> None:
    # Each at a line of its own, so that nobody is many.
    victims = [
        stack(rank, text, state="R", uses_gpu=True, uses_nccl=True, idle_s=None)
        for rank, text in enumerate((ITEM, LINEAR, SYNCHRONIZE))
    ]
    culprits = [stack(rank, LOADER, uses_gpu=True, uses_nccl=True, idle_s=None) for rank in (3, 4)]
    lines = verdict([*victims, *culprits], silent_s=300.0)
    assert lines[0] == (
        "no progress for 5m 0s: ranks 3, 4 are in DataLoader.__next__ (torch/utils/data/dataloader.py:725), "
        "rank 0 waits for the GPU, or computes, in step (train.py:31), "
        "rank 1 waits for the GPU, or computes, in forward (model.py:12), "
        "rank 2 waits for the GPU in torch.cuda.synchronize (torch/cuda/__init__.py:1040)"
    )
    assert "busy" not in "".join(lines)


def test_victims_at_one_place_are_told_together() -> None:
    victims = [stack(rank, ITEM, state="R", uses_gpu=True, uses_nccl=True) for rank in range(4)]
    assert headline(*victims).endswith(": 4 ranks wait for the GPU, or compute, in step (train.py:31)")


def test_why_there_is_no_dump_is_told_once_for_all_ranks_with_that_reason() -> None:
    stacks = [stack(rank, ITEM, dump_error="was not written in time") for rank in range(5)]
    stacks.append(stack(5, ITEM, dump_error="is damaged: EOFError: "))
    lines = verdict(stacks, silent_s=300.0, dumps=["/run/x_<N>"])
    assert lines[-2:] == (
        "  the flight recorder's dump of ranks 0-4 was not written in time",
        "  the flight recorder's dump of rank 5 is damaged: EOFError: ",
    )


def test_where_torch_ends_a_rank_the_dumps_that_it_leaves_are_named() -> None:
    lines = verdict([stack(1, EVENT)], silent_s=600.0, headline="torch's watchdog ends rank 0", dumps=["/run/x_<N>"])
    assert lines[0] == "torch's watchdog ends rank 0: rank 1 is in Event.wait (threading.py:629)"
    assert lines[-1] == "all collectives: /run/x_<N>"


#: Two data parallel groups of two ranks that share each layer.
GRID = {rank: f"data {rank // 2}, tensor {rank % 2}" for rank in range(4)}


def test_ranks_are_named_with_their_coordinates_and_groups_with_what_theirs_have_in_common() -> None:
    lines = verdict(
        [
            stack(0, collective="reduce_scatter of unit 3"),
            stack(1, collective="reduce_scatter of unit 3"),
            stack(2, collective="all_reduce sum of outputs"),
            stack(3, EVENT),
        ],
        silent_s=300.0,
        coordinates=GRID,
    )
    assert lines == (
        "no progress for 5m 0s: rank 3 (data 1, tensor 1) is in Event.wait (threading.py:629), "
        "rank 2 (data 1, tensor 0) waits in all_reduce sum of outputs, "
        "ranks 0, 1 (data 0) wait in reduce_scatter of unit 3",
        "  rank 3 (data 1, tensor 1) on n1: in <module> (/home/me/train.py:5), last heartbeat 5m 12s ago",
        "  rank 2 (data 1, tensor 0) on n1: last heartbeat 5m 12s ago",
        "  ranks 0-1 (data 0) on n1: last heartbeat 5m 12s ago",
    )


def test_ranks_that_have_no_axis_in_common_or_have_not_said_theirs_are_named_by_their_numbers() -> None:
    waiting = [stack(rank, collective="all_reduce") for rank in (0, 3)]
    assert headline(*waiting, coordinates=GRID).endswith(": ranks 0, 3 wait in all_reduce")
    assert headline(*waiting, coordinates={0: "data 0, tensor 0"}).endswith(": ranks 0, 3 wait in all_reduce")
    assert headline(*waiting, coordinates={0: "", 3: ""}).endswith(": ranks 0, 3 wait in all_reduce")


def test_a_rank_that_has_ended_and_one_that_waits_for_its_gpu_are_named_with_their_coordinates() -> None:
    waiting = stack(1, SYNCHRONIZE, uses_gpu=True, uses_nccl=True)
    said = headline(waiting, ended=[2], coordinates=GRID)
    assert "rank 2 (data 1, tensor 0) has ended already" in said
    assert "rank 1 (data 0, tensor 1) waits for the GPU in " in said


def test_ranks_that_wait_for_a_message_each_from_its_own_neighbour_are_one_group() -> None:
    grid = {rank: f"pipe {rank // 2}, tensor {rank % 2}" for rank in range(4)}
    receive = "receive of activations of micro batch 3 for chunk 1"
    waiting = [stack(rank, collective=f"{receive} from rank {rank - 2}") for rank in (2, 3)]
    stuck = [stack(rank, EVENT, phase=phase) for rank, phase in ((0, "forward"), (1, "backward"))]
    # Both are where they are at once, but in different phases.
    assert headline(*stuck, *waiting, coordinates=grid).endswith(
        ": ranks 0, 1 (pipe 0) are in Event.wait (threading.py:629), "
        f"ranks 2, 3 (pipe 1) wait in {receive} from ranks 0, 1 (pipe 0)"
    )
    assert headline(*stuck, waiting[0]).endswith(f", rank 2 waits in {receive} from rank 0")


def test_that_all_ranks_wait_is_said_where_nobody_can_be_named() -> None:
    waiting = [stack(0, collective="all_reduce of tag"), stack(1, collective="all_reduce of norm")]
    said = "rank 0 waits in all_reduce of tag, rank 1 waits in all_reduce of norm"
    assert headline(*waiting).endswith(f": all ranks wait, {said}")
    # Each of these may be whom they wait for.
    assert headline(*waiting, stack(2, idle_s=0.1, text=EVENT)).endswith(f": {said}, rank 2 goes on")
    assert headline(*waiting, unanswered=["n2"]).endswith(f": {said}, host n2 does not answer")
    assert headline(*waiting, ended=[2]).endswith(f": rank 2 has ended already, {said}")
    assert headline(waiting[0]).endswith(": rank 0 waits in all_reduce of tag")
