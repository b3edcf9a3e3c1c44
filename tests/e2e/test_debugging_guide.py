"""docs/guides/debugging.md: its sessions at a terminal, typed line by line, with the answers that it shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dsrun.launcher.hosts.spec import Allocation, HostSpec
from dsrun.launcher.launch.host_placement import Placement
from dsrun.launcher.launch.stdin_choice import why_no_stdin
from support.cli import clean_environment
from support.terminals import Terminal

pytestmark = pytest.mark.timeout(90)
GUIDE = (Path(__file__).parents[2] / "docs/guides/debugging.md").read_text()
SESSIONS = re.findall(r"```console\n\$ dsrun (.*)\n((?:.*\n)*?)```", GUIDE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    programs = re.findall(r"```python\n# (\S+)\n(.*?)```", GUIDE, re.S)
    assert [name for name, _ in programs] == ["train.py", "ranks.py"]
    for name, text in programs:
        (tmp_path / name).write_text(f"# {name}\n{text}")
    (tmp_path / "fails.py").write_text(programs[0][1].replace("    breakpoint()\n", ""))
    return tmp_path


@pytest.mark.parametrize(("words", "shown"), SESSIONS, ids=[words for words, _ in SESSIONS])
def test_a_session_goes_as_the_guide_shows_it(folder: Path, words: str, shown: str) -> None:
    env = clean_environment(XDG_STATE_HOME=str(folder / "state"), CUDA_VISIBLE_DEVICES="")
    with Terminal(*words.split(), cwd=folder, env=env) as screen:
        for line in shown.splitlines():
            prompt, is_prompt, typed = line.partition("(Pdb) ")
            if is_prompt:
                screen.expect(prompt + is_prompt)
                screen.type(f"{typed}\n")
            # Where pdb stands is shown with the line's path, and differs from Python 3.13 on.
            elif re.match(r"\[\d\] (?!>|->)", line):
                screen.expect(f"{line}\n")
        screen.end()


def test_the_sessions_are_those_that_the_guide_names() -> None:
    assert [words.split()[-1] for words, _ in SESSIONS] == ["train.py", "ranks.py", "fails.py"]


def test_a_rank_without_stdin_is_told_of_as_the_guide_says() -> None:
    (told,) = re.findall(r"```text\n(.*)\n```", GUIDE)
    here = Allocation(hosts=(HostSpec(name="localhost", slots=2, source="this machine"),))
    place = Placement(allocation=here, local_hosts=frozenset({"localhost"}), transport="local")
    assert told == f"dsrun: rank 1 reads stdin, which is empty: {why_no_stdin(1, None, place, taken=None)}"
