"""Fault matrix, C17 and C20: a run that is killed or stopped and started again is the undisturbed one, bit for bit."""

from __future__ import annotations

import signal
from itertools import pairwise
from pathlib import Path

import pytest

from support.faults import HARD_LIMIT_S, launched
from support.resuming import STEPS, TRAIN, end_of, said_by_rank

pytestmark = pytest.mark.timeout(3 * HARD_LIMIT_S)

TWO_RANKS = ("-n", "2")


def program(before: str = "pass") -> str:
    return TRAIN.replace("BEFORE", before)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The lines of a run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with launched(folder, program(), *TWO_RANKS, words=[str(folder / "checkpoints")]) as job:
        ended = job.end()
    assert ended.exit_code == 0, ended.text
    said = said_by_rank(ended.out)
    assert sorted(said) == [(rank, number) for rank in range(2) for number in range(2 * STEPS)]
    scales = [float(said[0, number][0].split()[3]) for number in range(2 * STEPS)]
    assert {after / before for before, after in pairwise(scales)} == {0.5, 1, 2}, "the scaler had something to do"
    return ended.out


def check_same(found: list[str], undisturbed: list[str], *, unsaid: int | None = None) -> None:
    """Both say the same of every micro step, as often as it was taken, and of the weights at the end.

    Args:
        found: lines of a run and of those that went on from it.
        undisturbed: lines of a run that nothing disturbed.
        unsaid: a micro step that ended the process before it could say anything.
    """
    said = said_by_rank(found)
    expected = {key: texts for key, texts in said_by_rank(undisturbed).items() if key[1] != unsaid}
    assert {key: set(texts) for key, texts in said.items()} == {key: set(texts) for key, texts in expected.items()}
    assert end_of(found) == end_of(undisturbed)


def test_C17_a_run_whose_rank_is_killed_goes_on_from_its_newest_checkpoint_as_if_nothing_had_happened(
    tmp_path: Path, undisturbed: list[str]
) -> None:
    # In the middle of step 11's accumulation, when the checkpoint of step 9 is complete.
    crash = (
        "if attempt == 0 and micro_step == 20: engine.wait_for_checkpoint()\n"
        "        if attempt == 0 and micro_step == 21 and rank == 1: os.kill(os.getpid(), signal.SIGKILL)"
    )
    words = [str(tmp_path / "checkpoints")]
    with launched(tmp_path, program(crash), *TWO_RANKS, "--max-restarts", "1", words=words, grace_s=30) as job:
        ended = job.end()
    assert ended.exit_code == 0, ended.text
    assert "[1] attempt 1 from 9" in ended.out
    check_same(ended.out, undisturbed)
    again = {number for (_, number), texts in said_by_rank(ended.out).items() if len(texts) > 1}
    assert again == set(range(18, 21))


#: Waits in the middle of step 11 until the signal has come to this rank.
WAIT = """if micro_step == 21:
            print("ready")
            while not engine.stop_requested:
                time.sleep(0.01)"""


def stopped(folder: Path, name: str, *, ranks: int) -> list[str]:
    """The lines of a run whose launcher gets a signal in the middle of step 11."""
    words = [str(folder / "checkpoints")]
    with launched(folder, program(WAIT), "-n", str(ranks), words=words, grace_s=60) as job:
        for rank in range(ranks):
            job.wait_for(rf"\[{rank}\] ready", "stdout")
        job.process.send_signal(signal.Signals[name])
        ended = job.end()
    code = 128 + signal.Signals[name]
    assert ended.exit_code == code, ended.text
    assert f"[0] dsrun: {name}: saving after step 11, then ending with code {code}" in ended.out
    assert (folder / "checkpoints" / "latest").read_text().strip() == "global_step11"
    return ended.out


def test_C20_a_stop_has_the_run_save_within_the_grace_and_the_next_one_goes_on_from_there(
    tmp_path: Path, undisturbed: list[str]
) -> None:
    # The stop reaches the workers of the ranks' loaders too, which leave it to their rank.
    before = stopped(tmp_path, "SIGTERM", ranks=2)
    with launched(tmp_path, program(), *TWO_RANKS, words=[str(tmp_path / "checkpoints")]) as job:
        after = job.end()
    assert after.exit_code == 0, after.text
    assert "[1] attempt 0 from 11" in after.out
    check_same([*before, *after.out], undisturbed, unsaid=21)


def test_C20_a_warning_that_is_passed_on_has_the_run_save_and_end_by_itself(tmp_path: Path) -> None:
    stopped(tmp_path, "SIGUSR1", ranks=1)  # how ranks agree on a stop is the same for every signal
