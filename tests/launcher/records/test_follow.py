from pathlib import Path

from dsrun.launcher.records.follow import RecordFollower, last_record


def test_a_follower_reads_each_line_once_and_a_half_line_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    follower = RecordFollower(path)
    assert list(follower.read()) == []
    path.write_text('{"event": "start"}\n{"event": "st')
    assert list(follower.read()) == [{"event": "start"}]
    assert list(follower.read()) == []
    with path.open("a") as file:
        file.write('ep", "step": 1}\n')
    assert list(follower.read()) == [{"event": "step", "step": 1}]
    assert follower.offset == path.stat().st_size


def test_a_follower_passes_over_torn_lines_and_goes_on_from_where_another_was(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text('{"a": 1}\n{"torn\n[1]\n\n{"b": 2}\n')
    first = RecordFollower(path)
    assert next(first.read()) == {"a": 1}
    assert list(RecordFollower(path, offset=first.offset).read()) == [{"b": 2}]


def test_lines_longer_than_a_chunk_are_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    long = "x" * (3 << 20)
    path.write_text(f'{{"text": "{long}"}}\n{{"next": 1}}\n')
    assert list(RecordFollower(path).read()) == [{"text": long}, {"next": 1}]


def test_the_newest_record_of_an_event_is_found_from_the_end(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    assert last_record(path, "step", with_number="step") is None
    lines = ['{"event": "step", "step": 1}', '{"event": "step", "step": 2}', '{"event": "step"}', '{"event": "log"}']
    path.write_text("\n".join([*lines, '{"event": "step", "st']))
    assert last_record(path, "step", with_number="step") == {"event": "step", "step": 2}
    assert last_record(path, "checkpoint", with_number="step") is None
