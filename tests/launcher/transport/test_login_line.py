"""The line for a login shell, and where a stream's preamble ends."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from dsrun.errors import LaunchError
from dsrun.launcher.hosts.spec import HostSpec
from dsrun.launcher.transport.login_line import Preamble, remote_line, status_of

BOX = HostSpec(name="box", slots=1, source="test")


def run_line(*argv: str, shell: str = "sh") -> tuple[int, Preamble, Preamble]:
    """Runs the line as a server does: through the login shell."""
    done = subprocess.run([shell, "-c", remote_line(BOX, argv)], capture_output=True)
    stdout, stderr = Preamble(), Preamble()
    stdout.feed(done.stdout)
    stderr.feed(done.stderr)
    return done.returncode, stdout, stderr


@pytest.mark.parametrize("shell", ["sh", "bash", "csh", "fish", "zsh", "ksh"])
def test_a_shell_hands_on_the_words_as_they_are(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    words = [
        "", "a b", "'", '"', "$HOME", "`id`", "$(id)", "a\nb", "\n", "-x", "%s", "\\", "\\\\", "\\'", "\\0", "\\1",
        "1\\", "!", "!!", "a!b", "~", "*", "#", "{a,b}", "é漢", "\udcff\udc80", "\t\r", "x" * 3000,
    ]  # fmt: skip
    status, stdout, stderr = run_line("printf", r"%s\0", *words, shell=shell)
    assert status == 0
    assert stdout.rest == b"".join(word.encode(errors="surrogateescape") + b"\0" for word in words)
    assert stderr.is_over
    assert stderr.rest == b""


def test_a_login_shell_reads_nothing_that_shells_differ_about() -> None:
    line = remote_line(BOX, ["printf", "!'\"$`\\\n\t\x7fé\udcff", "'; rm -rf /; '"])
    assert re.fullmatch(rb"""exec /bin/sh -c '(?:[^'!\\\n\x7f-\xff]|\\0[0-3][0-7]{2})*'""", line)


def test_a_missing_program_never_begins() -> None:
    status, stdout, stderr = run_line("/no/such/program")
    assert status == 127
    assert not stdout.is_over
    assert not stderr.is_over


@pytest.mark.parametrize(("argv", "says"), [(["-x"], "dash"), (["a", "b\0"], "NUL")])
def test_what_no_shell_can_be_told_is_refused(argv: list[str], says: str) -> None:
    with pytest.raises(LaunchError, match=f"host box: .*{says}"):
        remote_line(BOX, argv)


@pytest.mark.parametrize(("shell", "status"), [(0, 0), (3, 3), (128, 128), (137, -9), (143, -15), (255, 255)])
def test_a_signal_is_read_from_the_shell_s_status(shell: int, status: int) -> None:
    assert status_of(shell) == status


@pytest.mark.parametrize("piece", [1, 2, 7, 1000])
def test_the_preamble_ends_wherever_the_pieces_do(piece: int) -> None:
    _, stdout, _ = run_line("true")
    assert stdout.is_over
    whole = (
        b"noise without end"
        + subprocess.run(["sh", "-c", remote_line(BOX, ["printf", "out"])], capture_output=True).stdout
    )
    preamble = Preamble()
    for begin in range(0, len(whole), piece):
        preamble.feed(whole[begin : begin + piece])
    assert preamble.text == "noise without end"
    assert preamble.rest == b"out"


def test_of_endless_noise_the_end_is_kept() -> None:
    preamble = Preamble()
    for number in range(10_000):
        preamble.feed(b"line %d\n" % number)
    assert not preamble.is_over
    assert preamble.text.endswith("line 9999\n")
    assert len(preamble.text) < 1 << 15
