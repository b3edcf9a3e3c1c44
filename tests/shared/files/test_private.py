"""What dsrun makes for itself is this user's alone, and nobody else can exchange it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsrun.files.private import ForeignFolderError, make_private_folder, make_private_memory

STRANGER = 4321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")


@pytest.fixture
def passable() -> Iterator[Path]:
    """A folder that other users can pass, as those of pytest they cannot."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name).resolve()


@pytest.fixture(params=[0o000, 0o022, 0o777], ids=lambda mask: f"umask {mask:03o}")
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def test_folders_are_private_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    make_private_folder(tmp_path / "state" / "dsrun" / "jobs", own=tmp_path / "state" / "dsrun")
    made = ["state/dsrun", "state/dsrun/jobs"]
    assert {mode(tmp_path / name) for name in made} == {0o700}


def test_own_folders_that_were_open_are_made_private_and_that_is_told(tmp_path: Path) -> None:
    own = tmp_path / "state" / "dsrun"
    (own / "jobs").mkdir(parents=True)
    for folder in (tmp_path / "state", own, own / "jobs"):
        folder.chmod(0o755)
    own.chmod(0o777)
    told: list[str] = []
    make_private_folder(own / "jobs", own=own, tell=told.append)
    assert (mode(own), mode(own / "jobs"), mode(tmp_path / "state")) == (0o700, 0o700, 0o755)
    assert told == [
        f"{own} was open to others (777), and is yours alone now (700)",
        f"{own}/jobs was open to others (755), and is yours alone now (700)",
    ]
    make_private_folder(own / "jobs", own=own, tell=told.append)
    assert len(told) == 2


def test_a_folder_of_the_users_own_stays_as_it_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    make_private_folder(tmp_path / "logs" / "a")
    assert (mode(tmp_path), mode(tmp_path / "logs" / "a")) == (0o777, 0o700)


@pytest.mark.parametrize(("bits", "is_told"), [(0o777, True), (0o1777, False), (0o755, False)])
def test_a_folder_above_that_everybody_may_write_to_is_told_once(tmp_path: Path, bits: int, is_told: bool) -> None:
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(bits)
    own = home / "dsrun"
    told: list[str] = []
    for _ in range(2):
        make_private_folder(own / "jobs", own=own, tell=told.append)
    assert (mode(own), mode(home)) == (0o700, bits)
    warning = (
        f"warning: {home} (mode 0777) may be written to by everybody, who could put a folder of theirs in the place of "
        f"{own}; `chmod +t {home}`, or set XDG_STATE_HOME to a folder that is yours alone"
    )
    assert told == ([warning] if is_told else [])


@as_root
@pytest.mark.parametrize("is_root", [True, False], ids=["root", "another user"])
@pytest.mark.parametrize("bits", [0o755, 0o1777], ids=oct)
def test_a_user_may_have_root_above_and_is_told_of_another_user(passable: Path, bits: int, is_root: bool) -> None:
    """A user's folder below one of root's is as every home is; below another user's it is that one's to exchange."""
    above = passable / "above"
    (above / "mine").mkdir(parents=True)
    os.chown(above, 0 if is_root else STRANGER, 0)
    above.chmod(bits)
    os.chown(above / "mine", STRANGER + 1, STRANGER + 1)
    own = above / "mine" / "dsrun"
    warning = (
        f"warning: {above} (mode {bits:04o}) belongs to user {STRANGER}, who could put a folder of theirs in the place "
        f"of {own}; set XDG_STATE_HOME to a folder that is yours alone"
    )
    assert as_user(STRANGER + 1, own) == ("" if is_root else warning)
    assert mode(own) == 0o700


@as_root
def test_root_may_use_a_home_of_a_user_as_in_a_container(tmp_path: Path) -> None:
    os.chown(tmp_path, STRANGER, STRANGER)
    told: list[str] = []
    make_private_folder(tmp_path / "dsrun", own=tmp_path / "dsrun", tell=told.append)
    assert [f"belongs to user {STRANGER}" in line for line in told] == [True]


@as_root
def test_a_users_own_folder_may_not_be_roots(passable: Path) -> None:
    (passable / "dsrun").mkdir(mode=0o755)
    assert as_user(STRANGER, passable / "dsrun") == f"{passable}/dsrun is a folder of root, not yours"


def as_user(user: int, own: Path) -> str:
    """Makes the folder as another user; returns what was told of it, or why it was refused."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        said = b"failed otherwise"
        try:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            told: list[str] = []
            make_private_folder(own, own=own, tell=told.append)
            said = "\n".join(told).encode()
        except ForeignFolderError as error:
            said = str(error).encode()
        finally:
            os.write(writing, said)
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return said


@as_root
@pytest.mark.parametrize("foreign", ["state/dsrun", "state/dsrun/jobs"])
def test_a_folder_of_another_user_is_refused_by_name(tmp_path: Path, foreign: str) -> None:
    own = tmp_path / "state" / "dsrun"
    (own / "jobs").mkdir(parents=True)
    os.chown(tmp_path / foreign, STRANGER, STRANGER)
    with pytest.raises(ForeignFolderError, match=f"{foreign} is a folder of user {STRANGER}, not yours"):
        make_private_folder(own / "jobs", own=own)


@as_root
@pytest.mark.parametrize("belongs", ["the link", "its end"])
def test_a_link_that_another_user_has_in_hand_is_refused(tmp_path: Path, belongs: str) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "dsrun"
    link.symlink_to(tmp_path / "real")
    if belongs == "the link":
        os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
    else:
        os.chown(tmp_path / "real", STRANGER, STRANGER)
    with pytest.raises(ForeignFolderError, match=f"user {STRANGER}, not yours"):
        make_private_folder(link / "jobs", own=link)


@as_root
@pytest.mark.parametrize(("group", "is_told"), [(STRANGER, True), (os.getegid(), False)])
def test_a_folder_above_is_trusted_with_the_users_own_group_only(tmp_path: Path, group: int, is_told: bool) -> None:
    os.chown(tmp_path, 0, group)
    tmp_path.chmod(0o770)
    told: list[str] = []
    make_private_folder(tmp_path / "dsrun", own=tmp_path / "dsrun", tell=told.append)
    assert [f"may be written to by group {STRANGER}" in line for line in told] == ([True] if is_told else [])


def test_a_link_of_the_users_own_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "dsrun").symlink_to(tmp_path / "real")
    make_private_folder(tmp_path / "dsrun" / "jobs", own=tmp_path / "dsrun", tell=lambda _: None)
    assert mode(tmp_path / "real" / "jobs") == 0o700


def test_memory_without_a_name_is_private(umask: int) -> None:
    descriptor = make_private_memory("dsrun-test")
    try:
        assert os.fstat(descriptor).st_mode & 0o7777 == 0o600
    finally:
        os.close(descriptor)
