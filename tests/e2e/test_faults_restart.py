"""Fault matrix, part A: jobs that are started again. See test_faults_process.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.faults import HARD_LIMIT_S, READY, launched
from support.faults_training import STEPS, TRAIN, losses_said, undisturbed_losses

pytestmark = pytest.mark.timeout(HARD_LIMIT_S + 30)

TWO_RANKS = ("-n", "2", "--start", "exec")

#: Fails three times, each time one step later than before, then succeeds.
FAILS_THREE_TIMES = f"""{READY}
import dsrun
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
for step in range(attempt + 1):
    dsrun.heartbeat(step=step + 1)
print("attempt", attempt, "of", os.environ["TORCHELASTIC_MAX_RESTARTS"])
if attempt < 3 and os.environ["RANK"] == "1":
    sys.exit(7)
"""


@pytest.mark.parametrize(
    ("allowed", "code", "attempts"),
    [
        (3, 0, 4),
        pytest.param(2, 7, 3, marks=pytest.mark.soak("the script of test_job_run.py that fails once too often")),
    ],
)
def test_A27_a_script_that_fails_three_times_succeeds_with_three_restarts_and_fails_with_two(
    tmp_path: Path, allowed: int, code: int, attempts: int
) -> None:
    with launched(tmp_path, FAILS_THREE_TIMES, *TWO_RANKS, "--min-uptime", "0s", "--max-restarts", str(allowed)) as job:
        ended = job.end()
    assert ended.exit_code == code, ended.text
    assert [event["attempt"] for event in job.events("start")] == list(range(attempts))
    assert [event["attempt"] for event in job.events("restart")] == list(range(1, attempts))
    assert [event["attempts"] for event in job.events("end")] == [attempts]
    said = [line for line in ended.out if line.startswith("[1] attempt")]
    assert said == [f"[1] attempt {attempt} of {allowed}" for attempt in range(attempts)]
    # The report is of the last attempt, once.
    assert len(ended.errors) == (1 if code else 0)


#: Rank 1 dies at its sixth step in the first attempt: after the checkpoint of step 4, before that of step 6.
CRASH = "if attempt == 0 and step == 5 and rank == 1: os.kill(os.getpid(), signal.SIGKILL)"


def test_A27_a_job_started_again_resumes_from_its_newest_checkpoint_with_the_undisturbed_losses(
    tmp_path: Path,
) -> None:
    expected = undisturbed_losses()
    checkpoints = tmp_path / "checkpoints"
    program = TRAIN.replace("CRASH", CRASH)
    with launched(tmp_path, program, "-n", "2", "--max-restarts", "1", words=[str(checkpoints)]) as job:
        ended = job.end()
    assert ended.exit_code == 0, ended.text
    assert f"[1] attempt 1 from 4 resume {checkpoints}/global_step4" in ended.out
    said = losses_said(ended.out)
    assert sorted(said) == list(range(STEPS))
    # Step 4 was taken twice; both times, and ever after, to the last bit.
    assert {step: set(losses) for step, losses in said.items()} == {s: set(losses) for s, losses in expected.items()}
    assert [len(losses) for losses in said.values()] == [1, 1, 1, 1, 2, 1, 1, 1]
    assert (checkpoints / "latest").read_text().strip() == f"global_step{STEPS}"


def test_A28_a_crash_loop_before_the_first_step_backs_off_and_ends_after_three_restarts_without_progress(
    tmp_path: Path,
) -> None:
    program = f"{READY}if os.environ['RANK'] == '1': sys.exit(5)\nimport threading\nthreading.Event().wait()\n"
    with launched(tmp_path, program, *TWO_RANKS, "--max-restarts", "10", grace_s=1.0) as job:
        ended = job.end()
    assert ended.exit_code == 5
    assert [event["attempt"] for event in job.events("start")] == [0, 1, 2, 3]
    waits_s = [event["wait_s"] for event in job.events("restart")]
    assert waits_s == [waits_s[0], 2 * waits_s[0], 4 * waits_s[0]]
    assert waits_s[0] > 0
    assert "3 restarts in a row made no progress" in ended.text
