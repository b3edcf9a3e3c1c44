from __future__ import annotations

from pathlib import Path

import pytest

from dsrun.errors import UsageError
from dsrun.launcher.commands.rerun import words_again
from support.cli import invoke
from support.job_records import a_record, leave_job


def again(folder: Path, *words: str, masked: tuple[int, ...] = ()) -> list[str]:
    record = a_record(folder, command=words, masked_words=masked)
    return words_again(record, environ=frozenset({"API_KEY"}))


def test_words_come_back_as_they_were(tmp_path: Path) -> None:
    # Three stars that the user typed are no mask.
    assert again(tmp_path, "run", "train.py", "--pattern=***") == ["run", "train.py", "--pattern=***"]


@pytest.mark.parametrize(
    ("words", "at", "expected"),
    [
        (("run", "--env", "API_KEY=***", "t.py"), 2, ["run", "--env", "API_KEY", "t.py"]),
        (("run", "--env=API_KEY=***", "t.py"), 1, ["run", "--env=API_KEY", "t.py"]),
    ],
)
def test_a_masked_variable_is_copied_from_the_environment(
    tmp_path: Path, words: tuple[str, ...], at: int, expected: list[str]
) -> None:
    assert again(tmp_path, *words, masked=(at,)) == expected


def test_a_job_can_be_run_again_without_its_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    jobs = tmp_path / "dsrun" / "jobs"
    jobs.mkdir(parents=True)
    (jobs / "train.py").write_text("")
    leave_job(jobs, "20261121-0945-7nnz", outcome="failed", exit_code=1)
    shown = invoke("rerun", "--no-gpu", "--dry-run", "20261121-0945-7nnz")
    assert shown.exit_code == 0, shown.stderr
    assert "CUDA_VISIBLE_DEVICES=''" in shown.stdout


def test_a_masked_variable_that_is_not_set_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the value of `--env OTHER_KEY` was not recorded") as raised:
        again(tmp_path, "run", "--env", "OTHER_KEY=***", "t.py", masked=(2,))
    assert raised.value.hint == "set OTHER_KEY in the environment"


def test_a_masked_word_of_the_script_cannot_be_had_again(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the word `--password=\\*\\*\\*` of its command was not recorded"):
        again(tmp_path, "run", "t.py", "--password=***", masked=(2,))
