"""A host takes in files whole, deletes only what a sync has put there, and writes through no link."""

from __future__ import annotations

import base64
import os
import stat
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dsrun.launcher.survey.server import answer
from dsrun.launcher.sync.tree_digest import Entry, read_tree

_QUIET = {"missing": [], "different": [], "modes": [], "changed": [], "gone": [], "kept": []}


class Host:
    """The questions of one sync after the other, to a surveyor in this process."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self._keep = ExitStack()

    def ask(self, question: str, **arguments: Any) -> Any:
        said = answer({"ask": question, "arguments": {"target": str(self.target), **arguments}}, self._keep)
        assert "fault" not in said, said["fault"]
        return said["answer"]

    def fault(self, question: str, **arguments: Any) -> str:
        said = answer({"ask": question, "arguments": {"target": str(self.target), **arguments}}, self._keep)
        return str(said["fault"])

    def compare(self, folder: Path) -> dict[str, Any]:
        """Without what is empty, and without rsync."""
        said = self.ask("compare", entries=entries_of(folder))
        return {name: paths for name, paths in said.items() if name != "rsync" and paths}

    def sync(self, folder: Path, *paths: str, gone: tuple[str, ...] = ()) -> list[str]:
        entries = entries_of(folder)
        begun = self.ask("sync_begin", send={path: entries[path] for path in paths}, modes={}, gone=list(gone))
        for number, path in enumerate(paths):
            self.write(path, (folder / path).read_bytes(), f".dsrun-{number}")
        self.ask("sync_end", entries=entries, sent=list(paths))
        self.hang_up()
        return begun["deleted"]

    def write(self, path: str, data: bytes, name: str, *, offset: int = 0, mode: int | None = 0o640) -> None:
        self.ask("sync_write", pieces=[[path, name, offset, base64.b64encode(data).decode(), mode]])

    def hang_up(self) -> None:
        self._keep.close()


def entries_of(folder: Path) -> dict[str, Any]:
    return {path: entry.to_json() for path, entry in read_tree(str(folder)).entries.items()}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    folder = tmp_path / "here"
    (folder / "pkg").mkdir(parents=True)
    (folder / "train.py").write_text("train")
    (folder / "pkg" / "a.py").write_text("a")
    for path in ("train.py", "pkg/a.py"):
        (folder / path).chmod(0o640)
    return folder


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Host]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made = Host(tmp_path / "there" / "work")
    yield made
    made.hang_up()


def test_what_differs_is_told_by_kind(here: Path, host: Host) -> None:
    assert host.compare(here) == {"missing": ["pkg/a.py", "train.py"]}
    assert not host.target.exists()
    host.sync(here, "train.py", "pkg/a.py")
    assert host.compare(here) == {}
    (host.target / "train.py").write_text("other")
    (host.target / "pkg" / "a.py").chmod(0o600)
    assert host.compare(here) == {"different": ["train.py"], "changed": ["train.py"], "modes": ["pkg/a.py"]}
    (here / "pkg" / "a.py").write_text("new")
    assert host.compare(here)["different"] == ["pkg/a.py", "train.py"]
    assert host.compare(here)["changed"] == ["train.py"]


def test_a_link_is_no_file_and_a_folder_is_none(here: Path, host: Host) -> None:
    host.sync(here, "train.py")
    (host.target / "train.py").unlink()
    (host.target / "train.py").symlink_to(here / "train.py")
    (host.target / "pkg" / "a.py").mkdir(parents=True)
    assert host.compare(here) == {"different": ["train.py"], "changed": ["train.py"], "missing": ["pkg/a.py"]}


def test_what_a_sync_has_put_there_is_deleted_with_its_folders(here: Path, host: Host) -> None:
    host.sync(here, "train.py", "pkg/a.py")
    (host.target / "pkg" / "mine.txt").write_text("not of a sync")
    (host.target / "results").write_text("not of a sync")
    (here / "pkg" / "a.py").unlink()
    assert host.compare(here) == {"gone": ["pkg/a.py"]}
    assert host.sync(here, gone=("pkg/a.py", "results", "pkg/mine.txt")) == ["pkg/a.py"]
    assert sorted(os.listdir(host.target)) == ["pkg", "results", "train.py"]
    assert os.listdir(host.target / "pkg") == ["mine.txt"]
    (here / "train.py").unlink()
    (host.target / "pkg" / "mine.txt").unlink()
    assert host.sync(here, gone=("train.py",)) == ["train.py"]
    assert host.compare(here) == {}


def test_a_folder_that_is_empty_then_goes_too(here: Path, host: Host) -> None:
    host.sync(here, "train.py", "pkg/a.py")
    (here / "pkg" / "a.py").unlink()
    host.sync(here, gone=("pkg/a.py",))
    assert os.listdir(host.target) == ["train.py"]


def test_what_was_changed_there_is_kept_when_it_is_gone_here(here: Path, host: Host) -> None:
    host.sync(here, "train.py", "pkg/a.py")
    (here / "pkg" / "a.py").unlink()
    (host.target / "pkg" / "a.py").write_text("changed there")
    assert host.compare(here) == {"kept": ["pkg/a.py"]}
    assert host.sync(here, gone=("pkg/a.py",)) == []
    assert (host.target / "pkg" / "a.py").read_text() == "changed there"


def test_what_a_broken_off_sync_left_still_counts_as_its_own(here: Path, host: Host) -> None:
    host.sync(here, "train.py", "pkg/a.py")
    for path in ("train.py", "pkg/a.py"):
        (here / path).write_text("new")
    entries = entries_of(here)
    host.ask("sync_begin", send=entries, modes={}, gone=[])
    host.write("train.py", b"new", ".dsrun-0")
    host.hang_up()
    (here / "train.py").unlink()
    # One was replaced already, the other was not yet.
    assert host.compare(here) == {"different": ["pkg/a.py"], "gone": ["train.py"]}


def test_a_file_appears_whole_and_nothing_stays_of_half_a_file(here: Path, host: Host) -> None:
    host.sync(here, "train.py")
    host.ask("sync_begin", send={"train.py": entries_of(here)["train.py"]}, modes={}, gone=[])
    host.write("train.py", b"ha", ".dsrun-0", mode=None)
    assert (host.target / "train.py").read_text() == "train"
    assert stat.S_IMODE((host.target / ".dsrun-0").stat().st_mode) == 0o600
    host.write("train.py", b"lf", ".dsrun-0", offset=2, mode=0o754)
    assert (host.target / "train.py").read_text() == "half"
    assert stat.S_IMODE((host.target / "train.py").stat().st_mode) == 0o754
    host.write("train.py", b"ha", ".dsrun-1", mode=None)
    host.hang_up()
    assert sorted(os.listdir(host.target)) == ["train.py"]


def test_a_file_that_cannot_be_written_is_named_as_it_is_called_here(here: Path, host: Host) -> None:
    entry = entries_of(here)["pkg/a.py"]
    host.ask("sync_begin", send={"pkg/a.py": entry}, modes={}, gone=[])
    (host.target / "pkg").rmdir()
    (host.target / "pkg").write_text("a file meanwhile")
    piece = ["pkg/a.py", ".dsrun-0", 0, base64.b64encode(b"a").decode(), 0o640]
    assert host.fault("sync_write", pieces=[piece]).startswith(f"{host.target}/pkg/a.py: ")
    host.hang_up()


def test_permissions_are_set_without_sending(here: Path, host: Host) -> None:
    host.sync(here, "train.py", "pkg/a.py")
    (here / "train.py").chmod(0o750)
    host.ask("sync_begin", send={}, modes={"train.py": 0o750}, gone=[])
    assert host.compare(here) == {}


def test_nothing_is_written_through_a_link(here: Path, host: Host, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    host.target.mkdir(parents=True)
    (host.target / "pkg").symlink_to(tmp_path / "elsewhere")
    said = host.fault("sync_begin", send=entries_of(here), modes={}, gone=[])
    assert "`pkg` is in the way" in said
    assert os.listdir(tmp_path / "elsewhere") == []


def test_what_is_in_the_way_is_named_and_an_empty_folder_is_not(here: Path, host: Host) -> None:
    (host.target / "train.py").mkdir(parents=True)
    (host.target / "pkg").write_text("a file")
    assert "`pkg` is in the way" in host.fault("sync_begin", send=entries_of(here), modes={}, gone=[])
    (host.target / "pkg").unlink()
    (host.target / "train.py").mkdir(exist_ok=True)
    (host.target / "train.py" / "x").touch()
    host.hang_up()
    assert "`train.py` is in the way" in host.fault("sync_begin", send=entries_of(here), modes={}, gone=[])


def test_a_file_makes_room_for_a_folder_if_a_sync_put_it_there(here: Path, host: Host) -> None:
    host.sync(here, "train.py")
    (here / "train.py").unlink()
    (here / "train.py").mkdir()
    (here / "train.py" / "x").write_text("x")
    (here / "train.py" / "x").chmod(0o640)
    assert host.sync(here, "train.py/x", "pkg/a.py", gone=("train.py",)) == ["train.py"]
    assert host.compare(here) == {}


def test_a_folder_is_made_below_one_that_is_there(here: Path, host: Host) -> None:
    host.target = Path("/dsrun-not-mounted/work")
    said = host.fault("sync_begin", send=entries_of(here), modes={}, gone=[])
    assert said == "cannot make /dsrun-not-mounted/work: there is no /dsrun-not-mounted"
    host.target = Path("work")
    assert "expected an absolute path" in host.fault("compare", entries={})


def test_the_record_is_private_and_outside_of_the_folder(here: Path, host: Host, tmp_path: Path) -> None:
    host.sync(here, "train.py")
    (record,) = (tmp_path / "state" / "dsrun" / "synced").glob("*.json")
    assert stat.S_IMODE(record.stat().st_mode) == 0o600
    assert stat.S_IMODE(record.parent.stat().st_mode) == 0o700
    assert os.listdir(host.target) == ["train.py"]


def test_a_path_out_of_the_folder_is_never_used(host: Host) -> None:
    outside = Entry(0o644, "0" * 40, 1).to_json()
    for path in ("../x", "/etc/x", "a//b", ""):
        assert "below the folder" in host.fault("compare", entries={path: outside})
