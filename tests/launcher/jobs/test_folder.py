from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

import pytest

from dsrun.errors import UsageError
from dsrun.launcher.jobs.folder import jobs_folder, link_job, make_job_folder, new_job_id, remove_job


def test_job_ids_sort_by_time_and_avoid_look_alikes() -> None:
    ids = [
        new_job_id(datetime(2026, 11, 21, 7, 33), lambda letters: letters[0]),
        new_job_id(datetime(2026, 1, 2, 3, 4)),
    ]
    assert ids[0] == "20261121-0733-aaaa"
    assert ids[1].startswith("20260102-0304-")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"XDG_STATE_HOME": "/s", "HOME": "/h"}, "/s/dsrun/jobs"),
        ({"XDG_STATE_HOME": "relative", "HOME": "/h"}, "/h/.local/state/dsrun/jobs"),
        ({"HOME": "/h"}, "/h/.local/state/dsrun/jobs"),
    ],
)
def test_jobs_go_where_xdg_says(environ: dict[str, str], expected: str) -> None:
    assert jobs_folder(environ) == Path(expected)


def test_two_jobs_never_share_a_folder(tmp_path: Path) -> None:
    ids = iter(["a", "a", "b"])
    assert make_job_folder(tmp_path / "jobs", lambda: next(ids)) == ("a", tmp_path / "jobs" / "a")
    assert make_job_folder(tmp_path / "jobs", lambda: next(ids)) == ("b", tmp_path / "jobs" / "b")
    assert (tmp_path / "jobs" / "a").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_cannot_be_made_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file: cannot be made: file exists"):
        make_job_folder(tmp_path / "file", lambda: "a")


def test_a_job_elsewhere_is_made_known_and_removed_with_its_link(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path / "state")}
    folder = tmp_path / "mine" / "a"
    folder.mkdir(parents=True)
    assert link_job(folder, environ) is None
    link = jobs_folder(environ) / "a"
    assert link.resolve() == folder
    assert "file exists" in str(link_job(folder, environ))
    remove_job(folder, environ)
    assert (folder.exists(), link.is_symlink()) == (False, False)


def test_a_job_in_the_state_folder_needs_no_link(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    _, folder = make_job_folder(jobs_folder(environ), lambda: "a")
    assert link_job(folder, environ) is None
    assert not folder.is_symlink()
    remove_job(folder, environ)
    assert list(jobs_folder(environ).iterdir()) == []


def test_why_a_job_cannot_be_made_known_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "a"
    folder.mkdir()
    assert link_job(folder, {"XDG_STATE_HOME": str(tmp_path / "file")}) == f"{tmp_path}/file: not a directory"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_state_folder_of_another_user_is_refused_with_the_way_out(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    os.chown(state, 4321, 4321)
    with pytest.raises(UsageError, match=r"state folder: .*/state is a folder of user 4321, not yours") as raised:
        make_job_folder(state / "jobs", lambda: "a", own=state)
    assert raised.value.hint is not None
    assert "XDG_STATE_HOME" in raised.value.hint
    # Where the user has named the folder, that is theirs to judge.
    assert make_job_folder(tmp_path / "logs", lambda: "a") == ("a", tmp_path / "logs" / "a")
