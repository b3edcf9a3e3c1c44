from __future__ import annotations

import json
import shutil
from pathlib import Path

from dsrun.contract.job_paths import JobPaths
from dsrun.launcher.dashboard.run_text import line_of, view_json
from dsrun.launcher.dashboard.run_view import RunWatcher, read_memory_total
from dsrun.launcher.jobs.listing import Job, JobState, read_job
from dsrun.launcher.jobs.record import write_json
from support.job_records import leave_job
from support.recorded_runs import BEGIN_S, a_step, append_records, run_lines, step_line
from support.watched_jobs import JOB_ID, leave_files, leave_ranks, running_job

HOSTS = ("w1", "w2")


def job_in(folder: Path) -> Job:
    job = read_job(folder)
    assert job is not None
    return job


def test_a_look_takes_what_is_new_and_says_whether_a_page_would_show_it(tmp_path: Path) -> None:
    with running_job(tmp_path) as folder:
        clock = iter([float(second) / 10 for second in range(1000)])
        watcher = RunWatcher(job_in(folder), HOSTS, with_gpus=False, clock=lambda: next(clock))
        assert watcher.look(), "the first one"
        assert not watcher.look()
        append_records(folder, run_lines(range(1, 3)))
        assert watcher.look()
        leave_files(folder, events=[("hang", {"lines": ["no progress"]})])
        assert watcher.look()
        assert [event.text for event in watcher.view().events] == ["no progress"]


def test_the_end_of_a_job_is_seen_with_what_it_wrote_last(tmp_path: Path) -> None:
    with running_job(tmp_path) as folder:
        leave_ranks(folder, HOSTS)
        watcher = RunWatcher(job_in(folder), HOSTS, with_gpus=False)
        watcher.look(at_once=True)
        assert watcher.job.state is JobState.RUNNING
        assert [use.live.host for use in watcher.view().ranks] == list(HOSTS)
        append_records(folder, run_lines(range(1, 6)))
    watcher.look(at_once=True)
    assert watcher.job.state is JobState.CRASHED
    assert watcher.view().ranks == (), "nobody runs any more"
    assert watcher.figures.last == a_step(5)


def test_a_job_that_was_removed_has_ended(tmp_path: Path) -> None:
    folder = leave_job(tmp_path, "a")
    watcher = RunWatcher(job_in(folder), HOSTS, with_gpus=False)
    shutil.rmtree(folder)
    watcher.look(at_once=True)
    assert watcher.job.state is JobState.UNKNOWN


def test_the_memory_of_the_machine_is_what_the_job_wrote_down(tmp_path: Path) -> None:
    assert read_memory_total(tmp_path) == {}
    write_json(JobPaths(tmp_path).machine, {"probe": {"gpus": [], "memory": {"total_bytes": 7}}})
    assert read_memory_total(tmp_path) == {"cpu": 7}
    gpus = [{"memory_total_bytes": total} for total in (9, 8, None)]
    write_json(JobPaths(tmp_path).machine, {"probe": {"gpus": gpus, "memory": {"total_bytes": None}}})
    assert read_memory_total(tmp_path) == {"gpu": 8}
    gpus = [{"memory_total_bytes": 9, "usable": True}, {"memory_total_bytes": 4, "usable": False}]
    memory = {"total_bytes": 512, "cgroup_limit_bytes": 16, "usable_bytes": 12}
    write_json(JobPaths(tmp_path).machine, {"probe": {"gpus": gpus, "memory": memory}})
    assert read_memory_total(tmp_path) == {"gpu": 9, "cpu": 16}, "as a container has it"


def test_a_line_says_how_far_and_how_fast_a_job_is(tmp_path: Path) -> None:
    with running_job(tmp_path) as folder:
        watcher = RunWatcher(job_in(folder), HOSTS, with_gpus=False)
        watcher.look(at_once=True)
        assert line_of(watcher.view(now_s=BEGIN_S)).endswith(f"{JOB_ID} running  being prepared  no step yet")
        append_records(folder, map(step_line, [a_step(1), a_step(2, total_steps=10_000, mfu=0.4)]))
        watcher.look()
        assert line_of(watcher.view(now_s=BEGIN_S)).split(maxsplit=1)[1] == (
            f"{JOB_ID} running  step 2/10000  loss 5.805  lr 0.0003  50 ms a step  328K tokens/s  MFU 40.0%  3.0 GiB"
            "  ETA 8m"
        )


def test_an_object_has_all_that_the_page_shows(tmp_path: Path) -> None:
    with running_job(tmp_path) as folder:
        watcher = RunWatcher(job_in(folder), HOSTS, with_gpus=False)
        watcher.look(at_once=True)
        bare = json.loads(json.dumps(view_json(watcher.view())))
        assert (bare["job"]["state"], bare["last_step"], bare["lags"]) == ("running", None, [])
        leave_files(folder, records=run_lines(range(1, 61)), gpu_bytes=80 << 30)
        leave_ranks(folder, HOSTS)
        watcher.look(at_once=True)
        value = json.loads(json.dumps(view_json(watcher.view(now_s=BEGIN_S))))
    assert set(value) == set(bare)
    assert value["last_step"]["step"] == value["job"]["step"] == 60
    assert value["step_s"] == 0.05
    assert value["memory"]["gpu"] == {"most_bytes": 2.6e9, "most_rank": 1}
    assert value["memory_total_bytes"] == {"gpu": 80 << 30}
    assert value["lags"][0]["rank"] == 2
    assert value["checkpoint"]["tag"] == "step50"
    assert [rank["host"] for rank in value["ranks"]] == list(HOSTS)
