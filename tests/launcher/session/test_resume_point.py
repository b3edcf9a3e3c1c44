from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from dsrun.contract.environment import CHECKPOINT_EVENT
from dsrun.contract.job_paths import JobPaths
from dsrun.errors import LaunchError
from dsrun.launcher.hosts.spec import HostSpec
from dsrun.launcher.session.resume_point import ResumePoint, ResumeSearch, find_checkpoint, recorded_checkpoints
from dsrun.launcher.transport.base import Channel
from dsrun.launcher.transport.local import LocalTransport
from support.channels import RememberingChannels
from support.stores import registered

HERE = HostSpec(name="here", slots=1, source="test")


class Unreachable:
    """No host can be reached."""

    def start(self, host: HostSpec, argv: Sequence[str]) -> Channel:
        raise LaunchError(f"host {host.name}: no route")


def find(folder: Path, *, apart: bool = False, reachable: bool = False) -> ResumeSearch:
    """Searches; `reachable` is a host of rank 0 that sees what is here."""
    transport = RememberingChannels(LocalTransport()) if reachable else Unreachable()
    points = recorded_checkpoints(str(folder))
    try:
        return find_checkpoint(points, HERE, transport, python=sys.executable, apart=apart)
    finally:
        if isinstance(transport, RememberingChannels):
            transport.end_all()


def newest_checkpoint(folder: str) -> ResumePoint | None:
    found = find(Path(folder))
    assert found.doubt is None
    return found.point


def save(folder: Path, tag: str, *, complete: bool = True, time: float = 1.0) -> str:
    target = folder / "checkpoints" / tag
    target.mkdir(parents=True, exist_ok=True)
    if complete:
        (target / "index.json").write_text("{}")
    note(folder, str(target), time=time)
    return str(target)


def note(folder: Path, path: str, *, time: float) -> None:
    with JobPaths(folder).records.open("a") as file:
        file.write(json.dumps({"event": "step", "time": time, "step": 3}) + "\n")
        file.write(json.dumps({"event": CHECKPOINT_EVENT, "time": time, "path": path, "step": 3}) + "\n")


def test_a_job_without_records_has_nowhere_to_go_on_from(tmp_path: Path) -> None:
    assert newest_checkpoint(str(tmp_path)) is None


def test_the_newest_save_that_is_complete_counts(tmp_path: Path) -> None:
    save(tmp_path, "step10")
    newest = save(tmp_path, "step20")
    save(tmp_path, "step30", complete=False)
    found = find(tmp_path, reachable=True)
    assert found.point is not None
    assert (found.point.folder, found.doubt) == (newest, None)


def test_what_only_the_host_of_rank_0_can_see_is_asked_of_it(tmp_path: Path) -> None:
    older = save(tmp_path, "step10")
    save(tmp_path, "step20", complete=False)
    found = find(tmp_path, apart=True, reachable=True)
    assert found.point is not None
    assert (found.point.folder, found.doubt) == (older, None)


def test_a_host_that_has_none_any_more_is_believed(tmp_path: Path) -> None:
    save(tmp_path, "step10", complete=False)
    assert find(tmp_path, apart=True, reachable=True) == ResumeSearch(None)


def test_a_host_that_cannot_be_asked_is_trusted_and_the_doubt_is_told(tmp_path: Path) -> None:
    # What is here under the path is of another machine, and says nothing.
    save(tmp_path, "step10")
    recorded = save(tmp_path, "step20", complete=False)
    found = find(tmp_path, apart=True)
    assert found.point is not None
    assert found.point.folder == recorded
    assert found.doubt == "here could not be asked whether it is still there: no route"


def test_a_host_that_cannot_be_asked_gives_way_to_what_is_surely_complete(tmp_path: Path) -> None:
    older = save(tmp_path, "step10")
    save(tmp_path, "step20", complete=False)
    found = find(tmp_path)
    assert found.point is not None
    assert (found.point.folder, found.doubt) == (older, None)


def test_a_second_save_into_the_same_folder_is_another_one(tmp_path: Path) -> None:
    save(tmp_path, "last", time=1.0)
    first = newest_checkpoint(str(tmp_path))
    save(tmp_path, "last", time=2.0)
    second = newest_checkpoint(str(tmp_path))
    assert first is not None
    assert second is not None
    assert first.folder == second.folder
    assert first.identity != second.identity


@pytest.mark.parametrize(
    "rest", ['{"event": "checkpoint", "pa', '{"event": "checkpoint", "path": 3}', "[]", '"checkpoint"']
)
def test_a_line_that_was_cut_off_or_makes_no_sense_is_passed_over(tmp_path: Path, rest: str) -> None:
    whole = save(tmp_path, "step10")
    with JobPaths(tmp_path).records.open("a") as file:
        file.write(rest)
    found = newest_checkpoint(str(tmp_path))
    assert found is not None
    assert found.folder == whole


def test_a_store_is_asked_itself_whether_a_checkpoint_is_still_there(tmp_path: Path) -> None:
    with registered() as held:
        for step in (10, 20, 30):
            note(tmp_path, f"shaky://bucket/run/step{step}", time=float(step))
            if step < 30:
                held.put(f"bucket/run/step{step}/index.json", b"{}")
        assert newest_checkpoint(str(tmp_path)) == ResumePoint(
            "shaky://bucket/run/step20", "shaky://bucket/run/step20@20.0"
        )
        held.fails = lambda what, name: PermissionError("Access Denied")
        found = find(tmp_path)
        assert found.point is not None
        assert found.point.folder == "shaky://bucket/run/step30"
        assert "the store could not be asked whether it is still there" in (found.doubt or "")
        assert "Access Denied" in (found.doubt or "")
        held.fails = lambda what, name: None
        held.files.clear()
        assert newest_checkpoint(str(tmp_path)) is None
        here = save(tmp_path, "step5")
        note(tmp_path, "shaky://bucket/run/step40", time=40.0)
        found = find(tmp_path, reachable=True)
        assert found.point is not None
        assert found.point.folder == here, "the newest that is there, wherever it is"
