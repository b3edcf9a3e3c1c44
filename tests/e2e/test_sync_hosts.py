"""The working folder comes to hosts over real ssh, with rsync and without, and what does not fit is told by host."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import pytest

from dsrun.launcher.hosts.spec import HostSpec
from dsrun.launcher.survey.client import Survey
from dsrun.launcher.sync.hosts import SyncResult, sync_hosts
from dsrun.launcher.transport.base import Channel, Transport
from dsrun.launcher.transport.ssh.connection import SshTransport
from dsrun.launcher.transport.ssh.openssh import OpensshTransport
from support.channels import RememberingChannels
from support.cli import run_dsrun
from support.namespaces import NetHost, Rig, hosts, why_no_hosts

_WHY_NOT = why_no_hosts()
pytestmark = [pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT)), pytest.mark.timeout(120)]

MakeTransport = Callable[[Rig], Transport]
#: Of each host its own.
_TARGET = "/tmp/site/work"


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Generator[Rig]:
    with hosts(2, tmp_path_factory.mktemp("rig")) as made:
        for host in made.hosts:
            settle(host)
            host.run("mkdir", "/tmp/site")
        yield made


def settle(host: NetHost, **variables: str) -> None:
    """Starts a host's server anew, with variables for those who log in; what dsrun keeps there is the host's own."""
    host.sshd.stop()
    given = {"XDG_STATE_HOME": "/run/state", **variables}
    host.sshd.start({"SetEnv": " ".join(f"{name}={value}" for name, value in given.items())})


def by_fabric(rig: Rig) -> Transport:
    return SshTransport(lease_s=15, config=rig.ssh_config)


def by_openssh(rig: Rig) -> Transport:
    return OpensshTransport(lease_s=15, config=rig.ssh_config)


@pytest.fixture(params=[by_fabric, by_openssh], ids=["fabric", "openssh"])
def transport(request: pytest.FixtureRequest, rig: Rig) -> Generator[RememberingChannels]:
    made = RememberingChannels(request.param(rig))
    yield made
    made.end_all()


@pytest.fixture(autouse=True)
def nothing_stays(rig: Rig) -> Generator[None]:
    yield
    for host in rig.hosts:
        host.run("rm", "-rf", _TARGET)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "folder"
    (made / "pkg").mkdir(parents=True)
    (made / "train.py").write_text("print('hello')")
    (made / "pkg" / os.fsdecode(b"odd \xff\n'$(id)'")).write_bytes(b"\0\xff")
    (made / "run.sh").write_text("true")
    (made / "run.sh").chmod(0o750)
    (made / "link").symlink_to("train.py")
    return made


def sync(rig: Rig, transport: Transport, folder: Path, *, target: str = _TARGET, rsync: bool = False) -> SyncResult:
    specs = [host.spec() for host in rig.hosts]
    with Survey(specs, transport, python=sys.executable) as survey:
        rsync_by = transport if rsync else None
        return sync_hosts(survey, specs, folder=str(folder), target=target, rsync_by=rsync_by, rsync_from_bytes=0)


def outline(here: NetHost | None, folder: str) -> str:
    """Names, modes and contents of a folder, on a host or here."""
    code = (
        "import os, sys, hashlib\n"
        "for root, folders, files in sorted(os.walk(os.fsencode(sys.argv[1]))):\n"
        "    for name in sorted(files):\n"
        "        place = os.path.join(root, name)\n"
        "        is_link = os.path.islink(place)\n"
        "        content = os.readlink(place) if is_link else open(place, 'rb').read()\n"
        "        relative = os.path.relpath(place, os.fsencode(sys.argv[1]))\n"
        "        print(relative, oct(os.lstat(place).st_mode), hashlib.sha256(content).hexdigest())\n"
    )
    words = [sys.executable, "-c", code, folder]
    if here is not None:
        return here.run(*words)
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("rsync", [False, True], ids=["survey", "rsync"])
def test_two_hosts_hold_what_is_here_and_only_changes_are_sent(
    rig: Rig, transport: RememberingChannels, folder: Path, rsync: bool
) -> None:
    (folder / "weights.bin").write_bytes(os.urandom(1 << 20) * 12)
    first = sync(rig, transport, folder, rsync=rsync)
    assert first.problems == ()
    assert {host.how for host in first.hosts} == {"rsync" if rsync else "survey"}
    for host in rig.hosts:
        assert outline(host, _TARGET) == outline(None, str(folder))
    again = sync(rig, transport, folder, rsync=rsync)
    assert [(host.host, host.how) for host in again.hosts] == [("n1", "nothing"), ("n2", "nothing")]

    rig.hosts[1].run("sh", "-c", f"echo changed > {_TARGET}/train.py; echo result > {_TARGET}/result")
    (folder / "weights.bin").unlink()
    n1, n2 = sync(rig, transport, folder, rsync=rsync).hosts
    assert (n1.files, n1.deleted, n1.notes) == (0, 1, ())
    assert (n2.files, n2.deleted, n2.notes) == (1, 1, ("`train.py` had another content and was replaced",))
    assert rig.hosts[1].run("cat", f"{_TARGET}/result") == "result\n"


def test_a_host_without_rsync_is_sent_files_all_the_same(
    rig: Rig, transport: RememberingChannels, folder: Path
) -> None:
    settle(rig.hosts[0], PATH="/nowhere")
    try:
        done = sync(rig, transport, folder, rsync=True)
    finally:
        settle(rig.hosts[0])
    assert done.problems == ()
    assert [host.how for host in done.hosts] == ["survey", "rsync"]
    for host in rig.hosts:
        assert outline(host, _TARGET) == outline(None, str(folder))


def test_a_folder_that_the_hosts_share_with_us_costs_nothing(
    rig: Rig, transport: RememberingChannels, folder: Path
) -> None:
    shared = folder.rename(rig.folder / f"shared-{folder.parent.name}")
    done = sync(rig, transport, shared, target=str(shared), rsync=True)
    assert [(host.host, host.how, host.deleted) for host in done.hosts] == [("n1", "nothing", 0), ("n2", "nothing", 0)]


@pytest.mark.parametrize("rsync", [False, True], ids=["survey", "rsync"])
def test_a_full_disk_is_told_by_host_and_file_and_leaves_nothing(
    rig: Rig, transport: RememberingChannels, folder: Path, rsync: bool
) -> None:
    (folder / "weights.bin").write_bytes(b"w" * (3 << 20))
    n2 = rig.hosts[1]
    n2.run("mkdir", _TARGET)
    n2.run("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", _TARGET)
    try:
        done = sync(rig, transport, folder, rsync=rsync)
        left = n2.run("find", _TARGET, "-name", ".dsrun-*", "-o", "-name", "*weights*")
    finally:
        n2.run("umount", _TARGET)
    assert [host.host for host in done.hosts] == ["n1"]
    (problem,) = done.problems
    assert problem.message == f"sync: host n2: {_TARGET}/weights.bin: no space left on device"
    assert left == ""


def test_a_folder_that_may_not_be_read_is_told_by_host(rig: Rig, transport: RememberingChannels, folder: Path) -> None:
    n1 = rig.hosts[0]
    n1.run("mkdir", "-p", "/tmp/closed/work")
    n1.run("mount", "-t", "tmpfs", "-o", "ro", "tmpfs", "/tmp/closed/work")
    try:
        done = sync(rig, transport, folder, target="/tmp/closed/work")
    finally:
        n1.run("umount", "/tmp/closed/work")
    (problem,) = done.problems
    assert problem.message == "sync: host n1: /tmp/closed/work/pkg: read-only file system"
    assert [host.host for host in done.hosts] == ["n2"]


def test_a_host_that_is_cut_off_is_named_and_keeps_no_half_file(
    rig: Rig, transport: RememberingChannels, folder: Path
) -> None:
    (folder / "weights.bin").write_bytes(os.urandom(8 << 20))
    specs = [host.spec() for host in rig.hosts]
    by_host: dict[str, Channel] = {}

    class Remembering:
        def start(self, host: HostSpec, argv: Sequence[str]) -> Channel:
            by_host[host.name] = transport.start(host, argv)
            return by_host[host.name]

        def close(self) -> None: ...

    def cut(text: str) -> None:
        if text.endswith("n1"):
            by_host["n1"].kill()

    with Survey(specs, Remembering(), python=sys.executable) as survey:
        done = sync_hosts(survey, specs, folder=str(folder), target=_TARGET, rsync_by=None, note=cut)
    assert [host.host for host in done.hosts] == ["n2"]
    (problem,) = done.problems
    assert problem.message.startswith("sync: host n1: ")
    done = sync(rig, transport, folder)
    assert [host.how for host in done.hosts] == ["survey", "nothing"]
    digest = hashlib.sha256((folder / "weights.bin").read_bytes()).hexdigest()
    for host in rig.hosts:
        assert host.run("sha256sum", f"{_TARGET}/weights.bin").startswith(digest)
        assert host.run("find", _TARGET, "-name", ".dsrun-*") == ""


def test_a_job_runs_in_a_folder_that_it_brings_with_variables_of_a_file(rig: Rig, tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    target = "/tmp/site/work/a b;'c\" $(id)"
    value = b'it is "quoted" $HOME `id`; \xff\xc3\xb6\nand more'
    (here / "lines.py").write_text("def line(): import os; return os.environb[b'VALUE'].hex()")
    code = "import os, socket, lines; print(socket.gethostname(), os.getcwd(), lines.line())"
    (here / "train.py").write_text(code)
    (here / "job.env").write_bytes(b"VALUE='" + value + b"'")
    (here / "job.env").chmod(0o600)
    lines = [f"{host.name} slots=1 addr={host.address}\n" for host in rig.hosts]
    (tmp_path / "hosts").write_text("".join(lines))
    options = ["-H", str(tmp_path / "hosts"), "--ssh-config", str(rig.ssh_config), "--backend", "gloo"]
    done = run_dsrun(
        *(*options, "--env-file", "job.env", "--sync", "--workdir", target, "--log-dir", str(tmp_path / "logs")),
        "train.py",
        cwd=here,
    )
    assert done.exit_code == 0, done.stderr
    assert "sync: n1, n2: 3 files" in done.stderr
    for host in rig.hosts:
        assert f"{host.name} {target} {value.hex()}" in done.stdout
