"""A program that has ended well leaves its groups after its own exit handlers, and never hangs or fails of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.cli import clean_environment
from support.forked_programs import Ended, run_programs

#: Tells, as the last of all, whether the group is still there.
STARTER = """
import atexit, os, sys
rank = os.getpid()
def tell():
    torch = sys.modules["torch.distributed"]
    print("at last:", "there" if torch.is_initialized() else "left", flush=True)
    if os.getpid() != rank:
        # What torch's destructors do in a fork, which has none of Gloo's threads, is torch's business.
        os._exit(0)
atexit.register(tell)
from dsrun.launcher.agent.start.bootstrap import run
run("script", sys.argv[1], [])
"""
GLOO = """
import atexit, os
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
atexit.register(lambda: print("own handler:", "there" if dist.is_initialized() else "left", flush=True))
dist.all_reduce(torch.ones(4))
"""


def run(folder: Path, source: str, starter: str = STARTER) -> subprocess.CompletedProcess[str]:
    path = folder / "train.py"
    path.write_text(source)
    command = [sys.executable, "-c", starter, str(path)]
    environment = clean_environment()
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)


#: How a program ends, its exit code, and whether its group is there at the very end.
ENDS = [
    ("", 0, "left"),
    ("raise SystemExit", 0, "left"),
    ("raise SystemExit(0)", 0, "left"),
    ("dist.destroy_process_group()", 0, "left"),
    ("atexit.register(dist.destroy_process_group)", 0, "left"),
    ("raise SystemExit(7)", 7, "there"),
    ("raise ValueError('no')", 1, "there"),
]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """How the programs ended, each a fork with torch, as ranks are."""
    folder = tmp_path_factory.mktemp("programs")
    starters: list[str] = []
    for number, (last, _, _) in enumerate(ENDS):
        path = folder / f"train{number}.py"
        path.write_text(GLOO + last)
        starters.append(f"import sys\nsys.argv[1:] = [{str(path)!r}]\n{STARTER}")
    return {last: end for (last, _, _), end in zip(ENDS, run_programs(starters), strict=True)}


@pytest.mark.parametrize(("last", "code", "at_last"), ENDS)
def test_groups_are_left_after_the_programs_own_handlers_unless_it_failed(
    ended: dict[str, Ended], last: str, code: int, at_last: str
) -> None:
    end = ended[last]
    assert end.code == code, end.err
    own = "left" if "destroy" in last else "there"
    # Gloo of torch 2.10 writes there how many ranks it is connected to.
    lines = [line for line in end.out.splitlines() if not line.startswith("[Gloo] ")]
    assert lines == [f"own handler: {own}", f"at last: {at_last}"]


#: Stands for torch, as far as it is asked; `destroy_process_group` waits for a peer that never comes.
STUCK = """
import sys, threading, types
torch = types.SimpleNamespace(
    is_available=lambda: True,
    is_initialized=lambda: True,
    get_backend_config=lambda: "%s",
    destroy_process_group=lambda: (print("begun", flush=True), threading.Event().wait()),
)
sys.modules["torch.distributed"] = torch
"""
#: With less patience than ranks have.
IMPATIENT = """
import sys
from dsrun.launcher.agent.start.gloo_exit import GlooExit
gloo_exit = GlooExit(patience_s=0.2)
exec(open(sys.argv[1]).read())
gloo_exit.program_ended()
"""


@pytest.mark.parametrize("config", ["cpu:gloo,cuda:gloo", "cpu:gloo,cuda:nccl", "cuda:nccl"])
def test_a_group_that_cannot_be_left_does_not_keep_the_rank(tmp_path: Path, config: str) -> None:
    ended = run(tmp_path, STUCK % config, IMPATIENT)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "begun\n", "")


@pytest.mark.parametrize("config", ["cpu:gloo,cuda:ucc", "cpu:mpi"])
def test_groups_of_other_libraries_are_left_alone(tmp_path: Path, config: str) -> None:
    ended = run(tmp_path, STUCK % config, IMPATIENT)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_a_fork_of_the_rank_leaves_nothing(tmp_path: Path) -> None:
    # The fork ends through the same handlers, without the thread that would have to let go.
    fork = "import os\nif os.fork() == 0: raise SystemExit(0)\nassert os.wait()[1] == 0\n"
    ended = run(tmp_path, GLOO + "import atexit\n" + fork)
    assert ended.returncode == 0, ended.stderr
    assert [line for line in ended.stdout.splitlines() if line.startswith("at last")] == [
        "at last: there",
        "at last: left",
    ]
