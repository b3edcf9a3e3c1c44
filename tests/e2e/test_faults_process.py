"""Fault matrix, part A: processes that die, hang on, or escape. Each test is named after its row.

Every row goes through the command line, and ends with the common oracle: see [Note: oracle] in support.faults. A bound
says two times: what the row states, and what the test allows on a machine that is busy with other work.

Rows that need several hosts come with them: A13 to A20, A23 to A25, A31, and the two-host form of A1 and A7.
"""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.faults import HARD_LIMIT_S, READY, WAIT, Bound, launched
from support.processes import wait_for_end
from support.random_kills import VICTIMS, kill_at

pytestmark = pytest.mark.timeout(HARD_LIMIT_S + 30)

#: Where the ways to start differ, test_supervision.py has the other one without a command line.
both_starts = pytest.mark.parametrize(
    "start", ["fork", pytest.param("exec", marks=pytest.mark.soak("the same row in test_supervision.py"))]
)

GRACE_S = 1.0
#: A dead rank: the others gone within 5 s and the grace.
DEAD_RANK = Bound(5 + GRACE_S, 20 + GRACE_S)
#: A dead agent: its ranks end by themselves.
DEAD_AGENT = Bound(5, 20)
#: A dead front end: the end of its pipe, the grace, the kill.
DEAD_FRONT_END = Bound(15, 40)

#: Rank 1 takes five steps and exits with 3, with more lines on stderr than a report may drop; rank 0 waits.
EXITS_AT_STEP_5 = f"""{READY}
import dsrun
for step in range(5):
    dsrun.heartbeat(step=step)
    if os.environ["RANK"] == "1":
        for line in range(6):
            print("step", step, "line", line, file=sys.stderr)
if os.environ["RANK"] == "1":
    sys.exit(3)
{WAIT}"""


@pytest.mark.depends_on_speed("the bound DEAD_RANK")
@both_starts
def test_A1_a_rank_that_exits_3_ends_the_job_with_3_and_is_named_with_its_last_20_lines(
    tmp_path: Path, start: str
) -> None:
    with launched(tmp_path, EXITS_AT_STEP_5, "-n", "3", "--start", start, grace_s=GRACE_S) as job:
        job.wait_ready(3)
        with DEAD_RANK.on("the end of all ranks"):
            ended = job.end()
            job.gone()
    assert ended.exit_code == 3
    assert len(ended.errors) == 1
    assert re.fullmatch(r"error: rank 1 on localhost \(pid \d+\) exited with code 3", ended.errors[0])
    expected = [f"step {step} line {line}" for step in range(5) for line in range(6)]
    assert ended.quoted[-20:] == expected[-20:]


@pytest.mark.depends_on_speed("the bound DEAD_RANK")
@both_starts
def test_A2_a_rank_killed_by_SIGKILL_gives_137_and_is_named(tmp_path: Path, start: str) -> None:
    with launched(tmp_path, READY + WAIT, "-n", "2", "--start", start, grace_s=GRACE_S) as job:
        pids = job.wait_ready(2)
        with DEAD_RANK.on("the end of all ranks"):
            job.kill(pids[1])
            ended = job.end()
            job.gone()
    assert ended.exit_code == 137
    assert ended.errors == [f"error: rank 1 on localhost (pid {pids[1]}) was killed by SIGKILL"]


#: Without a core file, which would be the script's own leftover.
NO_CORE = "import resource\nresource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"


@pytest.mark.depends_on_speed("the bound DEAD_RANK")
@pytest.mark.parametrize(
    ("start", "crash", "code", "name"),
    [
        ("fork", "import ctypes; ctypes.string_at(0)", 139, "SIGSEGV"),
        ("exec", "os.abort()", 134, "SIGABRT"),
        pytest.param(
            *("exec", "import ctypes; ctypes.string_at(0)", 139, "SIGSEGV"),
            marks=pytest.mark.soak("the other crash, and this one of a forked rank"),
        ),
        pytest.param(
            *("fork", "os.abort()", 134, "SIGABRT"),
            marks=pytest.mark.soak("the other crash, and this one of an executed rank"),
        ),
    ],
)
def test_A3_a_crash_in_native_code_gives_128_and_the_signal_and_names_it(
    tmp_path: Path, start: str, crash: str, code: int, name: str
) -> None:
    # Behind the other rank's word: who dies at once may have it stopped before it has said that it is there.
    there = "import pathlib, time\nwhile not pathlib.Path('there').exists(): time.sleep(0.01)\nos.unlink('there')\n"
    crashes = f"if os.environ['RANK'] == '1':\n    exec({there!r})\n    {crash}\n"
    program = f"{READY}{NO_CORE}{crashes}open('there', 'w').close()\n{WAIT}"
    with launched(tmp_path, program, "-n", "2", "--start", start, grace_s=GRACE_S) as job:
        pids = job.wait_ready(2)
        with DEAD_RANK.on("the end of all ranks"):
            ended = job.end()
            job.gone()
    assert ended.exit_code == code
    assert ended.errors == [f"error: rank 1 on localhost (pid {pids[1]}) was killed by {name}"]


#: A data loader that left session, parent and environment, so that neither pid nor variable leads to it, and that
#: does not listen to SIGTERM; its pid goes into a file, for it cannot be found otherwise.
ESCAPES = """
import os, signal, sys
folder = sys.argv[1]
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        code = (
            "import os, signal, sys, time\\n"
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)\\n"
            "open(sys.argv[1] + '.new', 'w').write(str(os.getpid()))\\n"
            "os.rename(sys.argv[1] + '.new', sys.argv[1])\\n"
            "time.sleep(1000)\\n"
        )
        os.execve(sys.executable, [sys.executable, "-c", code, f"{folder}/escaped{os.environ['RANK']}"], {})
    os._exit(0)
os.wait()
while not os.path.exists(f"{folder}/escaped{os.environ['RANK']}"):
    pass
"""


@pytest.fixture
def escaped(tmp_path: Path) -> Iterator[Path]:
    """Where escaped processes leave their pids; none of them may outlive the test."""
    folder = tmp_path / "escaped"
    folder.mkdir()
    yield folder
    left = [pid for pid in map(int, (path.read_text() for path in folder.iterdir())) if _is_alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


def _is_alive(pid: int) -> bool:
    return not wait_for_end(pid, timeout_s=10.0 + GRACE_S)


@pytest.mark.depends_on_speed("the bound DEAD_AGENT")
@both_starts
def test_A5_a_killed_agent_fails_the_job_and_its_ranks_end_by_themselves(
    tmp_path: Path, escaped: Path, start: str
) -> None:
    program = ESCAPES + READY + WAIT
    with launched(tmp_path, program, "-n", "2", "--start", start, words=[str(escaped)], grace_s=GRACE_S) as job:
        job.wait_ready(2)
        with DEAD_AGENT.on("the end of all ranks"):
            job.kill(job.agent())
            ended = job.end()
            job.gone()
    assert ended.exit_code == 74
    assert ended.errors == ["error: host localhost: the agent was killed by SIGKILL unexpectedly"]


@pytest.mark.depends_on_speed("the bound DEAD_FRONT_END")
@both_starts
def test_A7_a_killed_front_end_takes_every_rank_along(tmp_path: Path, escaped: Path, start: str) -> None:
    program = ESCAPES + READY + WAIT
    with launched(tmp_path, program, "-n", "2", "--start", start, words=[str(escaped)], grace_s=GRACE_S) as job:
        job.wait_ready(2)
        with DEAD_FRONT_END.on("the end of all ranks"):
            job.process.kill()
            job.gone(grace_s=GRACE_S)


@pytest.mark.depends_on_speed("the bound DEAD_RANK")
@pytest.mark.parametrize(
    ("ending", "code"), [("", 0), ("if os.environ['RANK'] == '1': sys.exit(3)\n" + WAIT, 3)], ids=["well", "badly"]
)
def test_A11_children_that_forked_twice_and_left_the_session_end_with_the_job(
    tmp_path: Path, escaped: Path, ending: str, code: int
) -> None:
    program = ESCAPES + READY + ending
    args = ("-n", "2", "--start", "exec")
    with launched(tmp_path, program, *args, words=[str(escaped)], grace_s=GRACE_S) as job:
        job.wait_ready(2)
        with DEAD_RANK.on("the end of all processes"):
            ended = job.end()
            assert len(list(escaped.iterdir())) == 2
    assert ended.exit_code == code


@pytest.mark.parametrize(("seed", "victim"), list(enumerate(VICTIMS)))
def test_A33_whatever_is_killed_at_a_random_moment_nothing_is_left(tmp_path: Path, seed: int, victim: str) -> None:
    # Short form: one launch for each victim; scripts/soak does a hundred, and later moments.
    kill_at(tmp_path, victim, moment_s=random.Random(seed).uniform(0.0, 2.5))
