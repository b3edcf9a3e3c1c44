"""docs/guides/heartbeats.md: its script hangs, and is told as the guide shows it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.cli import clean_environment, run_dsrun
from support.dumps import MONITOR

pytestmark = [pytest.mark.timeout(120), pytest.mark.depends_on_speed("hang time-outs of the guide")]
GUIDE = (Path(__file__).parents[2] / "docs/guides/heartbeats.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, re.S)


def told(lines: str) -> list[str]:
    """What is told of the rank that hangs; without times, and without Python's own line numbers."""
    kept = [line for line in lines.splitlines() if line.startswith(("error: ", "  rank 1 "))]
    return [re.sub(r"[\d.]+s\b|threading.py:\d+", "#", line) for line in kept]


def test_the_guides_hang_is_told_as_it_says(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(blocks("python")[0])
    command, _, shown = blocks("console")[0].partition("\n")
    env = clean_environment(XDG_STATE_HOME=str(tmp_path / "state"), CUDA_VISIBLE_DEVICES="")
    ended = run_dsrun(*command.removeprefix("$ dsrun ").split(), cwd=tmp_path, env=env, timeout_s=90)
    assert ended.exit_code == 76
    assert len(told(shown)) == 2
    assert told(ended.stderr) == told(shown)


#: The guide's ranks of NCCL become ranks of Gloo on the CPU, line by line.
ON_CPU = {
    'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))': "import monitor",
    'dist.init_process_group("nccl")': 'dist.init_process_group("gloo")',
    'device="cuda"': 'device="cpu"',
}


def test_the_guides_collective_is_named_with_the_rank_that_has_not_called_it(tmp_path: Path) -> None:
    program = blocks("python")[1]
    for words, instead in ON_CPU.items():
        assert program.count(words) == 1
        program = program.replace(words, instead)
    # Its first line is its name.
    (tmp_path / "ranks.py").write_text(program)
    (tmp_path / "monitor.py").write_text(MONITOR)
    env = clean_environment(XDG_STATE_HOME=str(tmp_path / "state"), CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    args = ("-n", "4", "--hang-timeout", "15s", "--on-hang", "stop", "ranks.py")
    ended = run_dsrun(*args, cwd=tmp_path, env=env, timeout_s=100)
    assert ended.exit_code == 76
    told = blocks("text")[0].splitlines()[0]
    assert told in ended.stderr.splitlines(), ended.stderr
