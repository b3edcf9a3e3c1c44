"""A file of variables means what it says, is told apart from what a shell would make of it, and shows no value."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from dsrun.errors import UsageError
from dsrun.launcher.plan.env_file import parse_env_file, read_env_file


def write(path: Path, data: bytes, *, mode: int = 0o600) -> str:
    path.write_bytes(data)
    path.chmod(mode)
    return str(path)


def problems(text: str) -> list[str]:
    with pytest.raises(UsageError) as caught:
        parse_env_file(text, name=".env")
    return [problem.render() for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("A=1", "1"),
        ("export A=1", "1"),
        ("  export\t A=1  ", "1"),
        ("A=", ""),
        ("A= # a comment", ""),
        ("A=a b # a comment", "a b"),
        ("A=a#b", "a#b"),
        ("A=#b", "#b"),
        ("A=it's", "it's"),
        ('A={"lr": 1}', '{"lr": 1}'),
        ("A=C:\\new", "C:\\new"),
        ("A=5$", "5$"),
        ("A=x=y", "x=y"),
        ("A='$HOME `id` \\n \"'", '$HOME `id` \\n "'),
        ("A='' # a comment", ""),
        ('A="a # b"', "a # b"),
        (r'A="\" \\ \$HOME \`id\` \n \t"', '" \\ $HOME `id` \n \t'),
        ("A='one\ntwo'", "one\ntwo"),
        ('A="one\n\ntwo" # a comment', "one\n\ntwo"),
        ("A=ö€", "ö€"),
        ("A=1\r", "1"),
        ("A='1'\r", "1"),
        ("A='1\r\n2'", "1\r\n2"),
    ],
)
def test_a_value_is_what_its_quotes_say(line: str, value: str) -> None:
    assert parse_env_file(f"# first\n\n{line}\nB=2\n", name=".env") == {"A": value, "B": "2"}


def test_an_empty_file_names_nothing() -> None:
    assert parse_env_file("", name=".env") == {}
    assert parse_env_file("\n # nothing\n", name=".env") == {}


def test_what_deepspeed_reads_means_the_same(tmp_path: Path) -> None:
    path = write(tmp_path / ".deepspeed_env", b"NCCL_IB_DISABLE=1\nNCCL_SOCKET_IFNAME=eth0,eth1\nWANDB_MODE=offline\n")
    assert read_env_file(path) == {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "eth0,eth1", "WANDB_MODE": "offline"}


def test_bytes_arrive_as_they_are(tmp_path: Path) -> None:
    value = b"'\"$;\\ \xff\xc3\xb6 \n\t*"
    path = write(tmp_path / "env", b"\xef\xbb\xbfA='" + value.replace(b"'", b"") + b"'\nB=\xfe")
    read = read_env_file(path)
    assert os.fsencode(read["A"]) == value.replace(b"'", b"")
    assert os.fsencode(read["B"]) == b"\xfe"


def test_every_problem_is_shown_at_its_place_and_no_value() -> None:
    text = "\n".join(
        [
            "HF_TOKEN=hf_geheim$(cat key)",
            'B="a`id`"',
            "RANK=3",
            "C = geheim",
            "export D",
            "geheim-line",
            "1x=geheim",
            r'E="geheim\q"',
            "F='geheim'rest",
            "C=$HOME/geheim",
            "G=1",
            "G=2",
            "H='geheim",
        ]
    )
    found = problems(text)
    assert [problem.partition("\n")[0] for problem in found] == [
        "error: .env:1:19: `$(` is what a shell would expand",
        "error: .env:2:5: a back-tick is what a shell would expand",
        "error: .env:3:1: `RANK` is dsrun's to set",
        "error: .env:4:2: no blanks are allowed around `=`",
        "error: .env:5:9: there is no `=`, and so no value",
        "error: .env:6:1: this line is not understood",
        "error: .env:7:1: this is no name of a variable",
        "error: .env:8:10: `\\q` stands for nothing",
        "error: .env:9:11: a value ends with its quote",
        "error: .env:10:3: `$H` is what a shell would expand",
        "error: .env:12:1: `G` has a value on line 11 already",
        "error: .env:13:3: the quote ' has no end",
    ]
    assert not any("geheim" in problem or "rest" in problem for problem in found)
    assert found[0].splitlines()[1:] == [
        "  HF_TOKEN=*********$(*** ****",
        "                    ^~",
        "hint: nothing is expanded here; put the value in single quotes if it is meant as it stands",
    ]


def test_a_variable_of_dsruns_names_its_option() -> None:
    assert problems("DSRUN_BACKEND=gloo")[0].endswith("hint: use `--backend nccl` or `--backend gloo`")


def test_places_in_values_of_several_lines_are_those_of_the_file() -> None:
    (problem,) = problems('A="one\n  two $X\nthree"\n')
    assert problem.startswith("error: .env:2:7: `$X`")
    assert problem.splitlines()[1] == "  " + "  *** $X"


def test_text_that_is_no_utf_8_is_recognised_by_its_nul_bytes(tmp_path: Path) -> None:
    path = write(tmp_path / "env", b"A=1\0")
    with pytest.raises(UsageError, match=r"env:1:4: no variable can hold a NUL byte") as caught:
        read_env_file(path)
    assert "UTF-16" in str(caught.value.hint)


def test_problems_have_an_end() -> None:
    assert len(problems("?\n" * 1000)) == 20


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = write(tmp_path / "env", b"A=1", mode=mode)
    with pytest.raises(UsageError, match=f"other users can write this file \\(mode {mode:04o}\\)") as caught:
        read_env_file(path)
    assert caught.value.hint == f"chmod go-w {path}"


def test_a_link_is_as_good_as_the_file_it_leads_to(tmp_path: Path) -> None:
    path = write(tmp_path / "env", b"A=1")
    link = tmp_path / "link"
    link.symlink_to(path)
    assert read_env_file(str(link)) == {"A": "1"}
    Path(path).chmod(0o666)
    with pytest.raises(UsageError, match="other users"):
        read_env_file(str(link))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_somebody_elses_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "env", b"A=1")
    os.chown(path, 54321, -1)
    with pytest.raises(UsageError, match="belongs to user 54321") as caught:
        read_env_file(path)
    assert caught.value.hint == "copy it to a file of your own"


def test_a_pipe_can_be_named_as_shells_do_it() -> None:
    read_fd, write_fd = os.pipe()
    writer = threading.Thread(target=lambda: (os.write(write_fd, b"A=1\n"), os.close(write_fd)))
    writer.start()
    try:
        assert read_env_file(f"/dev/fd/{read_fd}") == {"A": "1"}
    finally:
        writer.join()
        os.close(read_fd)


def test_a_named_pipe_that_nobody_writes_to_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "env")
    with pytest.raises(UsageError, match="env is a named pipe; expected a file of variables"):
        read_env_file(str(tmp_path / "env"))


def test_what_is_no_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"missing: cannot read this file of variables: No such file"):
        read_env_file(str(tmp_path / "missing"))
    with pytest.raises(UsageError, match="Is a directory"):
        read_env_file(str(tmp_path))
    with pytest.raises(UsageError, match="smaller than 1 MiB"):
        read_env_file(write(tmp_path / "big", b"#" * (1 << 20) + b"\n"))
