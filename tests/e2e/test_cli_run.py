"""`dsrun` as people run it: a process of its own, from the words on the command line to what appears and what is left.

Ranks are started with `--start exec` where torch does not matter: a fresh interpreter is quicker than importing torch.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cli import Result, clean_environment, run_dsrun, start_dsrun
from support.processes import wait_for_end

SHOW = """
import json, os, sys
print(json.dumps({"rank": int(os.environ["RANK"]), "argv": sys.argv[1:], "config": os.environ.get("DSRUN_CONFIG")}))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder with a script, a config and a home of its own."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "show.py").write_text(SHOW)
    (work / "ds.json").write_text('{"train_batch_size": 4}')
    return work


def environment(folder: Path, **changes: str) -> dict[str, str]:
    return clean_environment(XDG_STATE_HOME=str(folder.parent / "state"), CUDA_VISIBLE_DEVICES="", **changes)


def run(folder: Path, *args: str | bytes) -> Result:
    return run_dsrun(*args, cwd=folder, env=environment(folder))


def shown(result: Result) -> dict[int, dict[str, object]]:
    """What each rank of show.py said."""
    assert result.exit_code == 0, result.stderr
    said = [json.loads(line.partition("] ")[2]) for line in result.stdout.splitlines()]
    return {entry["rank"]: entry for entry in said}


def job_folders(folder: Path) -> list[Path]:
    jobs = folder.parent / "state" / "dsrun" / "jobs"
    return sorted(jobs.iterdir()) if jobs.exists() else []


def test_every_rank_runs_and_says_so_on_whole_tagged_lines(folder: Path) -> None:
    (folder / "half.py").write_text(
        "import os, sys\n"
        "for part in ('one ', 'line ', os.environ['RANK'], '\\n'):\n"
        "    sys.stdout.write(part); sys.stdout.flush()\n"
        "sys.stdout.write('step 1\\rstep 2\\rstep 3\\n')\n"
        "sys.stderr.write('talk\\n')\n"
        "sys.stdout.write('no end')\n"
    )
    result = run(folder, "-n", "2", "--start", "exec", "half.py")
    assert result.exit_code == 0, result.stderr
    for rank in (0, 1):
        own = [line for line in result.stdout.splitlines() if line.startswith(f"[{rank}] ")]
        assert own == [f"[{rank}] one line {rank}", f"[{rank}] step 3", f"[{rank}] no end"]
        assert f"[{rank}] talk" in result.stderr.splitlines()
    assert len(result.stdout.splitlines()) == 6


def test_a_run_opens_and_closes_with_one_line_of_talk_each(folder: Path) -> None:
    result = run(folder, "-n", "2", "--start", "exec", "--backend", "gloo", "show.py")
    (job,) = job_folders(folder)
    opening, closing = result.stderr.splitlines()
    assert opening == f"dsrun: job {job.name}: 2 ranks on localhost, gloo, show.py, logs in {job}"
    assert closing.startswith(f"dsrun: job {job.name}: done after ")
    assert job.stat().st_mode & 0o777 == 0o700


def test_quiet_leaves_the_lines_of_the_ranks_alone(folder: Path) -> None:
    result = run(folder, "--quiet", "--start", "exec", "show.py")
    assert (result.stderr, len(shown(result))) == ("", 1)


def test_words_arrive_byte_for_byte(folder: Path) -> None:
    words = [b"a b", b"'\"", b"$HOME", b";ls|&", b"two\nlines", b"", b"-n", b"\xc3\xa4", b"\xff\xfe", b"*", b"`id`"]
    result = run(folder, "--start", "exec", "show.py", *words)
    assert shown(result)[0]["argv"] == [os.fsdecode(word) for word in words]


_SAME = pytest.mark.soak("the cases with a config behind the script, with two, and with none")


@pytest.mark.parametrize(
    ("before", "after", "argv", "has_config"),
    [
        pytest.param([], ["--lr", "3"], ["--lr", "3"], False, marks=_SAME),
        ([], ["--lr", "3", "--config", "ds.json", "x"], ["--lr", "3", "x"], True),
        pytest.param(["--config", "ds.json"], ["x"], ["x"], True, marks=_SAME),
        ([], ["--", "--config", "mine.yaml"], ["--", "--config", "mine.yaml"], False),
        pytest.param([], ["--deepspeed_config", "ds.json"], ["--deepspeed_config", "ds.json"], True, marks=_SAME),
        (["--config", "ds.json"], ["--deepspeed_config=./ds.json"], ["--deepspeed_config=./ds.json"], True),
    ],
)
def test_the_config_reaches_every_rank_and_other_words_the_script(
    folder: Path, before: list[str], after: list[str], argv: list[str], has_config: bool
) -> None:
    said = shown(run(folder, "-n", "2", "--start", "exec", *before, "show.py", *after))
    expected = str(folder / "ds.json") if has_config else None
    assert [(said[rank]["argv"], said[rank]["config"]) for rank in (0, 1)] == [(argv, expected)] * 2


def test_a_module_and_a_program_run_as_well(folder: Path) -> None:
    (folder / "package").mkdir()
    (folder / "package" / "train.py").write_text(SHOW)
    assert shown(run(folder, "--start", "exec", "-m", "package.train", "x"))[0]["argv"] == ["x"]
    result = run(folder, "-n", "2", "--no-python", "sh", "-c", 'echo "$RANK of $WORLD_SIZE"')
    assert sorted(result.stdout.splitlines()) == ["[0] 0 of 2", "[1] 1 of 2"]


def test_variables_reach_every_rank(folder: Path) -> None:
    script = 'echo "$A|$B|$OMP_NUM_THREADS|$DSRUN_BACKEND"'
    env = environment(folder, B="copied", OMP_NUM_THREADS="7")
    args = ("--env", "A=a b", "--env", "B", "--backend", "gloo", "--no-python", "sh", "-c", script)
    assert run_dsrun(*args, cwd=folder, env=env).stdout == "[0] a b|copied|7|gloo\n"


def test_a_hostfile_of_this_machine_is_obeyed(folder: Path) -> None:
    (folder / "hosts").write_text("localhost slots=2  # both cores\n")
    assert sorted(shown(run(folder, "-H", "hosts", "--start", "exec", "show.py"))) == [0, 1]


def test_the_exit_code_is_the_failing_ranks_own_and_its_words_are_shown(folder: Path) -> None:
    (folder / "fail.py").write_text(
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    print('cannot read the data', file=sys.stderr)\n"
        "    sys.exit(42)\n"
        "time.sleep(60)\n"
    )
    result = run(folder, "-n", "2", "--start", "exec", "fail.py")
    (job,) = job_folders(folder)
    assert result.exit_code == 42
    lines = result.stderr.splitlines()
    at = next(index for index, line in enumerate(lines) if line.startswith("error: "))
    assert lines[at].startswith("error: rank 1 on localhost (pid ")
    assert lines[at].endswith(") exited with code 42")
    assert lines[at + 1 : at + 3] == ["last lines of rank 1:", "  | cannot read the data"]
    assert lines[-1].startswith(f"dsrun: job {job.name}: failed after ")
    assert lines[-1].endswith(f"with exit code 42, logs in {job}")


def test_an_option_of_dsrun_after_the_script_ends_in_a_hint(folder: Path) -> None:
    (folder / "parse.py").write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    result = run(folder, "--json", "--start", "exec", "parse.py", "--log-dir", "x")
    hint = "hint: `--log-dir` is an option of dsrun; put it before the script"
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-2] == hint
    assert json.loads(result.stdout)["failure"][-1] == hint


_FULL = pytest.mark.soak("what has printed before anything runs, and what has after a job")


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        pytest.param(["probe"], marks=_FULL),
        pytest.param(["--dry-run", "show.py"], marks=_FULL),
        ["--json", "show.py"],
    ],
)
def test_a_full_disk_behind_stdout_is_told_in_one_line(folder: Path, args: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "dsrun", "--start", "exec"][: None if "show.py" in args else 3]
        ended = subprocess.run(
            [*command, *args], cwd=folder, env=environment(folder), stdout=full, stderr=subprocess.PIPE, timeout=60
        )
    assert ended.returncode == 1
    assert ended.stderr.decode().splitlines()[-1] == "error: cannot go on: no space left on device"
    assert b"Traceback" not in ended.stderr


def test_a_full_disk_behind_stdout_stops_no_rank(folder: Path) -> None:
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "dsrun", "--start", "exec", "show.py"],
            cwd=folder,
            env=environment(folder),
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=60,
        )
    _, told, _ = ended.stderr.decode().splitlines()
    assert ended.returncode == 0
    assert told == "dsrun: stdout cannot be written: No space left on device; the logs are complete"


@pytest.mark.depends_on_speed("4 s in all")
def test_too_few_descriptors_are_told_at_once_and_without_blame_of_ranks(folder: Path) -> None:
    words = ("-q", "-n", "40", "--start", "exec", "show.py")
    process = start_dsrun(*words, cwd=folder, env=environment(folder), before="ulimit -S -n 64")
    # Within the time for which an agent waits for output that may still come.
    _, err = process.communicate(timeout=4)
    assert process.returncode == 74
    assert err == b"error: host localhost: cannot start the ranks: too many open files; raise `ulimit -n`\n"


def test_json_keeps_stdout_for_one_object(folder: Path) -> None:
    # Rank 1, whose failure ends the job, waits until rank 0 has printed; a file of the job's own tells it.
    program = "if [ $RANK = 0 ]; then echo line; touch printed; else while [ ! -e printed ]; do :; done; exit 3; fi"
    result = run(folder, "--json", "-n", "2", "--no-python", "sh", "-c", program)
    outcome = json.loads(result.stdout)
    (job,) = job_folders(folder)
    assert (outcome["outcome"], outcome["exit_code"], outcome["run_dir"]) == ("failed", 3, str(job))
    assert [rank["status"] for rank in outcome["ranks"]][1] == 3
    assert result.exit_code == 3
    assert "[0] line" in result.stderr.splitlines()


def test_dry_run_starts_and_writes_nothing(folder: Path) -> None:
    (folder / "touch.py").write_text("open('started', 'w')\n")
    result = run(folder, "-n", "2", "--dry-run", "--json", "touch.py", "--config", "ds.json", "a b")
    plan = json.loads(result.stdout)
    assert (result.exit_code, result.stderr) == (0, "")
    assert plan["program"]["args"] == ["a b"]
    assert plan["env"]["DSRUN_CONFIG"] == str(folder / "ds.json")
    assert [len(node["workers"]) for node in plan["nodes"]] == [2]
    assert not (folder / "started").exists()
    assert job_folders(folder) == []


def test_bad_input_is_told_at_once_and_nothing_starts(folder: Path) -> None:
    (folder / "bad.json").write_text('{"train_batch_size": 4, "zero_optimisation": {"stage": 1}}')
    result = run(folder, "-n", "2", "show.py", "--config", "bad.json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        "error: bad.json:1:25: `zero_optimisation` is not a key of the config\n"
        "hint: did you mean `zero_optimization`?\n"
    )
    assert job_folders(folder) == []


def test_a_key_without_effect_is_a_warning_that_stops_nothing(folder: Path) -> None:
    (folder / "warn.json").write_text('{"train_batch_size": 4, "zero_optimization": {"stage3_max_live_parameters": 5}}')
    result = run(folder, "--start", "exec", "show.py", "--config", "warn.json")
    assert shown(result)[0]["config"] == str(folder / "warn.json")
    first = result.stderr.splitlines()[0]
    assert first.startswith("warning: warn.json:1:47: `zero_optimization.stage3_max_live_parameters` has no effect")


# Stopping


SLEEPER = """
import os, sys, time
with open(f"pid{os.environ['RANK']}", "w") as file:
    file.write(str(os.getpid()))
print("ready", flush=True)
time.sleep(600)
"""
DEADLINE_S = 30.0


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ranks_of(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in sorted(folder.glob("pid*"))]


@pytest.fixture
def sleepers(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A job of two ranks that both run."""
    (folder / "sleeper.py").write_text(SLEEPER)
    process = start_dsrun("-n", "2", "--start", "exec", "sleeper.py", cwd=folder, env=environment(folder))
    assert process.stdout is not None
    ready = [process.stdout.readline() for _ in range(2)]
    assert sorted(ready) == [b"[0] ready\n", b"[1] ready\n"]
    yield process
    process.kill()
    process.communicate()


_A6 = pytest.mark.soak("row A6 in test_faults_stop.py")


@pytest.mark.parametrize(
    ("signum", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=_A6), pytest.param(signal.SIGHUP, 129, marks=_A6)],
)
def test_a_signal_ends_every_rank(
    folder: Path, sleepers: subprocess.Popen[bytes], signum: signal.Signals, code: int
) -> None:
    sleepers.send_signal(signum)
    _, err = sleepers.communicate(timeout=DEADLINE_S)
    assert sleepers.returncode == code
    assert [is_alive(pid) for pid in ranks_of(folder)] == [False, False]
    assert err.decode().splitlines()[-1].startswith(f"dsrun: job {job_folders(folder)[0].name}: stopped after ")
    assert b"Traceback" not in b"\n".join(line for line in err.splitlines() if line.startswith(b"dsrun"))


def test_the_second_ctrl_c_kills_ranks_that_do_not_listen(folder: Path) -> None:
    (folder / "deaf.py").write_text(f"import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n{SLEEPER}")
    args = ("--start", "exec", "--grace", "600s", "deaf.py")
    with start_dsrun(*args, cwd=folder, env=environment(folder)) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"[0] ready\n"
        assert process.stderr.readline().startswith(b"dsrun: job ")
        process.send_signal(signal.SIGINT)
        told = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=DEADLINE_S) == 130
    assert told.startswith(b"dsrun: ")
    assert b"10m 0s" in told
    assert [is_alive(pid) for pid in ranks_of(folder)] == [False]


def test_a_job_whose_reader_does_not_read_can_be_stopped_and_left(folder: Path) -> None:
    (folder / "chatter.py").write_text(SLEEPER.replace("time.sleep(600)", "while True: print('y' * 999)"))
    with start_dsrun("--start", "exec", "chatter.py", cwd=folder, env=environment(folder)) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"[0] ready\n"
        assert process.stderr.readline().startswith(b"dsrun: job ")
        for told in (b"SIGTERM: stopping", b"SIGTERM: killing", b"SIGTERM: leaving"):
            process.send_signal(signal.SIGTERM)
            assert told in process.stderr.readline()
        assert process.wait(timeout=DEADLINE_S) == 143
    assert wait_for_end(ranks_of(folder)[0], timeout_s=DEADLINE_S)


@pytest.mark.depends_on_speed("5 s from the closed pipe to the end")
def test_a_flood_of_short_lines_ends_soon_after_its_reader(folder: Path) -> None:
    with start_dsrun("-n", "2", "--no-python", "yes", cwd=folder, env=environment(folder)) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().endswith(b"y\n")
        process.stdout.close()
        closed_s = time.monotonic()
        assert process.wait(timeout=DEADLINE_S) == 141
        assert time.monotonic() - closed_s < 5.0
        assert b"dsrun: nobody reads the output: stopping 2 ranks" in process.stderr.read()


def test_a_reader_that_goes_away_stops_the_job(folder: Path) -> None:
    (folder / "chatter.py").write_text(SLEEPER.replace("time.sleep(600)", "while True: print('y')"))
    with start_dsrun("--start", "exec", "chatter.py", cwd=folder, env=environment(folder)) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"[0] ready\n"
        process.stdout.close()
        assert process.wait(timeout=DEADLINE_S) == 141
        assert b"Traceback" not in process.stderr.read()
    assert [is_alive(pid) for pid in ranks_of(folder)] == [False]
