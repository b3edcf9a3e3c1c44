"""Hosts are brought to hold what is here: one question where nothing differs, only what differs elsewhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dsrun.errors import LaunchError, UsageError
from dsrun.launcher.hosts.spec import HostSpec
from dsrun.launcher.survey.client import Answer, Survey
from dsrun.launcher.sync.hosts import HostSyncResult, SyncResult, sync_hosts, synced_lines
from dsrun.launcher.transport.base import Channel, Transport
from dsrun.launcher.transport.local import LocalTransport

_NEEDS_RSYNC = pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed")


class CountingSurvey(Survey):
    """Counts questions by name."""

    def __init__(self, hosts: Sequence[HostSpec], transport: Transport) -> None:
        super().__init__(hosts, transport, python=sys.executable)
        self.asked: Counter[str] = Counter()

    def ask(self, question: str, arguments: Any, **options: Any) -> dict[str, Answer]:
        """See `Survey`."""
        self.asked[question] += 1
        return super().ask(question, arguments, **options)


class Starts:
    """Starts commands on this machine, and remembers which."""

    def __init__(self, refuse: str = "") -> None:
        self.words: list[list[str]] = []
        self._refuse = refuse
        self._local = LocalTransport()

    def start(self, host: HostSpec, argv: Sequence[str]) -> Channel:
        """See `Transport`."""
        self.words.append(list(argv))
        if self._refuse and any(self._refuse in word for word in argv):
            raise LaunchError(f"host {host.name}: no second connection")
        return self._local.start(host, argv)

    def close(self) -> None:
        """See `Transport`."""


class Site:
    """A working folder, and one host: this machine, with another folder."""

    def __init__(self, place: Path) -> None:
        self.here = place / "here"
        self.there = place / "there"
        self.host = HostSpec(name="n1", slots=1, source="test")
        self.survey = CountingSurvey([self.host], LocalTransport())
        self.starts = Starts()

    def put(self, path: str, data: bytes, mode: int = 0o644) -> None:
        file = self.here / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        file.chmod(mode)

    def sync(self, *, by: str = "survey") -> HostSyncResult:
        synced = self.try_sync(by=by)
        assert synced.problems == ()
        (host,) = synced.hosts
        return host

    def try_sync(self, *, by: str = "survey") -> SyncResult:
        self.survey.asked.clear()
        return sync_hosts(
            self.survey,
            [self.host],
            folder=str(self.here),
            target=str(self.there),
            rsync_by=self.starts if by == "rsync" else None,
            rsync_from_bytes=0,
        )

    def contents(self, folder: Path) -> dict[bytes, tuple[int, bytes]]:
        """Modes and contents by name; of links where they lead."""
        found: dict[bytes, tuple[int, bytes]] = {}
        for root, folders, files in os.walk(os.fsencode(folder)):
            for name in [*files, *(name for name in folders if os.path.islink(os.path.join(root, name)))]:
                place = os.path.join(root, name)
                mode = os.lstat(place).st_mode
                with_link = os.readlink(place) if os.path.islink(place) else Path(os.fsdecode(place)).read_bytes()
                found[os.path.relpath(place, os.fsencode(folder))] = (mode, with_link)
        return found

    def is_equal(self) -> bool:
        return self.contents(self.here) == self.contents(self.there)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Site]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made = Site(tmp_path)
    made.put("train.py", b"train")
    made.put("pkg/a.py", b"a")
    made.put("run.sh", b"run", 0o755)
    with made.survey:
        yield made


@pytest.fixture(params=["survey", pytest.param("rsync", marks=_NEEDS_RSYNC)])
def by(request: pytest.FixtureRequest) -> str:
    return request.param


def test_an_unchanged_tree_takes_one_question(site: Site, by: str) -> None:
    first = site.sync(by=by)
    assert (first.files, first.size, first.how) == (3, 9, by)
    assert site.is_equal()
    second = site.sync(by=by)
    assert (second.files, second.how) == (0, "nothing")
    assert site.survey.asked == {"compare": 1}


def test_only_what_differs_is_sent(site: Site, by: str) -> None:
    site.sync(by=by)
    untouched = (site.there / "run.sh").stat().st_ino
    site.put("train.py", b"longer than it was")
    site.put("new/deep/file", b"")
    site.put("pkg/a.py", b"a", 0o600)
    sent = site.sync(by=by)
    assert (sent.files, sent.size, sent.how, sent.notes) == (2, 18, by, ())
    assert site.is_equal()
    assert (site.there / "run.sh").stat().st_ino == untouched


def test_permissions_alone_send_nothing(site: Site) -> None:
    site.sync()
    site.put("train.py", b"train", 0o600)
    assert (site.sync().files, site.is_equal()) == (0, True)
    assert "sync_write" not in site.survey.asked


def test_what_is_gone_or_renamed_here_is_so_there_and_other_files_stay(site: Site, by: str) -> None:
    site.sync(by=by)
    (site.there / "results.txt").write_text("of a run")
    (site.here / "pkg" / "a.py").unlink()
    (site.here / "train.py").rename(site.here / "main.py")
    done = site.sync(by=by)
    assert (done.files, done.deleted) == (1, 2)
    assert sorted(os.listdir(site.there)) == ["main.py", "results.txt", "run.sh"]
    assert synced_lines(SyncResult((done,), (), ()))[0].startswith("sync: n1: 1 file (5 B), 2 deleted in ")


def test_a_file_that_is_ignored_now_stays_where_it_is(site: Site) -> None:
    site.sync()
    # Git leaves it out, but it is here: on a folder that all hosts share, this would be the file itself.
    site.put(".gitignore", b"run.sh\n")
    subprocess.run(["git", "init", "-q"], cwd=site.here, check=True)
    assert site.sync().deleted == 0
    assert (site.there / "run.sh").read_bytes() == b"run"


def test_a_folder_may_become_a_link_and_a_link_a_folder(site: Site, by: str) -> None:
    site.sync(by=by)
    (site.here / "pkg").rename(site.here.with_name("elsewhere"))
    (site.here / "pkg").symlink_to("../elsewhere")
    assert site.sync(by=by).deleted == 1
    assert site.is_equal()
    (site.here / "pkg").unlink()
    site.put("pkg/b.py", b"b")
    assert site.sync(by=by).deleted == 1
    assert site.is_equal()


def test_a_file_that_was_changed_there_is_replaced_and_said(site: Site, by: str) -> None:
    site.sync(by=by)
    (site.there / "train.py").write_text("fixed on the host")
    done = site.sync(by=by)
    assert done.notes == ("`train.py` had another content and was replaced",)
    assert site.is_equal()
    assert synced_lines(SyncResult((done,), (), ()))[1:] == [f"sync: host n1: {done.notes[0]}"]


def test_a_file_that_was_changed_there_is_kept_when_it_is_gone_here(site: Site) -> None:
    site.sync()
    (site.there / "train.py").write_text("changed there")
    (site.here / "train.py").unlink()
    site.put("run.sh", b"run 2", 0o755)
    assert site.sync().notes == ("`train.py` is gone here, but was changed there and stays",)
    assert (site.there / "train.py").read_text() == "changed there"
    again = site.sync()
    assert (again.how, again.notes) == ("nothing", ("`train.py` is gone here, but was changed there and stays",))


def test_names_and_contents_of_any_bytes_arrive(site: Site, by: str) -> None:
    site.there = site.there.with_name("the*re [x] $(id); 'q' \"\n ö")
    site.here = site.here.rename(site.here.with_name("he:re; $(id) 'q'\n ö"))
    names = [b"with blank", b"new\nline", b"\xff\xfe", b"-rf", b"#x", b";y", b"'q\"", b"a\\b", b"*", b"d \xff/$(id)"]
    for name in names:
        site.put(os.fsdecode(name), name + b"\0\r\n")
    (site.here / "link").symlink_to("with blank")
    (site.here / "dangling").symlink_to(os.fsdecode(b"/no\xffwhere"))
    (site.here / "folder").symlink_to("pkg")
    done = site.sync(by=by)
    assert (done.how, done.files) == (by, len(names) + 3 + 3)
    assert site.is_equal()
    assert site.sync(by=by).how == "nothing"


def test_a_large_file_arrives_in_pieces(site: Site, by: str) -> None:
    block = os.urandom(1 << 16)
    site.put("weights.bin", b"".join(index.to_bytes(4, "big") + block for index in range(800)))
    done = site.sync(by=by)
    assert done.size > 50 << 20
    assert site.is_equal()
    assert site.survey.asked["sync_write"] == (0 if by == "rsync" else 26)


@_NEEDS_RSYNC
def test_little_is_sent_without_rsync(site: Site) -> None:
    done = sync_hosts(site.survey, [site.host], folder=str(site.here), target=str(site.there), rsync_by=site.starts)
    assert [host.how for host in done.hosts] == ["survey"]
    assert site.starts.words == []


@_NEEDS_RSYNC
def test_no_path_is_part_of_what_rsync_runs_there(site: Site) -> None:
    site.put("a b", b"x")
    site.sync(by="rsync")
    ((shell, _, script, _, target, program, *options),) = site.starts.words
    assert (shell, script, target) == ("/bin/sh", 'cd "$1" && shift && exec "$@"', str(site.there))
    assert os.path.isabs(program)
    assert options[0] == "--server"
    assert not any("/" in option for option in options)


@_NEEDS_RSYNC
def test_where_rsync_fails_files_are_sent_without_it(site: Site) -> None:
    site.starts = Starts(refuse="--server")
    done = site.sync(by="rsync")
    assert done.how == "survey"
    assert done.notes == ("rsync failed, so files were sent without it: host n1: no second connection",)
    assert site.is_equal()


def test_without_rsync_on_the_host_files_are_sent_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    site = Site(tmp_path)
    site.put("train.py", b"train")
    with site.survey:
        assert site.sync(by="rsync").how == "survey"
    assert site.starts.words == []


def test_a_folder_that_is_shared_costs_one_question(site: Site) -> None:
    site.there = site.here
    assert site.sync().how == "nothing"
    assert site.survey.asked == {"compare": 1}


def test_two_syncs_do_not_meet_in_one_folder(site: Site) -> None:
    site.sync()
    site.put("train.py", b"new")
    first = site.survey
    site.survey = CountingSurvey([site.host], LocalTransport())
    with site.survey:
        # The first one is still open.
        (problem,) = site.try_sync().problems
    assert problem.message == f"sync: host n1: another sync to {site.there} is under way there"
    site.survey = first
    assert site.sync().files == 1


def test_a_host_that_fails_is_named_and_the_others_are_brought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    site = Site(tmp_path)
    site.put("pkg/a.py", b"a")
    site.there.mkdir()
    (site.there / "pkg").write_text("in the way")
    hosts = [site.host, HostSpec(name="away", slots=1, source="test")]

    class Town(Starts):
        def start(self, host: HostSpec, argv: Sequence[str]) -> Channel:
            if host.name == "away":
                raise LaunchError("host away: connection refused", hint="is sshd running?")
            return super().start(host, argv)

    with CountingSurvey(hosts, Town()) as survey:
        done = sync_hosts(survey, hosts, folder=str(site.here), target=str(site.there), rsync_by=None)
        assert done.hosts == ()
        first, second = done.problems
        assert first.message.startswith(f"sync: host n1: in {site.there}, `pkg` is in the way")
        assert (second.message, second.hint) == ("sync: host away: connection refused", "is sshd running?")
        (site.there / "pkg").unlink()
        done = sync_hosts(survey, hosts, folder=str(site.here), target=str(site.there), rsync_by=None)
    assert [host.host for host in done.hosts] == ["n1"]
    assert [problem.message for problem in done.problems] == ["sync: host away: connection refused"]


def test_a_file_that_changes_meanwhile_is_a_problem_and_no_half_truth(site: Site) -> None:
    notes: list[str] = []

    def change(text: str) -> None:
        notes.append(text)
        site.put("train.py", b"changed while it was sent")

    done = sync_hosts(
        site.survey, [site.host], folder=str(site.here), target=str(site.there), rsync_by=None, note=change
    )
    assert notes == [f"sync: sending 3 files (9 B) to {site.there} on n1"]
    assert done.hosts == ()
    assert f"`train.py` in {site.there} is still not what it is here" in done.problems[0].message


def test_what_is_too_large_is_refused_before_any_host_is_asked(site: Site) -> None:
    with (site.here / "model.pt").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UsageError, match=r"model\.pt"):
        site.try_sync()
    assert not site.survey.asked


@_NEEDS_RSYNC
def test_hosts_that_wait_are_spoken_to(site: Site) -> None:
    spoken = threading.Event()

    class Slow(Starts):
        def start(self, host: HostSpec, argv: Sequence[str]) -> Channel:
            """See `Transport`."""
            assert spoken.wait(20), "somebody speaks to the host meanwhile"
            return super().start(host, argv)

    class Listening(CountingSurvey):
        def ask(self, question: str, arguments: Any, **options: Any) -> dict[str, Answer]:
            """See `Survey`."""
            answers = super().ask(question, arguments, **options)
            if question == "echo" and list(answers) == ["n1"]:
                spoken.set()
            return answers

    with Listening([site.host], LocalTransport()) as survey:
        done = sync_hosts(
            survey,
            [site.host],
            folder=str(site.here),
            target=str(site.there),
            rsync_by=Slow(),
            rsync_from_bytes=0,
            alive_every_s=0.05,
        )
    assert [host.how for host in done.hosts] == ["rsync"]


def test_hosts_alike_share_a_line() -> None:
    hosts = [HostSyncResult(host=f"n{n}", files=2, size=2048, how="survey", seconds=n / 2) for n in (1, 2)]
    hosts += [HostSyncResult(host="n3")]
    assert synced_lines(SyncResult(tuple(hosts), (), ("a note",))) == [
        "a note",
        "sync: n1, n2: 2 files (2.0 KiB) in 1.0s",
        "sync: n3: nothing to send",
    ]


def test_nothing_is_left_running(site: Site, by: str) -> None:
    site.sync(by=by)
    assert [thread.name for thread in threading.enumerate() if "serve" in thread.name or "bring" in thread.name] == []


def test_notes_about_the_tree_are_not_told_at_every_launch() -> None:
    assert synced_lines(SyncResult((HostSyncResult(host="n1"),), (), ("a note",))) == ["sync: n1: nothing to send"]
