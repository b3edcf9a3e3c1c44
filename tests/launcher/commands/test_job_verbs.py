"""Verbs that look at jobs, on records of jobs that never ran. What real jobs do stands in tests/e2e/test_jobs.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from dsrun.contract.job_paths import JobPaths
from dsrun.launcher.jobs.lock import JobLock
from dsrun.launcher.jobs.record import append_waiting, read_json, write_json
from support.cli import clean_environment, invoke, run_dsrun
from support.job_records import leave_job
from support.terminals import Terminal


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path / "dsrun" / "jobs"


def test_ps_shows_what_lives_and_what_ended_within_a_day(jobs: Path) -> None:
    now = datetime.now().astimezone()
    lock = JobLock(leave_job(jobs, "lives", created=now - timedelta(days=9), started=now - timedelta(days=9)))
    leave_job(jobs, "recent", created=now - timedelta(hours=3))
    leave_job(jobs, "old", created=now - timedelta(days=2))
    shown = invoke("ps")
    assert [line.split()[:2] for line in shown.stdout.splitlines()] == [
        ["JOB", "STATE"],
        ["recent", "crashed"],
        ["lives", "running"],
    ]
    assert shown.stderr == "dsrun: 1 older job with `dsrun ps --all`\n"
    everything = json.loads(invoke("ps", "--all", "--json").stdout)["jobs"]
    assert [job["id"] for job in everything] == ["recent", "old", "lives"]
    lock.release()


def test_ps_on_a_narrow_terminal_shows_the_script_and_wide_shows_all(jobs: Path) -> None:
    hostfile = "/home/ada/projects/llm/clusters/rack-7/hostfile"
    lock = JobLock(leave_job(jobs, "20261121-0733-abcd", command=("run", "-H", hostfile, "train.py")))
    shown: dict[str, str] = {}
    for option in ("", "--wide"):
        with Terminal("ps", *filter(None, [option]), cwd=jobs, env=clean_environment(COLUMNS="80")) as terminal:
            assert terminal.end() == 0
            shown[option] = terminal.text
    lock.release()
    assert " … train.py" in shown[""]
    assert f" dsrun -H {hostfile} train.py" in shown["--wide"]


def test_ps_all_names_folders_whose_record_cannot_be_read(jobs: Path) -> None:
    leave_job(jobs, "a", outcome="done")
    (jobs / "b").mkdir()
    assert invoke("ps", "--all").stderr == f"dsrun: in {jobs} without a record this dsrun can read: b\n"


def test_ps_without_jobs_says_where_it_looked(jobs: Path) -> None:
    result = invoke("ps")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", f"dsrun: no jobs in {jobs}\n")


@pytest.mark.parametrize("verb", ["logs", "attach", "stop", "show", "rerun", "rm"])
def test_an_unknown_job_is_told_with_those_of_close_names(jobs: Path, verb: str) -> None:
    leave_job(jobs, "20261121-0733-abcd", outcome="done")
    result = invoke(verb, "20261121-0733-abce")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        f"error: there is no job `20261121-0733-abce` in {jobs}\n"
        "hint: did you mean `20261121-0733-abcd`? `dsrun ps --all` lists all jobs\n"
    )


def test_show_tells_in_sections_what_was_written_down(jobs: Path) -> None:
    config = jobs.parent / "ds.json"
    folder = leave_job(
        jobs, "a", outcome="failed", exit_code=3, failure=["error: rank 1 died"], config=str(config), detached=True
    )
    JobPaths(folder).config_copy.write_text("{\n" + "".join(f"  // {line}\n" for line in range(40)) + "}\n")
    outcome = read_json(JobPaths(folder).outcome) or {}
    ends = [{"rank": 0, "status": -15}, {"rank": 1, "status": 3}, {"rank": 2, "status": -15}]
    write_json(JobPaths(folder).outcome, outcome | {"attempts": 2, "ranks": ends})
    facts = {
        "schema_version": 1,
        "script_digest": "beef",
        "git": {"commit": "c0ffee", "dirty": True},
        "environment": {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "1"},
        "probe": {
            "host": {"name": "lab-1", "os": "Debian 12", "kernel": "6.1", "container": None},
            "cpu": {"model": "EPYC", "cores_usable": 8, "cores_present": 64},
            "memory": {"usable_bytes": 8 << 30, "total_bytes": 64 << 30},
            "versions": {"dsrun": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "cuda": "13.0", "nccl": None},
            "driver": "580.1",
            "gpus": [{"index": 0, "name": "H200", "usable": True, "memory_total_bytes": 141 << 30}],
            "disk": {"path": "/work", "filesystem": "xfs", "total_bytes": 2 << 30, "free_bytes": 1 << 30},
        },
    }
    write_json(JobPaths(folder).machine, facts)
    shown = invoke("show", "a").stdout.split("\n\n")
    assert [section.splitlines()[0] for section in shown] == [
        "job a: failed, exit code 3, after 1m",
        "plan",
        "hardware",
        "software",
        f"config {config}",
        "end",
        "error: rank 1 died",
    ]
    assert shown[0].splitlines()[1] == "  command    dsrun -n 2 train.py"
    assert shown[1:4] == [
        "plan\n"
        f"  program    script train.py, {sys.executable}\n"
        "  ranks      0-1 on localhost\n"
        "  start      fork, cores auto, grace 10s",
        "hardware\n"
        "  host       lab-1, Debian 12, kernel 6.1\n"
        "  cpu        EPYC, 8 of 64 cores usable\n"
        "  memory     8.0 GiB usable of 64.0 GiB\n"
        "  gpus       0 H200, 141.0 GiB\n"
        "  disk       1.0 GiB free of 2.0 GiB, xfs, /work",
        "software\n"
        "  versions   dsrun 0.1.0, python 3.11.7, torch 2.13.0, cuda 13.0, driver 580.1\n"
        "  git        c0ffee, with changed files\n"
        "  script     sha256 beef\n"
        "  inherited  NCCL_DEBUG=INFO\n"
        "             OMP_NUM_THREADS=1",
    ]
    assert shown[4].splitlines()[-1] == f"  ... 18 more lines in {JobPaths(folder).config_copy}"
    assert shown[5] == "end\n  attempts   2\n  ranks      0,2: killed by SIGTERM\n             1: exited with code 3"
    value = json.loads(invoke("show", "a", "--json").stdout)
    assert (value["plan"]["program"]["target"], value["machine"], value["outcome"]["exit_code"]) == (
        "train.py",
        facts,
        3,
    )


def test_show_of_a_job_that_left_only_its_record_is_no_failure(jobs: Path) -> None:
    leave_job(jobs, "a", plan={})
    shown = invoke("show", "a").stdout.splitlines()
    assert (shown[0], shown[-2:]) == ("job a: crashed", ["plan", "  ranks      2 on localhost"])
    assert json.loads(invoke("show", "last", "--json").stdout)["machine"] == {}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["rm"], "name jobs, or an age with `--older-than`"),
        (["rm", "a", "--older-than", "3d"], "name jobs, or an age with `--older-than`"),
        (["logs", "a", "--ranks", "2"], "`--ranks 2`: there is no rank 2; the job has ranks 0-1"),
        (["logs", "a", "--since", "soon"], "`--since soon`: expected a time ago or a time"),
        (["logs", "a", "--grep", "("], "`--grep`: `(` is no regular expression: missing ), "),
        (["stop"], "`dsrun stop`: JOB... is missing"),
    ],
)
def test_wrong_words_are_refused(jobs: Path, args: list[str], message: str) -> None:
    leave_job(jobs, "a", outcome="done")
    result = invoke(*args)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {message}")


def test_logs_that_cannot_be_written_are_an_error(jobs: Path) -> None:
    (leave_job(jobs, "a", outcome="done") / "rank0.log").write_text("a line\n")
    env = clean_environment(XDG_STATE_HOME=str(jobs.parents[1]))
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "dsrun", "logs", "a"]
        done = subprocess.run(command, env=env, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "error: cannot go on: no space left on device\n")


def test_rm_takes_the_link_along_and_leaves_what_is_too_young(jobs: Path, tmp_path: Path) -> None:
    now = datetime.now().astimezone()
    folder = leave_job(tmp_path / "mine", "linked", created=now - timedelta(hours=3))
    leave_job(jobs, "young", created=now - timedelta(hours=1))
    (jobs / "linked").symlink_to(folder)
    assert invoke("rm", "--older-than", "2h").stderr == "dsrun: 1 job removed\n"
    assert os.listdir(jobs) == ["young"]
    assert not folder.exists()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_for_each_shell(shell: str) -> None:
    result = invoke("completion", shell)
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"_DSRUN_COMPLETE={shell}_complete" in result.stdout
    if shell == "bash":
        assert subprocess.run(["bash", "-n"], input=result.stdout, text=True).returncode == 0


def completed(jobs: Path, *words: str) -> list[str]:
    """What bash is offered for the last word."""
    env = clean_environment(
        XDG_STATE_HOME=str(jobs.parents[1]),
        _DSRUN_COMPLETE="bash_complete",
        COMP_WORDS=" ".join(["dsrun", *words]),
        COMP_CWORD=str(len(words)),
    )
    done = subprocess.run([sys.executable, "-m", "dsrun"], env=env, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_a_shell_completes_verbs_options_files_and_jobs(jobs: Path) -> None:
    leave_job(jobs, "20261121-0733-abcd", outcome="done")
    leave_job(jobs, "20261120-0733-abcd", outcome="done")
    assert completed(jobs, "st") == ["plain,stop"]
    assert completed(jobs, "trai") == ["file,trai"]
    assert completed(jobs, "--back") == ["plain,--backend"]
    assert completed(jobs, "run", "--back") == ["plain,--backend"]
    assert completed(jobs, "run", "trai") == ["file,trai"]
    assert completed(jobs, "stop", "20261121") == ["plain,20261121-0733-abcd"]
    assert completed(jobs, "logs", "las") == ["plain,last"]
    assert completed(jobs, "stop", "20261121-0733-abcd", "2026") == ["plain,20261120-0733-abcd"]


@pytest.mark.parametrize("verb", ["attach", "logs", "memory", "rerun", "rm", "show", "stop", "top", "watch"])
def test_the_help_of_each_verb_says_what_names_a_job(verb: str) -> None:
    shown = invoke(verb, "--help").stdout
    assert shown.endswith("\n\n  JOB is an id, how one begins, its last four letters, or `last`.\n")
    # Who may leave it out sees so.
    assert ("[JOB]" in shown) == (verb in ("top", "rm", "watch"))


def test_a_verb_without_its_job_is_told_how_jobs_are_named(jobs: Path) -> None:
    assert invoke("rerun").stderr == (
        "error: `dsrun rerun`: JOB is missing\n"
        "hint: JOB is an id, how one begins, its last four letters, or `last`; `dsrun ps` lists them\n"
    )


def test_attach_to_a_job_that_has_ended_says_so_and_where_its_lines_are(jobs: Path) -> None:
    leave_job(jobs, "a", outcome="failed", exit_code=3, failure=["error: rank 1 died"])
    # It writes to the descriptors themselves.
    result = run_dsrun("attach", "a", cwd=jobs, env=clean_environment())
    first, *_, last = result.stderr.splitlines()
    assert (result.exit_code, first) == (3, "dsrun: job a had ended already; `dsrun logs a` has its lines")
    assert last.startswith("dsrun: job a: failed after 1m 0s with exit code 3, logs in ")


def test_show_of_a_job_that_waits_says_for_what(jobs: Path) -> None:
    folder = leave_job(jobs, "a", started=None, queued=True)
    append_waiting(folder, "waiting for 2 GPUs: GPUs 0, 1 are held by job b (pid 7)")
    lock = JobLock(folder)
    shown = invoke("show", "a").stdout.splitlines()[0]
    lock.release()
    assert shown == "job a: queued, waiting for 2 GPUs: GPUs 0, 1 are held by job b (pid 7)"


def test_show_of_a_job_that_never_ran_says_what_it_waited_for(jobs: Path) -> None:
    folder = leave_job(jobs, "a", outcome="stopped", exit_code=143)
    outcome = read_json(JobPaths(folder).outcome) or {}
    never = {"attempts": 0, "never_ran": True, "waited_for": "its hosts", "duration_s": 13.6}
    write_json(JobPaths(folder).outcome, outcome | never)
    first = "job a: stopped before it started, exit code 143, waited 13s for its hosts"
    assert invoke("show", "a").stdout.splitlines()[0] == first
    (listed,) = json.loads(invoke("ps", "--all", "--json").stdout)["jobs"]
    assert (listed["state"], listed["never_ran"], listed["duration_s"]) == ("stopped", True, None)
    assert invoke("stop", "a").stderr == "dsrun: job a had ended already: stopped before it started\n"
