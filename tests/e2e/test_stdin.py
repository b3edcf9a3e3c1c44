"""A rank reads dsrun's own stdin, a terminal or a pipe, and what it asks is seen before it is answered."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.cli import clean_environment, invoke, start_dsrun
from support.processes import wait_for_end
from support.terminals import Terminal

pytestmark = pytest.mark.timeout(60)

ASK = """
import os, sys
name = input("name? ")
print("hello", name, sys.stdin.isatty(), os.environ["RANK"])
"""
DEBUG = """
value = 41
breakpoint()
print("value is", value)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ask.py").write_text(ASK)
    (tmp_path / "debug.py").write_text(DEBUG)
    return tmp_path


def environment(folder: Path) -> dict[str, str]:
    return clean_environment(XDG_STATE_HOME=str(folder / "state"), CUDA_VISIBLE_DEVICES="")


def terminal(folder: Path, *args: str) -> Terminal:
    return Terminal(*args, cwd=folder, env=environment(folder))


def test_a_lone_rank_asks_at_the_terminal_and_gets_the_answer(folder: Path) -> None:
    with terminal(folder, "ask.py") as screen:
        screen.expect("[0] name? ")
        screen.type("ada\n")
        screen.expect("ada\n[0] hello ada True 0\n")
        assert screen.end() == 0
    (log,) = folder.glob("state/dsrun/jobs/*/rank0.log")
    assert log.read_text() == "name? hello ada True 0\n", "the log has what the rank wrote"


def test_a_debugger_takes_commands_and_keeps_ctrl_c_for_itself(folder: Path) -> None:
    with terminal(folder, "--start", "exec", "debug.py") as screen:
        screen.expect("(Pdb) ")
        screen.type("p 6 * 7\n")
        screen.expect("[0] 42\n")
        screen.expect("(Pdb) ")
        screen.type("half a l\x03")
        screen.expect("--KeyboardInterrupt--\n")
        screen.expect("(Pdb) ")
        screen.type("q\n")
        screen.end()
    assert "stopping" not in screen.text, "the job went on"


def test_ctrl_d_and_ctrl_c_are_the_ranks_as_under_python(folder: Path) -> None:
    (folder / "keys.py").write_text(
        "import sys\n"
        "try:\n"
        "    input('first? ')\n"
        "except EOFError:\n"
        "    print('no more', file=sys.stderr)\n"
        "input('second? ')\n"
    )
    with terminal(folder, "--start", "exec", "keys.py") as screen:
        screen.expect("[0] first? ")
        screen.type("\x04")
        screen.expect("\n[0] no more\n")
        screen.expect("[0] second? ")
        screen.type("\x03")
        assert screen.end() == 130
    assert "error:" not in screen.text
    assert ": stopped after" in screen.text


def test_the_rank_that_is_named_asks_and_lines_of_others_leave_its_question_whole(folder: Path) -> None:
    (folder / "several.py").write_text(
        "import os, sys, time, pathlib\n"
        "if os.environ['RANK'] == '1':\n"
        "    print('hello', input('name? '))\n"
        "    sys.exit()\n"
        "while not pathlib.Path('asked').exists():\n"
        "    time.sleep(0.01)\n"
        "print('other line')\n"
        "print('read', repr(sys.stdin.read()))\n"
    )
    with terminal(folder, "-n", "2", "--stdin", "1", "--start", "exec", "several.py") as screen:
        screen.expect("[1] name? ")
        (folder / "asked").touch()
        screen.expect("\n[0] other line\n")
        screen.expect("[1] name? ")
        screen.expect("dsrun: rank 0 reads stdin, which is empty: rank 1 has dsrun's own")
        screen.expect("[1] name? ")
        screen.type("ada\n")
        screen.expect("ada\n[")
        assert screen.end() == 0
    assert "\n[1] hello ada\n" in screen.text
    assert "\n[0] read ''\n" in screen.text


def test_of_several_ranks_none_has_stdin_and_the_first_that_reads_is_told(folder: Path) -> None:
    (folder / "read.py").write_text("import sys\nprint(repr(sys.stdin.read()))\n")
    with start_dsrun(
        "-n", "2", "--start", "exec", "read.py", cwd=folder, env=environment(folder), stdin=subprocess.PIPE
    ) as process:
        out, err = process.communicate(b"words", timeout=30)
    assert sorted(out.decode().splitlines()) == ["[0] ''", "[1] ''"]
    told = [line for line in err.decode().splitlines() if "stdin" in line]
    assert len(told) == 1
    assert re.fullmatch(r"dsrun: rank ([01]) reads stdin, which is empty: `--stdin \1` gives it dsrun's own", told[0])


def test_a_pipe_arrives_whole_at_the_rank_that_is_named(folder: Path) -> None:
    (folder / "count.py").write_text(
        "import os, sys\n"
        "size = len(sys.stdin.buffer.raw.read(1000)) + len(sys.stdin.buffer.read(500_000)) + len(sys.stdin.read())\n"
        "print(size, os.read(0, 1))\n"
    )
    data = b"a line of text\n" * 100_000
    words = ("-n", "2", "--stdin", "1", "--start", "exec", "count.py")
    with start_dsrun(*words, cwd=folder, env=environment(folder), stdin=subprocess.PIPE) as process:
        out, err = process.communicate(data, timeout=40)
    assert process.returncode == 0, err
    assert sorted(out.decode().splitlines()) == ["[0] 0 b''", f"[1] {len(data)} b''"]


def test_a_prompt_is_seen_at_once_on_a_pipe_and_its_answer_may_follow(folder: Path) -> None:
    with start_dsrun(
        "-q", "--start", "exec", "ask.py", cwd=folder, env=environment(folder), stdin=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        prompt = b"[0] name? "
        assert process.stdout.read(len(prompt)) == prompt
        process.stdin.write(b"ada\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"hello ada False 0\n"
        assert process.wait(20) == 0


def test_a_program_that_is_no_python_asks_too(folder: Path) -> None:
    script = 'printf "name? "; read name; echo "hello $name"; test -t 0 && echo terminal'
    with terminal(folder, "--no-python", "sh", "-c", script) as screen:
        screen.expect("[0] name? ")
        screen.type("ada\n")
        screen.expect("hello ada\n")
        screen.expect("[0] terminal\n")
        assert screen.end() == 0


def test_with_a_closed_stdin_a_rank_finds_the_end_of_the_file(folder: Path) -> None:
    (folder / "read.py").write_text("import sys\nprint(repr(sys.stdin.read()))\n")
    with start_dsrun(
        "-q", "--start", "exec", "read.py", cwd=folder, env=environment(folder), before="exec <&-"
    ) as process:
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, b"[0] ''\n", b"")


def test_the_terminal_is_as_it_was_after_a_rank_that_had_changed_it_was_killed(folder: Path) -> None:
    (folder / "secret.py").write_text("import getpass\ngetpass.getpass('word? ')\n")
    with terminal(folder, "--start", "exec", "secret.py") as screen:
        screen.expect("word? ")
        assert screen.settings_now() != screen.settings
        screen.type("\x1c")
        screen.expect("killing 1 rank")
        assert screen.process.wait(20) == 131
        assert screen.settings_now() == screen.settings
        assert screen.end() == 131


def test_in_the_background_of_a_terminal_no_rank_takes_what_is_typed_for_others(folder: Path) -> None:
    # A shell with job control, as a person has it, and a rank that it started with `&`.
    (folder / "read.py").write_text("import sys\nprint(repr(sys.stdin.read()))\n")
    python = os.fspath(Path(sys.executable))
    script = f"set -m; {python} -m dsrun --start exec read.py & wait; read line; echo got $line"
    with Terminal("-c", script, cwd=folder, env=environment(folder), command=("/bin/sh",)) as screen:
        screen.type("for the shell\n")
        screen.expect("rank 0 reads stdin, which is empty: dsrun runs in the background of its terminal")
        screen.expect("got for the shell")


def test_a_front_end_that_is_killed_leaves_no_rank_at_the_terminal(folder: Path) -> None:
    (folder / "ask.py").write_text(f"import os\nopen('pid', 'w').write(str(os.getpid()))\n{ASK}")
    with terminal(folder, "--start", "exec", "ask.py") as screen:
        screen.expect("name? ")
        screen.kill()
        assert wait_for_end(int((folder / "pid").read_text()), timeout_s=20)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-d", "--stdin", "0"], "`--stdin 0`: a job in the background has no stdin"),
        (["-n", "2", "--stdin", "2"], "`--stdin 2`: there is no such rank among 2"),
        (["-H", "hosts", "--stdin", "1"], "`--stdin 1`: rank 1 runs on host far, and only ranks of this machine"),
        (["-n", "2", "--stdin", "0", "--ranks", "1"], "what rank 0 asks would not be seen"),
        (["--stdin", "first"], "expected a rank or `none`, got `first`"),
    ],
)
def test_what_cannot_have_stdin_is_refused_by_name(
    folder: Path, words: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "hosts").write_text("localhost slots=1\nfar slots=1\n")
    done = invoke(*words, "ask.py")
    assert (done.exit_code, done.stdout) == (2, "")
    assert said in done.stderr
