"""`latest` is a name alone; whether it is the one it was set to last is told by what indexes know."""

from __future__ import annotations

import shutil
from pathlib import Path

from dsrun.checkpoint_files.folder.latest import doubt_of_latest
from dsrun.checkpoint_files.parse import read_index
from support.savers import nothing, save_one, wanted, with_savers


def save(folder: Path, *steps: int) -> None:
    for step in steps:
        save_one(folder, f"global_step{step}", float(step))


def test_a_flipped_bit_that_makes_another_tags_name_of_it_is_told(tmp_path: Path) -> None:
    save(tmp_path, 2, 3)
    assert (tmp_path / "latest").read_text() == "global_step3", "the text is as it was"
    assert doubt_of_latest(tmp_path, "global_step3") is None
    assert doubt_of_latest(tmp_path, "global_step2") == (
        f"{tmp_path}/latest: it names global_step2, and global_step3 was the latest after it: a bit may have flipped, "
        "or somebody has changed it"
    )


def test_who_went_back_on_purpose_and_trained_on_is_left_alone(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    (tmp_path / "latest").write_text("global_step1\n")
    save(tmp_path, 5)
    assert read_index(tmp_path / "global_step5").values["latest"] == 2
    assert doubt_of_latest(tmp_path, "global_step5") is None


def test_removed_later_ones_those_that_were_never_the_latest_and_older_versions_raise_no_doubt(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    shutil.rmtree(tmp_path / "global_step2")
    assert doubt_of_latest(tmp_path, "global_step1") is None
    with_savers(
        1,
        lambda saver, rank: saver.save(
            tmp_path, "aside", lambda: wanted(7.0, rank=0, size=1, save_latest=False), progress=nothing
        ),
    )
    assert "latest" not in read_index(tmp_path / "aside").values
    assert doubt_of_latest(tmp_path, "global_step1") is None
    assert doubt_of_latest(tmp_path, "nowhere") is None
