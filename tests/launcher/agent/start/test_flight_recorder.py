"""Ranks get a recorder whose files are the job's, and are asked for a dump without ever waiting for one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsrun.launcher.agent.start.flight_recorder import (
    RecorderFiles,
    dump_places,
    dump_prefix,
    pipe_environment,
    recorder_environment,
    recorder_files,
    without_outer,
)
from dsrun.launcher.protocol import RankStack

PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"


def test_ranks_record_and_dump_into_the_jobs_folder() -> None:
    env = recorder_environment({}, run_dir="/run/j1", attempt=0)
    assert env == {
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": "/run/j1/nccl_trace_rank_",
    }
    assert recorder_files(env, 3) == RecorderFiles(Path("/run/j1/nccl_trace_rank_3"), None)


@pytest.mark.parametrize(("name", "value"), [("TORCH_NCCL_TRACE_BUFFER_SIZE", "0"), ("TORCH_FR_BUFFER_SIZE", "5000")])
def test_a_size_of_the_users_counts_in_either_name(name: str, value: str) -> None:
    assert "TORCH_FR_BUFFER_SIZE" not in recorder_environment({name: value}, run_dir="/run", attempt=0)


@pytest.mark.parametrize("name", ["TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"])
def test_a_place_of_the_users_is_where_dumps_are_looked_for(name: str) -> None:
    given = {name: "/mine/t_", PIPE: "/mine/p_"}
    env = given | recorder_environment(given, run_dir="/run", attempt=0)
    assert recorder_files(env, 2) == RecorderFiles(Path("/mine/t_2"), Path("/mine/p_2.pipe"))
    assert dump_prefix(given, run_dir="/run", attempt=0) == "/mine/t_"


def test_an_attempt_does_not_write_over_the_dumps_of_the_one_before() -> None:
    assert dump_prefix({}, run_dir="/run", attempt=2) == "/run/nccl_trace_attempt2_rank_"


def test_ranks_get_a_pipe_where_one_can_be_made_and_no_trial_is_left(tmp_path: Path) -> None:
    assert pipe_environment({}, run_dir=str(tmp_path)) == {PIPE: f"{tmp_path}/nccl_pipe_rank_"}
    assert pipe_environment({PIPE: "/mine"}, run_dir=str(tmp_path)) == {}
    # torch would abort the rank that cannot make it.
    assert pipe_environment({}, run_dir=str(tmp_path / "missing")) == {}
    assert list(tmp_path.iterdir()) == []


def test_files_of_the_job_that_this_one_was_started_in_are_not_used() -> None:
    outer = {"DSRUN_RUN_DIR": "/outer", PIPE: "/outer/nccl_pipe_rank_", "TORCH_FR_DUMP_TEMP_FILE": "/mine/t_"}
    assert without_outer(outer, "/run") == {"DSRUN_RUN_DIR": "/outer", "TORCH_FR_DUMP_TEMP_FILE": "/mine/t_"}
    own = {"DSRUN_RUN_DIR": "/run", PIPE: "/run/nccl_pipe_rank_"}
    assert without_outer(own, "/run") == own


def files(folder: Path) -> RecorderFiles:
    return RecorderFiles(folder / "dump", folder / "pipe")


def test_a_rank_that_listens_is_asked(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert files(tmp_path).ask()
        assert os.read(reader, 8) == b"1"
    finally:
        os.close(reader)


@pytest.mark.timeout(20)
def test_nobody_is_waited_for_where_no_rank_listens(tmp_path: Path) -> None:
    assert not files(tmp_path).ask(), "there is no pipe"
    assert not RecorderFiles(tmp_path / "dump", None).ask()
    os.mkfifo(tmp_path / "pipe")
    assert not files(tmp_path).ask(), "its rank is gone"
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        while files(tmp_path).ask():
            pass  # Until it is full, as that of a rank whose monitor does not read any more.
    finally:
        os.close(reader)


def test_a_file_in_the_place_of_the_pipe_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "pipe").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    assert not files(tmp_path).ask()
    assert not RecorderFiles(tmp_path / "dump", tmp_path / "link").ask()
    assert (tmp_path / "pipe").read_text() == "mine"


def test_a_dump_is_read_as_far_as_it_may_be_and_only_if_it_is_a_file(tmp_path: Path) -> None:
    found = files(tmp_path)
    assert found.stamp() == (0, 0)
    assert not found.is_fresh()
    (tmp_path / "dump").write_bytes(b"x" * 100)
    assert found.is_fresh()
    assert (found.stamp()[1], found.read(most_bytes=10)) == (100, b"x" * 11)
    os.utime(tmp_path / "dump", (1, 1))
    assert not found.is_fresh(), "of an earlier hang"
    (tmp_path / "dump").unlink()
    os.mkfifo(tmp_path / "dump")
    with pytest.raises(OSError, match="not a plain file"):
        found.read(most_bytes=10)


@pytest.mark.parametrize(
    ("dumps", "places"),
    [
        # Who sees the job's folder under its path shares it with this machine.
        ([("n1", "/run/nccl_trace_rank_"), ("n2", "/run/nccl_trace_rank_")], ["/run/nccl_trace_rank_<N>"]),
        (
            [("n1", "/run/nccl_trace_rank_"), ("n2", "/tmp/dsrun-j1-x/nccl_trace_rank_")],
            ["/run/nccl_trace_rank_<N>", "n2:/tmp/dsrun-j1-x/nccl_trace_rank_<N> (until the attempt ends)"],
        ),
        # The user's own place is each host's own.
        ([("me", "/mine/t_"), ("n2", "/mine/t_")], ["/mine/t_<N>", "n2:/mine/t_<N>"]),
        ([("n1", "")], []),
        (
            [(f"n{rank}", "/mine/t_") for rank in range(9)],
            [f"n{rank}:/mine/t_<N>" for rank in range(4)] + ["and on 5 more hosts"],
        ),
    ],
)
def test_a_dump_of_another_host_is_named_with_it_and_one_of_this_machine_bare(
    dumps: list[tuple[str, str]], places: list[str]
) -> None:
    stacks = [
        (
            host,
            RankStack(
                rank=rank,
                state="S",
                kernel="",
                text="",
                phase="",
                collective="",
                step=None,
                idle_s=None,
                dump=f"{prefix}{rank}" if prefix else "",
            ),
        )
        for rank, (host, prefix) in enumerate(dumps)
    ]
    assert dump_places(stacks, run_dir="/run", job_id="j1", own_names=["me"]) == places
    come_in_another_order = stacks[::-1]
    assert dump_places(come_in_another_order, run_dir="/run", job_id="j1", own_names=["me"]) == places
