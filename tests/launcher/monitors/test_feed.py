"""A tracker is given every record once: also one that fails for a while, or whose process was killed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from dsrun.contract.job_paths import JobPaths
from dsrun.launcher.masking import Masker
from dsrun.launcher.monitors.feed import Feed, Word, follow
from dsrun.launcher.monitors.state import StateFile
from dsrun.launcher.monitors.trackers.tracker import TrackedRun, TrackerProblem
from support.recorded_runs import append_records, run_lines
from support.trackers import calls, open_tracker, settings, steps


def a_feed(folder: Path, given: Path, *, secrets: Sequence[Mapping[str, str]] = (), **options: object) -> Feed:
    told = settings(given, **options)
    run = TrackedRun(job_id="j1", folder=str(folder), options=told.options)
    return Feed(folder, told, run, open_tracker, masker=Masker(secrets))


def ended_at_once(_timeout_s: float) -> Word:
    return Word.ENDED


def test_a_tracker_gets_each_step_once_and_one_call_for_what_is_there(tmp_path: Path) -> None:
    append_records(tmp_path, run_lines(range(1, 31)))
    feed = a_feed(tmp_path, tmp_path / "given")
    assert feed.give()
    assert not feed.give()
    append_records(tmp_path, run_lines(range(31, 33), first=False))
    assert feed.give()
    assert steps(tmp_path / "given") == [*range(1, 33)]
    assert len(calls(tmp_path / "given")) == 2


def test_half_a_line_is_given_once_it_is_whole(tmp_path: Path) -> None:
    append_records(tmp_path, run_lines(range(1, 3)))
    records = JobPaths(tmp_path).records
    whole = records.read_bytes()
    records.write_bytes(whole[:-9])
    feed = a_feed(tmp_path, tmp_path / "given")
    feed.give()
    assert steps(tmp_path / "given") == [1]
    records.write_bytes(whole)
    feed.give()
    assert steps(tmp_path / "given") == [1, 2]


def test_a_monitor_that_was_killed_goes_on_behind_what_is_written_down(tmp_path: Path) -> None:
    append_records(tmp_path, run_lines(range(1, 4)))
    a_feed(tmp_path, tmp_path / "given").give()
    append_records(tmp_path, run_lines(range(4, 6), first=False))
    again = a_feed(tmp_path, tmp_path / "given")
    again.give()
    assert steps(tmp_path / "given") == [1, 2, 3, 4, 5]
    # What the killed one may have given beyond that is to be taken back.
    assert [call[0]["after"] for call in calls(tmp_path / "given")] == [15, 48]
    assert again.state.kept == {"opened": 2}


def test_a_tracker_that_raises_is_opened_anew_and_catches_up(tmp_path: Path) -> None:
    append_records(tmp_path, run_lines(range(1, 4)))
    down = tmp_path / "down"
    down.touch()
    feed = a_feed(tmp_path, tmp_path / "given", raises=str(down))
    with pytest.raises(TrackerProblem, match="ConnectionError: the server"):
        feed.give()
    assert StateFile(tmp_path, settings(tmp_path)).read().step is None
    append_records(tmp_path, run_lines(range(4, 6), first=False))
    down.unlink()
    feed.give()
    assert steps(tmp_path / "given") == [1, 2, 3, 4, 5]


def test_a_key_that_a_long_failure_quotes_is_not_told_in_part(tmp_path: Path) -> None:
    key = "0123456789abcdef" * 3
    append_records(tmp_path, run_lines(range(1, 4)))
    feed = a_feed(
        tmp_path, tmp_path / "given", secrets=[{"MADE_UP_API_KEY": key}], says=f"\x1b[2J{'x' * 280} {key} is no key"
    )
    with pytest.raises(TrackerProblem) as caught:
        feed.give()
    assert key[:8] not in str(caught.value)
    assert str(caught.value).isprintable()
    assert "xxx ***" in str(caught.value)


def test_a_run_that_was_begun_is_found_again_though_it_took_nothing_yet(tmp_path: Path) -> None:
    append_records(tmp_path, run_lines(range(1, 4)))
    (tmp_path / "down").touch()
    with pytest.raises(TrackerProblem):
        a_feed(tmp_path, tmp_path / "given", raises=str(tmp_path / "down")).give()
    assert StateFile(tmp_path, settings(tmp_path)).read().kept == {"opened": 1}


def test_a_failure_that_repeats_is_told_once_and_tried_after_growing_waits(tmp_path: Path) -> None:
    append_records(tmp_path, run_lines(range(1, 3)))
    down = tmp_path / "down"
    down.touch()
    waits: list[float] = []
    notes: list[str] = []

    def words() -> Iterator[Word]:
        yield from [Word.NONE] * 8
        down.unlink()
        yield from [Word.NONE, Word.ENDED]

    said = words()

    def wait(timeout_s: float) -> Word:
        waits.append(timeout_s)
        return next(said)

    follow(a_feed(tmp_path, tmp_path / "given", raises=str(down)), wait, notes.append)
    assert waits == [1, 2, 4, 8, 15, 30, 60, 60, 60, 1]
    assert len(notes) == 2
    assert notes[0].endswith("tried again, training goes on")
    assert steps(tmp_path / "given") == [1, 2]


def test_at_the_end_of_a_job_all_is_given_and_the_tracker_is_closed(tmp_path: Path) -> None:
    append_records(tmp_path, run_lines(range(1, 3)))
    feed = a_feed(tmp_path, tmp_path / "given")
    follow(feed, ended_at_once, print)
    assert StateFile(tmp_path, settings(tmp_path)).read().closed
    assert steps(tmp_path / "given") == [1, 2]


def test_a_tracker_is_not_opened_for_a_job_without_records(tmp_path: Path) -> None:
    follow(a_feed(tmp_path, tmp_path / "given"), ended_at_once, print)
    assert StateFile(tmp_path, settings(tmp_path)).read().kept == {}


def test_steps_that_are_taken_again_are_told_with_what_the_tracker_does(tmp_path: Path) -> None:
    append_records(tmp_path, [*run_lines(range(1, 6)), *run_lines(range(4, 8))])
    notes: list[str] = []
    follow(a_feed(tmp_path, tmp_path / "given"), ended_at_once, notes.append, on_again="it keeps both")
    assert notes == ["steps from 4 on were taken again: it keeps both"]


def test_records_that_cannot_be_read_are_told_at_the_end(tmp_path: Path) -> None:
    append_records(tmp_path, [*run_lines(range(1, 3)), {"event": "step", "step": 3}, {"event": "step", "step": 4}])
    notes: list[str] = []
    follow(a_feed(tmp_path, tmp_path / "given"), ended_at_once, notes.append)
    assert notes == ["2 records are of another version or damaged, and were passed over"]
    assert steps(tmp_path / "given") == [1, 2]


def test_a_front_end_that_is_gone_ends_the_monitor_at_once(tmp_path: Path) -> None:
    down = tmp_path / "down"
    down.touch()
    append_records(tmp_path, run_lines(range(1, 3)))
    follow(a_feed(tmp_path, tmp_path / "given", raises=str(down)), lambda _s: Word.GONE, print)
    assert steps(tmp_path / "given") == []


def test_a_state_of_another_version_begins_anew(tmp_path: Path) -> None:
    file = StateFile(tmp_path, settings(tmp_path))
    JobPaths(tmp_path).monitor_state("made_up").write_text('{"schema_version": 99, "offset": 5}')
    assert file.read().offset == 0
