from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsrun.errors import UsageError
from dsrun.launcher.jobs.front_end_process import front_end_of
from dsrun.launcher.jobs.record import JobRecord, ProcessMark
from support.job_records import a_record

DEADLINE_S = 30.0


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """Somebody who waits."""
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as started:
        yield started
        started.kill()


@pytest.fixture
def record(tmp_path: Path, process: subprocess.Popen[bytes]) -> JobRecord:
    mark = ProcessMark.of(process.pid)
    assert mark is not None
    return a_record(tmp_path, front_end=mark)


def test_a_signal_reaches_the_front_end_and_its_end_is_waited_for(
    record: JobRecord, process: subprocess.Popen[bytes]
) -> None:
    with front_end_of(record) as front_end:
        assert not front_end.wait(0)
        assert front_end.send(signal.SIGTERM)
        assert front_end.wait(DEADLINE_S)
        process.wait()
        assert not front_end.send(signal.SIGTERM)
    assert process.returncode == -signal.SIGTERM
    with front_end_of(record) as gone:
        assert not gone.send(signal.SIGTERM)
        assert gone.wait(0)


@pytest.mark.parametrize("changes", [{"start_ticks": 1}, {"boot_id": "another"}])
def test_another_process_of_its_number_is_left_alone(
    record: JobRecord, process: subprocess.Popen[bytes], changes: dict[str, object]
) -> None:
    other = dataclasses.replace(record, front_end=dataclasses.replace(record.front_end, **changes))  # type: ignore[arg-type]
    with front_end_of(other) as front_end:
        assert not front_end.send(signal.SIGKILL)
    assert process.poll() is None


def test_a_job_of_another_host_is_not_looked_for_here(record: JobRecord) -> None:
    far = dataclasses.replace(record, host="far")
    with pytest.raises(UsageError, match=f"runs on far, and this is {os.uname().nodename}"), front_end_of(far):
        pass
