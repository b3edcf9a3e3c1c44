from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from dsrun.errors import UsageError
from dsrun.launcher.scheduler.batch_script import batch_script, output_of, sbatch_words, slurm_time


@pytest.mark.parametrize(
    ("text", "slurms"),
    [
        ("2h", "0-02:00:00"),
        ("30m", "0-00:30:00"),
        ("90s", "0-00:01:30"),
        ("1d", "1-00:00:00"),
        ("1.5d", "1-12:00:00"),
        ("36h", "1-12:00:00"),
        # Slurm's own: a number is minutes.
        ("30", "30"),
        ("30:00", "30:00"),
        ("2:00:00", "2:00:00"),
        ("1-12", "1-12"),
        ("1-12:30:00", "1-12:30:00"),
        ("UNLIMITED", "UNLIMITED"),
        *((bad, None) for bad in ("", "0", "0h", "2 h", "soon", "1w", "-5", "2h30m", "1:2:3:4", "0:00:00")),
    ],
)
def test_times_are_written_as_slurm_reads_them(text: str, slurms: str | None) -> None:
    assert slurm_time(text) == slurms


@pytest.mark.parametrize("words", [["--time", "2h"], ["--time=2h"], ["-t", "2h"], ["-t2h"]])
def test_a_time_is_translated_however_the_option_is_written(words: list[str]) -> None:
    assert sbatch_words(["--nodes", "4", *words, "-p", "gpu"]) == ["--nodes", "4", "--time=0-02:00:00", "-p", "gpu"]


def test_all_that_sbatch_could_not_use_is_said_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        sbatch_words(["--time", "soon", "--time-min=never", "--comment", "a\nb", "--wrap", "hostname", "-t"])
    messages = [problem.message for problem in caught.value.problems]
    assert messages == [
        "`--time` is 'soon'; expected a time",
        "`--time-min` is 'never'; expected a time",
        "sbatch's 'a\\nb' holds a line break",
        "`--wrap` makes a script of its own",
        "`--time` is ''; expected a time",
    ]


def test_the_script_is_what_slurm_and_a_shell_are_to_read() -> None:
    options = ["--nodes", "4", "--time=0-02:00:00", "--comment", 'it\'s 1 # "first"']
    text = batch_script(
        ["dsrun", "run", "train.py", "--lr", "3e-4"], options, script="src/train.py", cwd="/home/ada/x y"
    )
    assert text == (
        "#!/bin/sh\n"
        "#SBATCH --job-name=train\n"
        '#SBATCH "--chdir=/home/ada/x y"\n'
        "#SBATCH --output=slurm-%j.out\n"
        "#SBATCH --open-mode=append\n"
        "#SBATCH --ntasks-per-node=1\n"
        "#SBATCH --nodes 4\n"
        "#SBATCH --time=0-02:00:00\n"
        '#SBATCH --comment "it\'s 1 # \\"first\\""\n'
        "\n"
        "exec dsrun run train.py --lr 3e-4\n"
    )


@pytest.mark.parametrize("options", [["-n", "8"], ["-n8"], ["--ntasks=8"], ["--ntasks-per-node", "2"]])
def test_whoever_counts_tasks_counts_all_of_them(options: list[str]) -> None:
    assert "--ntasks-per-node=1" not in batch_script(["dsrun"], options, script="train.py", cwd="/")


def test_every_word_of_the_command_arrives_as_it_is(tmp_path: Path) -> None:
    words = ["$HOME", "a b", "", "*", "'\"", "é\n#SBATCH --nodes=9", "`date`", "\\", "-n", "\udcff"]
    text = batch_script(["printf", "%s|", *words], [], script="train.py", cwd="/")
    script = tmp_path / "job.sh"
    script.write_bytes(text.encode("utf-8", "surrogateescape"))
    done = subprocess.run(["sh", script], capture_output=True, check=True)
    assert done.stdout == "".join(f"{word}|" for word in words).encode("utf-8", "surrogateescape")


@pytest.mark.parametrize(
    ("options", "output"),
    [
        ([], "/work/slurm-7.out"),
        (["-o", "log-%j"], "/work/log-7"),
        (["-olog"], "/work/log"),
        (["--output=/logs/%j"], "/logs/7"),
        (["--output", "a", "--output", "b"], "/work/b"),
        (["--output", "%x-%j"], None),
    ],
)
def test_the_output_file_is_named_where_it_can_be_known(options: list[str], output: str | None) -> None:
    assert output_of(options, job_id="7", cwd="/work") == output
