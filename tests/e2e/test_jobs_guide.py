"""docs/guides/jobs.md, command by command, on real jobs: what it shows is what is printed."""

from __future__ import annotations

import os
import re
import shlex
import signal
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dsrun.launcher.jobs.live_status import read_live
from support.cli import clean_environment, run_dsrun, start_dsrun
from support.processes import kill_left

GUIDE = (Path(__file__).parents[2] / "docs/guides/jobs.md").read_text()
DEADLINE_S = 60.0
#: What differs from one run to the next, and what stands for it.
VARIES = (
    (r"\s+", " "),
    (r"\S+/dsrun/jobs/", "JOBS/"),
    (r"\b\d+(\.\d+)?(ms|s|m)\b", "TIME"),
    (r"\b\d+(\.\d+)? [KMG]iB\b", "SIZE"),
    (r"\b\d+%", "PERCENT"),
    (r"step \d+", "step N"),
    (r"(?<= localhost )\d+", "PID"),
    (r"\d+(?= (holds|waits) )", "PID"),
)


@dataclass(frozen=True, slots=True)
class Example:
    """A command of the guide and the lines below it; `...` stands for any lines, `^C` for the key."""

    words: list[str]
    lines: list[str]

    @property
    def starts_job(self) -> bool:
        return "-d" in self.words


def examples() -> list[Example]:
    blocks = re.findall(r"```console\n(.*?)```", GUIDE, re.S)
    parts = [part for block in blocks for part in re.split(r"^\$ dsrun ", block, flags=re.M)[1:]]
    found: list[Example] = []
    for part in parts:
        command, *lines = part.strip().splitlines()
        found.append(Example(shlex.split(command), [line for line in lines if line]))
    return found


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.05)


def plain(text: str) -> str:
    for pattern, name in VARIES:
        text = re.sub(pattern, name, text)
    return text.strip()


def assert_shows(example: Example, output: list[str]) -> None:
    """Checks that the lines are those of the guide, `...` excepted."""
    expected, rest = [plain(line) for line in example.lines], [plain(line) for line in output if line]
    if "..." not in expected:
        assert rest == expected
    for line in expected:
        if line != "...":
            assert line in rest, f"`dsrun {shlex.join(example.words)}`: no {line!r} in {rest}"
            del rest[: rest.index(line) + 1]


class Shell:
    """Runs the guide's commands one after the other; ids of the guide become those of the jobs it starts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._env = clean_environment(XDG_STATE_HOME=str(folder.parent / "state"), CUDA_VISIBLE_DEVICES="")
        self.ids: dict[str, str] = {}

    def run(self, example: Example) -> None:
        if example.starts_job:
            self._start(example)
        else:
            example = Example([*map(self._named, example.words)], [*map(self._named, example.lines)])
            if "^C" in example.lines:
                self._interrupt(example)
            else:
                result = run_dsrun(*example.words, cwd=self._folder, env=self._env, timeout_s=DEADLINE_S)
                assert_shows(example, f"{result.stderr}{result.stdout}".splitlines())
                assert result.exit_code == 0

    def end_jobs(self) -> None:
        """Leaves nothing, also of a job that waits in the queue and has no agent yet."""
        for job_id in self.ids.values():
            run_dsrun("stop", "--now", job_id, cwd=self._folder, env=self._env, timeout_s=DEADLINE_S)
            kill_left(job_id)

    def _named(self, text: str) -> str:
        for shown, job_id in self.ids.items():
            text = text.replace(shown, job_id)
        return text

    def _start(self, example: Example) -> None:
        result = run_dsrun(*example.words, cwd=self._folder, env=self._env, timeout_s=DEADLINE_S)
        job_id = result.stdout.strip()
        self.ids[example.lines[0]] = job_id
        lines = [*map(self._named, example.lines)]
        assert_shows(Example(example.words, lines), f"{result.stdout}{result.stderr}".splitlines())
        folder = self._folder.parent / "state" / "dsrun" / "jobs" / job_id
        if "--queue" not in example.words:
            wait_for(lambda: (live := read_live(folder)) is not None and len(live.ranks) == 2)
            wait_for(lambda: all((folder / f"rank{rank}.log").read_text().count("\n") > 3 for rank in (0, 1)))

    def _interrupt(self, example: Example) -> None:
        """Waits for the lines above `^C`, and for those below it after the key."""
        at = example.lines.index("^C")
        with start_dsrun(*example.words, cwd=self._folder, env=self._env) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            to_come = [plain(line) for line in example.lines[:at]]
            read: list[str] = []
            for line in to_come:
                stream = process.stderr if line.startswith("dsrun: ") else process.stdout
                read.append(plain(stream.readline().decode()))
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=DEADLINE_S)
        assert read == to_come
        assert err.decode().splitlines()[-1:] in ([], [""], example.lines[at + 1 :])
        assert process.returncode == 130


@pytest.fixture
def two_cores() -> Generator[None]:
    """The guide's machine has two, and so two slots."""
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("this machine has one core")
    os.sched_setaffinity(0, sorted(before)[:2])
    yield
    os.sched_setaffinity(0, before)


@pytest.mark.usefixtures("two_cores")
def test_every_command_of_the_guide_prints_what_it_shows(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    script = re.search(r"```python\n(.*?)```", GUIDE, re.S)
    assert script is not None
    (folder / "train.py").write_text(script[1])
    shell = Shell(folder)
    try:
        for example in examples():
            shell.run(example)
    finally:
        shell.end_jobs()


def test_the_guide_has_a_command_for_every_verb_it_is_about() -> None:
    shown = {example.words[0] for example in examples()}
    assert shown >= {"run", "ps", "logs", "attach", "top", "stop", "show", "rerun", "queue", "rm"}
