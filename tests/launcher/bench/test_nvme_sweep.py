"""Every setting is tried on a real file, the fastest is chosen, and nothing is left behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsrun.direct_io.settings import IoSettings
from dsrun.errors import LaunchError
from dsrun.launcher.bench.figure import figure
from dsrun.launcher.bench.nvme_sweep import SettingFigures, Trial, bytes_under_way, choose, sweep

MIB = 1 << 20


def test_all_settings_are_tried_and_the_folders_left_as_they_were(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    found = sweep([str(folder) for folder in folders], size_bytes=9 * MIB, seconds=0.01)
    assert found.paths == tuple(str(folder) for folder in folders)
    assert found.file_bytes == 8 * MIB
    assert len({trial.settings for trial in found.trials}) == len(found.trials) == 13
    assert all(trial.write > 0 and trial.read > 0 for trial in found.trials)
    assert found.best.settings in [trial.settings for trial in found.trials]
    assert found.best.write.repetitions == found.floor.read.repetitions == 3
    assert found.floor.settings == IoSettings(block_bytes=16 * MIB, queue_depth=1, threads=2)
    assert [os.listdir(folder) for folder in folders] == [[], []]


def measured(rate: float, **settings: int) -> SettingFigures:
    rates = figure("either", "B/s", [rate] * 3)
    return SettingFigures(settings=IoSettings(**settings), write=rates, read=rates)


def test_of_settings_as_good_as_each_other_that_with_less_under_way_is_chosen() -> None:
    deep, usual, slow = measured(100, queue_depth=32), measured(98), measured(96, queue_depth=4)
    assert [bytes_under_way(one.settings) // MIB for one in (deep, usual, slow)] == [32, 8, 4]
    assert choose([deep, usual, slow]) is usual
    assert choose([deep, slow]) is deep


def test_writing_and_reading_count_alike() -> None:
    assert Trial(settings=IoSettings(), write=6.0, read=3.0).both == pytest.approx(4.0)


def test_a_file_too_small_to_measure_with_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"3.0 MiB are too little to measure with; expected 4.0 MiB") as caught:
        sweep([str(tmp_path)], size_bytes=3 * MIB, seconds=0.01)
    assert caught.value.hint == "make room, or name a larger `--size`"


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="no: cannot be measured: No such file or directory"):
        sweep([str(tmp_path / "no")], size_bytes=8 * MIB, seconds=0.01)
