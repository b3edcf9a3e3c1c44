"""rsync reaches a host by any transport, and says why where it cannot."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from dsrun.errors import LaunchError
from dsrun.launcher.hosts.spec import HostSpec
from dsrun.launcher.sync.rsync import copy_by_rsync, is_here
from dsrun.launcher.transport.base import Channel, Transport
from dsrun.launcher.transport.local import LocalTransport

pytestmark = pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed")

HOST = HostSpec(name="n1", slots=1, source="test")


class Away:
    """No host is there."""

    def start(self, host: HostSpec, argv: Sequence[str]) -> Channel:
        """See `Transport`."""
        raise LaunchError(f"host {host.name}: connection refused")

    def close(self) -> None:
        """See `Transport`."""


def copy(tmp_path: Path, *paths: str, transport: Transport | None = None, program: str | None = None) -> str | None:
    (tmp_path / "there").mkdir(exist_ok=True)
    with ExitStack() as keep:
        return copy_by_rsync(
            paths,
            folder=str(tmp_path / "here"),
            host=HOST,
            transport=LocalTransport() if transport is None else transport,
            target=str(tmp_path / "there"),
            program=program or shutil.which("rsync") or "",
            keep=keep,
        )


@pytest.fixture(autouse=True)
def here(tmp_path: Path) -> Path:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "a").write_text("a")
    return tmp_path / "here"


def test_only_what_is_named_is_copied(tmp_path: Path, here: Path) -> None:
    (here / "b").write_text("b")
    assert is_here()
    assert copy(tmp_path, "a") is None
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["a"]


def test_an_equal_size_and_time_is_no_reason_to_keep_a_file(tmp_path: Path, here: Path) -> None:
    assert copy(tmp_path, "a") is None
    (tmp_path / "there" / "a").write_text("x")
    shutil.copystat(here / "a", tmp_path / "there" / "a")
    assert copy(tmp_path, "a") is None
    assert (tmp_path / "there" / "a").read_text() == "a"


def test_a_file_that_is_not_here_is_told(tmp_path: Path) -> None:
    assert "No such file" in str(copy(tmp_path, "none"))


def test_a_host_that_is_not_reached_is_told(tmp_path: Path) -> None:
    assert copy(tmp_path, "a", transport=Away()) == "host n1: connection refused"


def test_a_program_that_is_no_rsync_is_told(tmp_path: Path) -> None:
    assert copy(tmp_path, "a", program="/bin/false") is not None


def test_what_cannot_be_written_there_is_told_in_the_words_of_the_rsync_there(tmp_path: Path, here: Path) -> None:
    (here / "b").write_text("b")
    (tmp_path / "there" / "a" / "in the way").mkdir(parents=True)
    assert str(copy(tmp_path, "a", "b")).endswith(": a")
    assert (tmp_path / "there" / "b").read_text() == "b"


def test_variables_of_rsync_do_not_lead_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RSYNC_RSH", "false")
    monkeypatch.setenv("RSYNC_PROTECT_ARGS", "0")
    assert copy(tmp_path, "a") is None


def test_the_interpreter_may_lie_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / 'it\'s; $(id) "x"'
    place.mkdir()
    (place / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (place / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(place / "python"))
    assert copy(tmp_path, "a") is None


def test_rsync_ends_with_its_front_end(tmp_path: Path, here: Path) -> None:
    # The host never answers, so that rsync waits; then the front end is gone without a word.
    code = """
import os, sys, threading
from contextlib import ExitStack
from dsrun.launcher.hosts.spec import HostSpec
from dsrun.launcher.sync.rsync import copy_by_rsync
class Silent:
    def start(self, host, argv):
        print("asked", flush=True)
        threading.Event().wait()
    def close(self): pass
copy_by_rsync(["a"], folder=sys.argv[1], host=HostSpec(name="n1", slots=1, source="test"), transport=Silent(),
              target="/", program="rsync", keep=ExitStack())
"""
    with subprocess.Popen([sys.executable, "-c", code, str(here)], stdout=subprocess.PIPE) as front_end:
        assert front_end.stdout is not None
        assert front_end.stdout.readline() == b"asked\n"
        left = psutil.Process(front_end.pid).children(recursive=True)
        assert {process.name() for process in left} >= {"rsync"}
        front_end.kill()
    _, alive = psutil.wait_procs(left, timeout=20)
    assert alive == []
