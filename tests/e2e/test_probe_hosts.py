"""`dsrun probe -H` over real ssh: hosts are compared, measured and watched; one that is cut off is named."""

from __future__ import annotations

import json
import signal
from collections.abc import Generator
from pathlib import Path

import pytest

from support.cli import run_dsrun, start_dsrun
from support.namespaces import Rig, hosts, why_no_hosts

_WHY_NOT = why_no_hosts()
pytestmark = [pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT)), pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Generator[Rig]:
    with hosts(2, tmp_path_factory.mktemp("rig")) as made:
        (made.folder / "hosts").write_text("".join(f"{host.name} slots=1 addr={host.address}\n" for host in made.hosts))
        yield made


def words(rig: Rig, *more: str) -> list[str]:
    return ["probe", "-H", str(rig.folder / "hosts"), "--ssh-config", str(rig.ssh_config), *more]


def test_hosts_are_measured_and_the_way_between_them_and_nothing_is_left(rig: Rig, tmp_path: Path) -> None:
    written = rig.folder / "disk"
    written.mkdir()
    result = run_dsrun(*words(rig, "--bench", "--path", str(written), "--json"), cwd=tmp_path, timeout_s=150)
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    assert list(told["hosts"]) == ["n1", "n2"]
    for name, report in told["hosts"].items():
        assert report["host"]["name"] == name
        assert {group for group, found in report["measured"].items() if found[0]["figures"]} == {
            "memory",
            "disk",
            "gpu",
        }
    (pair,) = told["pairs"]
    assert (pair["to"], pair["from"]) == ("n1", "n2")
    assert [figure["name"] for figure in pair["figures"]] == ["round trip", "TCP rate, 4 streams"]
    # Both report the same machine's hardware, and this test's own clock.
    assert all(abs(clock["offset_s"]) <= clock["doubt_s"] + 0.5 for clock in told["clocks"].values())
    assert list(written.iterdir()) == []
    assert "dsrun: measuring ways between hosts, round 1 of 1\n" in result.stderr


def test_hosts_are_watched_over_one_connection_each(rig: Rig, tmp_path: Path) -> None:
    sshd = rig.hosts[0].sshd
    logins = sshd.log.count("Accepted publickey")
    with start_dsrun(*words(rig, "--watch", "0.2"), cwd=tmp_path) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        seen = [process.stdout.readline().split()[:1] for _ in range(8)]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, process.stderr.read()
    assert seen == [[b"HOST"], [b"n1"], [b"n2"], [], [b"HOST"], [b"n1"], [b"n2"], []]
    assert sshd.log.count("Accepted publickey") == logins + 1


def test_a_host_that_cannot_be_reached_is_named_and_the_other_is_shown(rig: Rig, tmp_path: Path) -> None:
    rig.partition(rig.front, rig.hosts[1])
    try:
        result = run_dsrun(*words(rig, "--connect-timeout", "2"), cwd=tmp_path)
    finally:
        rig.heal(rig.front, rig.hosts[1])
    assert result.exit_code == 1
    assert result.stdout.startswith("n1\nhost ")
    assert "error: host n2: " in result.stderr
    assert "n2" not in result.stdout.split(), "nothing is shown of it; a path may have its letters"
