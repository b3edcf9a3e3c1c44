"""A rank that said why it fails, and lives on, is overdue after its grace; nobody else's word counts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import psutil

from dsrun.contract.error_file import write_error_file
from dsrun.contract.job_paths import JobPaths
from dsrun.launcher.agent.start.worker import RankProcess
from dsrun.launcher.agent.watch.unfinished_failures import UnfinishedFailures

HERE = RankProcess(3, 0, psutil.Process())


def test_a_rank_is_overdue_once_its_grace_after_its_word_is_over(tmp_path: Path) -> None:
    words = UnfinishedFailures(str(tmp_path), grace_s=5.0)
    assert words.overdue([HERE], 10.0) == []
    write_error_file(JobPaths(tmp_path).error_file(3), ValueError("boom"))
    assert words.overdue([HERE], 20.0) == []
    assert words.overdue([HERE], 24.9) == []
    assert words.overdue([HERE], 25.0) == [HERE]
    assert words.overdue([HERE], 26.0) == []


def test_a_word_that_another_process_left_is_not_the_ranks(tmp_path: Path) -> None:
    path = JobPaths(tmp_path).error_file(3)
    words = UnfinishedFailures(str(tmp_path), grace_s=0.0)
    if (child := os.fork()) == 0:
        write_error_file(path, ValueError("of a fork"))
        os._exit(0)
    os.waitpid(child, 0)
    assert path.exists()
    assert words.overdue([HERE], 10.0) == []


def test_a_word_that_torchs_record_left_counts_once_nothing_can_catch_the_error(tmp_path: Path) -> None:
    path = JobPaths(tmp_path).error_file(3)
    extra = {"py_callstack": "Traceback ...", "timestamp": "1700000000"}
    path.write_text(json.dumps({"message": {"message": "ValueError: boom", "extraInfo": extra}}))
    words = UnfinishedFailures(str(tmp_path), grace_s=0.0)
    assert words.overdue([HERE], 10.0) == []
    assert not write_error_file(path, ValueError("boom"))
    assert words.overdue([HERE], 11.0) == [HERE]
