from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import pytest

from dsrun.contract.job_paths import JobPaths
from dsrun.errors import UsageError
from dsrun.launcher.jobs.lock import JobLock, is_locked
from dsrun.launcher.jobs.record import (
    JobRecord,
    ProcessMark,
    copy_config,
    new_record,
    read_json,
    read_record,
    started_record,
    write_record,
)
from support.job_records import NOW, a_plan, a_record


@pytest.mark.parametrize("started", [None, NOW])
def test_a_record_comes_back_as_it_was(tmp_path: Path, started: datetime | None) -> None:
    record = a_record(tmp_path, started=started, command=("run", "train.py", "\udcff\nä"), config="/c/ds.json")
    write_record(tmp_path, record)
    assert read_record(tmp_path) == record
    assert JobPaths(tmp_path).record.stat().st_mode & 0o777 == 0o600


def test_a_record_can_be_read_by_hand(tmp_path: Path) -> None:
    write_record(tmp_path, a_record(tmp_path))
    text = JobPaths(tmp_path).record.read_text()
    assert '  "created": "2026-11-21T07:33:00.000+00:00",\n' in text
    assert '  "user": "ada",\n' in text


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "{", '{"schema_version": 1}', '{"schema_version": 2}', "[" * 100_000, "\0"]
)
def test_what_is_no_record_is_none(tmp_path: Path, text: str) -> None:
    JobPaths(tmp_path).record.write_text(text)
    assert read_record(tmp_path) is None


def test_a_later_versions_new_fields_are_passed_over(tmp_path: Path) -> None:
    record = a_record(tmp_path)
    JobPaths(tmp_path).record.write_text(json.dumps(record.to_json() | {"colour": "blue"}))
    assert read_record(tmp_path) == record


def test_a_secret_of_the_environment_is_hidden_also_as_a_word_of_its_own(tmp_path: Path) -> None:
    word = "known-by-value"
    record = new_record(
        a_plan(tmp_path, words=("train", word)),
        words=("run", "train.py", "train", word),
        now=NOW,
        detached=False,
        queued=False,
        config=None,
        config_digest=None,
        transport="ssh",
        environ={"SITE_TOKEN": word},
    )
    assert (record.command, record.masked_words) == (("run", "train.py", "train", "***"), (3,))
    started = started_record(record, a_plan(tmp_path, words=("train", word)), now=NOW, environ={"SITE_TOKEN": word})
    for written in (record, started):
        write_record(tmp_path, written)
        assert word not in JobPaths(tmp_path).record.read_text()


def test_an_option_of_our_own_hides_no_word(tmp_path: Path) -> None:
    words = ("--accept-new-host-keys", "train.py", "--api-key", "abc")
    record = new_record(
        a_plan(tmp_path, words=("--api-key", "abc")),
        words=words,
        now=NOW,
        detached=False,
        queued=False,
        config=None,
        config_digest=None,
        transport="ssh",
        environ={},
        own_options={"--accept-new-host-keys"},
    )
    assert (record.command, record.masked_words) == ((*words[:3], "***"), (3,))


def test_times_keep_their_zone(tmp_path: Path) -> None:
    local = datetime.now(timezone.utc).astimezone().replace(microsecond=250_000)
    value = a_record(tmp_path, created=local).to_json()
    assert JobRecord.from_json(value).created == local


def test_a_lock_is_seen_by_others_until_it_is_let_go(tmp_path: Path) -> None:
    assert not is_locked(tmp_path)
    lock = JobLock(tmp_path)
    assert is_locked(tmp_path)
    assert is_locked(tmp_path)
    lock.release()
    assert not is_locked(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["job.lock"]


def test_a_lock_ends_with_its_holder_and_not_with_what_that_started(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, pathlib\n"
        "from dsrun.launcher.jobs.lock import JobLock\n"
        f"lock = JobLock(pathlib.Path({str(tmp_path)!r}))\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import sys; sys.stdin.read()'], stdin=0, stdout=2)\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert is_locked(tmp_path)
        holder.kill()
        holder.wait()
        assert not is_locked(tmp_path)


def test_a_pipe_in_place_of_the_lock_is_nobodys_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(JobPaths(tmp_path).lock)
    assert not is_locked(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="gone: cannot be locked: no such file or directory"):
        JobLock(tmp_path / "gone")


def test_a_process_is_told_from_another_of_its_number() -> None:
    mine = ProcessMark.of(os.getpid())
    assert mine is not None
    assert mine == ProcessMark.of(os.getpid())
    assert mine.start_ticks > 0
    child = subprocess.Popen([sys.executable, "-c", ""])
    # Not reaped yet: the number is taken, and nobody is behind it.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert ProcessMark.of(child.pid) is None
    child.wait()
    assert ProcessMark.of(child.pid) is None


def test_a_file_that_is_no_object_is_none(tmp_path: Path) -> None:
    assert read_json(tmp_path / "no") is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ds.json", '{"comet": {"api_key": "sEcReTsEcReT"}}'),
        ("ds.json", '// mine\n{"comet": {"api_key":\n "sEcReTsEcReT"}}\n'),
        ("ds.json", '// "api_key": "sEcReTsEcReT", is the old one\n{"comet": {"project": "a"}}\n'),
        ("ds.yaml", "comet: {enabled: true, api_key: sEcReTsEcReT, online: false}\n"),
        ("ds.yaml", "comet: {enabled: true, api_key: 'sEcReTsEcReT'}\n"),
        ("ds.yml", 'comet: {"api_key": sEcReTsEcReT}\n'),
        ("ds.yaml", "comet:\n  api_key: sEcReTsEcReT  # mine\n"),
        ("ds.yaml", "comet:\n  api_key: >-\n    sEcReTsEcReT\n"),
        ("ds.yaml", "# api_key: sEcReTsEcReT is the old one\ncomet:\n  project: a\n"),
        ("ds.yaml", "comet:\n  api_key: 'sEcReTsEcReT\n"),
    ],
)
def test_a_key_in_a_config_is_not_in_its_copy(tmp_path: Path, name: str, text: str) -> None:
    config = tmp_path / name
    config.write_text(text)
    copy_config(str(config), tmp_path)
    copy = JobPaths(tmp_path).config_copy.read_text()
    assert "sEcReTsEcReT" not in copy
    assert "***" in copy
