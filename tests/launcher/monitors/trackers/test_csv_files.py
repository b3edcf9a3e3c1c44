"""CSV files have DeepSpeed's layout, and those of a run that was killed and went on are those of one that was not."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from dsrun.launcher.monitors.state import StateFile
from dsrun.launcher.monitors.trackers.tracker import TrackerProblem
from support.recorded_runs import append_records, log_line, run_lines
from support.tracked_runs import give, run_to_its_end, settings_of

CSV = settings_of("csv_monitor", output_path="out", job_name="run")


def rows(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.csv"))}


def undisturbed(tmp_path: Path, *, steps: int) -> dict[str, bytes]:
    other = tmp_path / "undisturbed"
    other.mkdir()
    run_to_its_end(other / "job", CSV, [run_lines(range(1, steps + 1))])
    return contents(other / "out" / "run")


def test_a_file_has_deepspeeds_name_header_and_x(tmp_path: Path) -> None:
    run_to_its_end(tmp_path / "job", CSV, [run_lines(range(1, 4))])
    assert rows(tmp_path / "out" / "run" / "Train_Samples_lr.csv") == [
        ["step", "lr"],
        ["16", "0.0003"],
        ["32", "0.0003"],
        ["48", "0.0003"],
    ]


def test_a_job_that_failed_and_went_on_three_times_leaves_the_files_of_one_that_did_not(tmp_path: Path) -> None:
    attempts = [range(1, 13), range(9, 20), range(9, 31), range(21, 41)]
    run_to_its_end(tmp_path / "job", CSV, [run_lines(steps) for steps in attempts])
    assert contents(tmp_path / "out" / "run") == undisturbed(tmp_path, steps=40)


def test_jobs_that_each_went_on_from_a_checkpoint_leave_the_files_of_one_job(tmp_path: Path) -> None:
    for number, steps in enumerate([range(1, 13), range(9, 20), range(9, 31), range(21, 41)]):
        run_to_its_end(tmp_path / f"job{number}", CSV, [run_lines(steps)], job_id=f"j{number}")
    assert contents(tmp_path / "out" / "run") == undisturbed(tmp_path, steps=40)


def test_a_job_that_goes_on_and_evaluates_first_keeps_the_step_before_it(tmp_path: Path) -> None:
    run_to_its_end(tmp_path / "job1", CSV, [run_lines(range(1, 6))], job_id="j1")
    lines = [log_line({"eval/f1": 0.5}, step=5), *run_lines(range(6, 9))]
    run_to_its_end(tmp_path / "job2", CSV, [lines], job_id="j2")
    files = contents(tmp_path / "out" / "run")
    assert files.pop("eval_f1.csv") == b"step,f1\n80,0.5\n"
    assert files == undisturbed(tmp_path, steps=8)


def test_what_a_killed_monitor_wrote_and_did_not_write_down_is_written_once(tmp_path: Path) -> None:
    job = tmp_path / "job"
    state = StateFile(job, CSV)
    written_down = give(job, CSV, run_lines(range(1, 6))).state
    give(job, CSV, run_lines(range(6, 12), first=False))
    state.write(written_down)
    torn = tmp_path / "out" / "run" / "Train_Samples_lr.csv"
    torn.write_bytes(torn.read_bytes() + b"192,0.00")
    run_to_its_end(job, CSV, [run_lines(range(12, 15), first=False)])
    assert contents(tmp_path / "out" / "run") == undisturbed(tmp_path, steps=14)


def test_a_run_that_begins_anew_keeps_the_files_of_the_one_before_it(tmp_path: Path) -> None:
    run_to_its_end(tmp_path / "job1", CSV, [run_lines(range(1, 4))], job_id="j1")
    before = contents(tmp_path / "out" / "run")
    run_to_its_end(tmp_path / "job2", CSV, [run_lines(range(1, 6))], job_id="j2")
    assert contents(tmp_path / "out" / "run" / "earlier-1") == before
    assert contents(tmp_path / "out" / "run") == undisturbed(tmp_path, steps=5)


def test_the_scripts_own_figures_have_files_of_their_own(tmp_path: Path) -> None:
    lines = [*run_lines(range(1, 3)), log_line({"eval/f1": 0.5}, step=2)]
    run_to_its_end(tmp_path / "job", CSV, [lines, [log_line({"eval/f1": 0.75}, step=2)]])
    assert rows(tmp_path / "out" / "run" / "eval_f1.csv") == [["step", "f1"], ["32", "0.75"]]


@pytest.mark.parametrize("name", ["../../out", "/etc/loss", "..", "a/../../b", "x" * 500, "é" * 300, "nul\0"])
def test_no_name_leaves_the_folder_or_is_refused(tmp_path: Path, name: str) -> None:
    run_to_its_end(tmp_path / "job", CSV, [[*run_lines(range(1, 2)), log_line({name: 1.0}, step=1)]])
    made = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert all(path.parent in (tmp_path / "job", tmp_path / "out" / "run") for path in made)
    (own,) = [path for path in made if path.suffix == ".csv" and not path.name.startswith("Train_")]
    assert rows(own)[1] == ["16", "1.0"]


def test_two_names_that_look_alike_as_files_do_not_share_one(tmp_path: Path) -> None:
    lines = [*run_lines(range(1, 2)), log_line({"a/b": 1.0, "a_b": 2.0}, step=1)]
    job = tmp_path / "job"
    give(job, CSV, lines)
    append_records(job, [log_line({"a_b": 3.0, "a/b": 4.0}, step=2)])
    run_to_its_end(job, CSV, [])
    values = sorted([row[1] for row in rows(path)[1:]] for path in (tmp_path / "out" / "run").glob("a_b*"))
    assert values == [["1.0", "4.0"], ["2.0", "3.0"]]


def test_tables_of_the_user_in_the_same_folder_are_neither_moved_nor_cut(tmp_path: Path) -> None:
    here = settings_of("csv_monitor", output_path="", job_name="")
    mine = {
        "train.csv": b"text,label\nhello,1\n",
        "results.csv": b"step,loss\nlast,2.0\n",
        "wide.csv": b"step,a,b\n1,2,3\n",
    }
    for name, data in mine.items():
        (tmp_path / name).write_bytes(data)
    for number, steps in enumerate([range(1, 6), range(4, 8), range(1, 3)]):
        run_to_its_end(tmp_path / f"job{number}", here, [run_lines(steps)], job_id=f"j{number}")
    assert {name: (tmp_path / name).read_bytes() for name in mine} == mine
    assert len(rows(tmp_path / "Train_Samples_lr.csv")) == 3
    assert len(rows(tmp_path / "earlier-1" / "Train_Samples_lr.csv")) == 8


def test_a_name_of_several_lines_keeps_its_rows_when_a_run_goes_on(tmp_path: Path) -> None:
    logged = [log_line({"eval/two\nlines": float(step)}, step=step) for step in (1, 2, 3)]
    run_to_its_end(tmp_path / "job", CSV, [[*run_lines(range(1, 2)), *logged], run_lines(range(4, 5))])
    give(tmp_path / "job", CSV, run_lines(range(5, 6), first=False))
    assert [row[0] for row in rows(tmp_path / "out" / "run" / "eval_two_lines.csv")] == ["step", "16", "32", "48"]


def test_two_jobs_that_run_at_once_do_not_mix_their_rows(tmp_path: Path) -> None:
    first = give(tmp_path / "job1", CSV, run_lines(range(1, 4)), job_id="j1")
    with pytest.raises(TrackerProblem, match=r"job j1 writes into .*/out/run; give each job a `job_name` of its own"):
        give(tmp_path / "job2", CSV, run_lines(range(1, 6)), job_id="j2")
    assert contents(tmp_path / "out" / "run") == undisturbed(tmp_path, steps=3)
    first.close()
    run_to_its_end(tmp_path / "job2", CSV, [], job_id="j2")
    assert [row[0] for row in rows(tmp_path / "out" / "run" / "Train_Samples_lr.csv")[1:]] == [
        "16",
        "32",
        "48",
        "64",
        "80",
    ]


def test_a_folder_that_takes_no_rows_for_a_while_has_the_earlier_files_moved_once(tmp_path: Path) -> None:
    run = tmp_path / "out" / "run"
    run_to_its_end(tmp_path / "job1", CSV, [run_lines(range(1, 4))], job_id="j1")
    in_the_way = run / "eval_f1.csv"
    in_the_way.mkdir()
    job = tmp_path / "job2"
    feed = give(job, CSV, [], job_id="j2")
    append_records(job, [*run_lines(range(1, 6)), log_line({"eval/f1": 0.5}, step=5)])
    for _ in range(3):
        with pytest.raises(TrackerProblem, match="IsADirectoryError"):
            feed.give()
    in_the_way.rmdir()
    feed.give()
    assert [path.name for path in run.glob("earlier-*")] == ["earlier-1"]
    in_the_way.unlink()
    assert contents(run) == undisturbed(tmp_path, steps=5)
