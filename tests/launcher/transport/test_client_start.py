"""A client has started its command once both streams have the mark; one that is late, or ends first, is told apart."""

from __future__ import annotations

import subprocess

import pytest

from dsrun.launcher.transport.client_start import ClientStart, wait_for_start
from dsrun.launcher.transport.login_line import MARK, Preamble

_MARK = MARK.decode().rstrip()


@pytest.mark.parametrize(
    ("script", "patience_s", "expected"),
    [
        (f"echo hello; echo '{_MARK}'; echo '{_MARK}' >&2; printf out; printf err >&2", 60.0, ClientStart.STARTED),
        (f"echo hello; echo '{_MARK}'; exec cat", 0.2, ClientStart.LATE),
        (f"echo hello; echo '{_MARK}'", 60.0, ClientStart.ENDED),
    ],
)
def test_the_start_of_a_command_is_told_from_what_came_before(
    script: str, patience_s: float, expected: ClientStart
) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen(["sh", "-c", script], stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0) as process:
        stdout, stderr = Preamble(), Preamble()
        assert wait_for_start(process, stdout, stderr, patience_s=patience_s) is expected
        assert stdout.text == "hello\n"
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdin.close()
        rest = stdout.rest + process.stdout.read()
    assert rest == (b"out" if expected is ClientStart.STARTED else b"")
