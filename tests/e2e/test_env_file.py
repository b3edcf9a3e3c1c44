"""A file of variables reaches every rank byte by byte, and what is secret in it nobody else (fault rows B6, E6, E9)."""

from __future__ import annotations

import os
from pathlib import Path

from support.cli import run_dsrun

#: Bytes that shells, JSON and locales have their own mind about.
VALUE = b'it is "quoted" $HOME `id` \\n; \xff\xc3\xb6\n  second line\t'
SECRET = "geheim-4711-$(id)-wort"
#: Writes down what a rank was given, and who on this machine can see the secret in a process's words.
SCRIPT = """
import os, sys
rank = os.environ["RANK"]
secret = os.environb[b"HF_TOKEN"]
with open("given" + rank, "wb") as file:
    file.write(os.environb[b"VALUE"])
seen = []
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        with open("/proc/" + pid + "/cmdline", "rb") as file:
            seen += [pid] if secret in file.read() else []
    except OSError:
        # It has ended.
        pass
print("seen in", seen, "right", secret == b"geheim-4711-$(id)-wort", "plain", os.environ["PLAIN"])
"""


def write_env_file(path: Path) -> None:
    lines = [b"export VALUE='" + VALUE + b"'", b"HF_TOKEN='" + SECRET.encode() + b"' # a comment", b"PLAIN=file"]
    path.write_bytes(b"\n".join(lines))
    path.chmod(0o600)


def test_values_are_identical_on_every_rank_and_secrets_are_in_no_words_logs_or_records(tmp_path: Path) -> None:
    write_env_file(tmp_path / "job.env")
    (tmp_path / "script.py").write_text(SCRIPT)
    options = ("-n", "2", "--backend", "gloo", "--env-file", "job.env", "--env", "PLAIN=option", "--log-dir", "logs")
    done = run_dsrun(*options, "script.py", cwd=tmp_path)
    assert done.exit_code == 0, done.stderr
    # An option says more than a file.
    assert "seen in [] right True plain option" in done.stdout
    assert [(tmp_path / f"given{rank}").read_bytes() for rank in (0, 1)] == [VALUE, VALUE]
    planned = run_dsrun(*options, "--dry-run", "--json", "script.py", cwd=tmp_path)
    assert planned.exit_code == 0, planned.stderr
    assert '"HF_TOKEN": "***"' in planned.stdout
    said = done.stdout + done.stderr + planned.stdout + planned.stderr
    files = [Path(root) / name for root, _, names in os.walk(tmp_path / "logs") for name in names]
    assert files
    assert SECRET not in said
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


def test_a_file_is_read_only_when_it_is_named(tmp_path: Path) -> None:
    for name in (".env", ".deepspeed_env", "env"):
        (tmp_path / name).write_text("SEEN=yes\n")
    code = "import os; print('seen', os.environ.get('SEEN'))"
    (tmp_path / "script.py").write_text(code)
    done = run_dsrun("-n", "1", "--log-dir", "logs", "script.py", cwd=tmp_path)
    assert "seen None" in done.stdout, done.stderr


def test_a_file_that_others_can_write_starts_nothing(tmp_path: Path) -> None:
    write_env_file(tmp_path / "job.env")
    (tmp_path / "job.env").chmod(0o664)
    (tmp_path / "script.py").write_text("open('started', 'w')")
    done = run_dsrun("-n", "1", "--env-file", "job.env", "script.py", cwd=tmp_path)
    assert done.exit_code == 2
    assert "job.env: other users can write this file (mode 0664)" in done.stderr
    assert "hint: chmod go-w job.env" in done.stderr
    assert not (tmp_path / "started").exists()
