from pathlib import Path

from dsrun.launcher.records.run_history import Rewind, RunHistory, RunReader
from support.recorded_runs import (
    BEGIN_S,
    STEP_S,
    a_spread,
    a_step,
    a_wait,
    append_records,
    log_line,
    run_lines,
    start_line,
    step_line,
)


def test_a_history_has_what_was_written(tmp_path: Path) -> None:
    append_records(tmp_path, [*run_lines(range(1, 51)), log_line({"eval/loss": 2.5, "nan": None}, step=50)])
    history = RunReader(tmp_path).read()
    assert history.start is not None
    assert history.start["world_size"] == 4
    assert history.steps == [a_step(step) for step in range(1, 51)]
    assert history.spreads == [a_spread(20), a_spread(40)]
    assert history.waits == [a_wait(20), a_wait(40)]
    assert [each["step"] for each in history.checkpoints] == [50]
    assert [dict(each.values) for each in history.logs] == [{"eval/loss": 2.5, "nan": None}]
    assert history.rewinds == []
    assert history.unread == 0


def test_a_reader_goes_on_where_it_was(tmp_path: Path) -> None:
    reader = RunReader(tmp_path)
    assert reader.read().steps == []
    append_records(tmp_path, run_lines(range(1, 11)))
    assert len(reader.read().steps) == 10
    append_records(tmp_path, run_lines(range(11, 21), first=False))
    assert [each.step for each in reader.read().steps] == list(range(1, 21))


def test_steps_that_are_taken_again_count_once() -> None:
    history = RunHistory()
    history.take([*run_lines(range(1, 46)), log_line({"a": 1.0}, step=30), log_line({"a": 2.0}, step=45)])
    again = a_step(41, loss=9.0, time=BEGIN_S + 60)
    history.take([start_line(time=BEGIN_S + 50), step_line(again)])
    assert [each.step for each in history.steps] == list(range(1, 42))
    assert history.steps[-1] == again
    assert history.rewinds == [Rewind(step=41, steps=5, time=BEGIN_S + 60)]
    assert [each.step for each in history.spreads] == [20, 40]
    assert [dict(each.values) for each in history.logs] == [{"a": 1.0}]
    assert len(history.starts) == 2
    assert history.steps[39].time == BEGIN_S + 40 * STEP_S


def test_steps_of_a_second_engine_are_no_steps_of_the_first() -> None:
    history = RunHistory()
    history.take([*run_lines(range(1, 4)), {**step_line(a_step(1)), "engine": 1}, {**start_line(), "engine": 2}])
    assert [each.step for each in history.steps] == [1, 2, 3]
    assert (history.engines, len(history.starts), history.rewinds) == (3, 1, [])


def test_records_of_another_version_are_counted_and_passed_over() -> None:
    history = RunHistory()
    line = step_line(a_step(1))
    later = {**line, "step": 2, "a_later_field": [1]}
    earlier = {"event": "step", "step": 3}
    history.take([line, later, earlier, {"event": "spread"}, {"event": "something else"}])
    assert history.steps == [a_step(1), a_step(2, time=line["time"], samples=16, loss=line["loss"])]
    assert history.unread == 2
