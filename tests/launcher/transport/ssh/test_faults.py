"""What the system's client says, in our words."""

from __future__ import annotations

import pytest

from dsrun.launcher.hosts.spec import HostSpec
from dsrun.launcher.transport.ssh.faults import NotYet, from_client, never_started, not_let_in

BOX = HostSpec(name="box", slots=1, source="test", addr="10.0.0.5", port=2222, user="ann")


def explain(stderr: str, *, status: int = 255) -> tuple[str, str]:
    error = from_client(BOX, ["/opt/python"], status, timeout_s=10, stderr=stderr, stdout="")
    assert error.hint is not None
    return str(error), error.hint


@pytest.mark.parametrize(
    ("stderr", "says", "hint"),
    [
        ("ssh: connect to host 10.0.0.5 port 2222: Connection refused\r\n", "port 2222 (connection refused", "port="),
        ("ssh: connect to host 10.0.0.5 port 2222: Connection timed out\r\n", "no answer from 10.0.0.5", "firewall"),
        ("Connection timed out during banner exchange\r\n", "within 10 s", "firewall"),
        ("ssh: Could not resolve hostname b0x: Name or service not known\r\n", "no address", "addr="),
        ("ssh: connect to host 10.0.0.5 port 22: No route to host\r\n", "No route to host", "routes"),
        ("Host key verification failed.\r\n", "not known here", "--accept-new-host-keys"),
        (
            "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.\n",
            "not the one known here",
            "ssh-keygen -R '[10.0.0.5]:2222'",
        ),
        ("ann@10.0.0.5: Permission denied (publickey,password).\r\n", "as ann", "ssh -p 2222 ann@10.0.0.5"),
        ("ann@10.0.0.5: Permission denied (password).\r\n", "takes password only", "ssh-copy-id"),
        ("kex_exchange_identification: read: Connection reset by peer\r\n", "without a greeting", "MaxStartups"),
        ("Connection closed by 10.0.0.5 port 2222\r\n", "before the login", "ssh -p 2222 ann@10.0.0.5"),
        (
            "Unable to negotiate with 10.0.0.5 port 2222: no matching key exchange method found. Their offer: x\r\n",
            "how to encrypt",
            "--transport",
        ),
        ("/home/ann/.ssh/config: line 3: Bad configuration option: frob\r\n", "Bad configuration option: frob", "-v"),
        ("", "did not say why", "-v"),
    ],
)  # fmt: skip
def test_each_cause_has_its_words_and_its_way_out(stderr: str, says: str, hint: str) -> None:
    message, way_out = explain(stderr)
    assert message.startswith("host box: ")
    assert says in message
    assert hint in way_out


@pytest.mark.parametrize(
    ("stderr", "may_pass"),
    [
        ("ssh: connect to host 10.0.0.5 port 2222: Connection refused\r\n", True),
        ("ssh: connect to host 10.0.0.5 port 22: No route to host\r\n", True),
        ("kex_exchange_identification: Connection closed by remote host\r\n", True),
        ("ssh: connect to host 10.0.0.5 port 2222: Connection timed out\r\n", False),
        ("Connection closed by 10.0.0.5 port 2222\r\n", False),
        ("ann@10.0.0.5: Permission denied (publickey).\r\n", False),
        ("Host key verification failed.\r\n", False),
        ("", False),
    ],
)
def test_what_may_pass_is_told_apart(stderr: str, may_pass: bool) -> None:
    error = from_client(BOX, ["/opt/python"], 255, timeout_s=10, stderr=stderr, stdout="")
    assert isinstance(error, NotYet) is may_pass


def test_a_status_that_is_not_ssh_s_is_the_shell_s() -> None:
    assert "there is no such program there" in explain("", status=127)[0]
    message, _ = explain("This account is currently not available.\n", status=1)
    assert "ended with 1" in message
    assert "This account is currently not available." in message


def test_a_shell_that_hangs_is_told_with_what_it_said_last() -> None:
    error = never_started(BOX, ["python"], None, stdout="Enter project: ")
    assert "in time, and says: Enter project:" in str(error)


def test_a_locked_key_is_never_asked_for() -> None:
    error = not_let_in(BOX, passphrase=True)
    assert "passphrase" in str(error)
    assert "ssh-add" in str(error.hint)
