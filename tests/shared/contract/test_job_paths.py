from pathlib import Path

import pytest

from dsrun.contract.job_paths import (
    JobPaths,
    StatePaths,
    host_folder_prefix,
    mark_name,
    memory_copies_prefix,
    rank_of_log,
    rank_of_trace,
    stacks_pipe,
)


def test_names_on_disk_are_those_that_other_versions_and_guides_know() -> None:
    job = JobPaths(Path("/jobs/j1"))
    named = {
        "record": job.record,
        "outcome": job.outcome,
        "config": job.config_copy,
        "machine": job.machine,
        "lock": job.lock,
        "events": job.events,
        "live": job.live,
        "talk": job.front_end_log,
        "index": job.output_index,
        "records": job.records,
        "history": job.memory_history,
        "profile": job.trace(3),
        "profiles": job.merged_trace,
        "log": job.log(3),
        "part": job.log_part(3, 1),
        "error": job.error_file(3),
        "stacks": job.stacks(3),
        "trace": job.nccl_trace_prefix(0),
        "again": job.nccl_trace_prefix(2),
        "pipe": job.nccl_pipe_prefix,
    }
    assert {path.parent for path in named.values()} == {Path("/jobs/j1")}
    assert {what: path.name for what, path in named.items()} == {
        "record": "job.json",
        "outcome": "outcome.json",
        "config": "config.json",
        "machine": "machine.json",
        "lock": "job.lock",
        "events": "events.jsonl",
        "live": "live.json",
        "talk": "front_end.log",
        "index": "output.index",
        "records": "records.jsonl",
        "history": "memory_history.pickle",
        "profile": "rank3.trace.json.gz",
        "profiles": "trace.json.gz",
        "log": "rank3.log",
        "part": "rank3.1.log",
        "error": "rank3.error.json",
        "stacks": "rank3.stacks.txt",
        "trace": "nccl_trace_rank_",
        "again": "nccl_trace_attempt2_rank_",
        "pipe": "nccl_pipe_rank_",
    }
    assert str(job.stacks("<N>")) == "/jobs/j1/rank<N>.stacks.txt"
    assert stacks_pipe(job.stacks(3)).name == "rank3.stacks.pipe"


def test_what_is_there_for_a_moment_is_hidden() -> None:
    job = JobPaths(Path("/jobs/j1"))
    names = [job.live_draft.name, job.trial_pipe("ab").name, job.mark(mark_name("cd")).name]
    assert names == [".live.json.new", ".pipe-ab", ".shared-cd"]
    assert [draft.name for draft in job.trace_drafts(3)] == [".rank3.trace.json", ".rank3.trace.json.gz"]


@pytest.mark.parametrize(
    ("name", "rank"),
    [("rank0.log", 0), ("rank12.log", 12), ("rank0.1.log", None), ("rank.log", None), ("rank0.log.gz", None)],
)
def test_the_newest_part_of_a_log_says_whose_it_is(name: str, rank: int | None) -> None:
    assert rank_of_log(name) == rank


@pytest.mark.parametrize(
    ("name", "rank"), [("rank12.trace.json.gz", 12), (".rank1.trace.json.gz", None), ("trace.json.gz", None)]
)
def test_a_profile_says_whose_it_is(name: str, rank: int | None) -> None:
    assert rank_of_trace(name) == rank


def test_folders_outside_of_the_jobs_own_carry_its_id() -> None:
    assert host_folder_prefix("j1") == "dsrun-j1-"
    assert memory_copies_prefix("j1") == "dsrun-copies-j1-"
    assert memory_copies_prefix("j1").startswith(memory_copies_prefix())


def test_the_state_folder_has_a_place_for_each_kind() -> None:
    state = StatePaths(Path("/state/dsrun"))
    assert [state.jobs, state.batch_scripts] == [Path("/state/dsrun/jobs"), Path("/state/dsrun/slurm")]
    assert [state.leases("m"), state.queue("m")] == [Path("/state/dsrun/leases/m"), Path("/state/dsrun/queue/m")]
    assert state.sync_record("ab") == Path("/state/dsrun/synced/ab.json")
