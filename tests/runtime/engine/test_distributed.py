"""How long a rank that joins by `init_distributed` waits for the others."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dsrun.contract import GROUP_TIMEOUT_ENV
from support.cli import clean_environment

PROGRAM = """
import dsrun
from dsrun.runtime.compat import timeout_of
import torch.distributed as dist
dsrun.init_distributed(%s)
assert dist.group.WORLD is not None
print(timeout_of(dist.group.WORLD))
"""


@pytest.mark.parametrize(
    ("told", "argument", "waits_s"), [({}, "", 2400), ({GROUP_TIMEOUT_ENV: "9600"}, "", 9600), ({}, "timeout_s=7", 7)]
)
def test_groups_wait_as_long_as_the_script_says_else_as_the_launcher_does(
    told: dict[str, str], argument: str, waits_s: float
) -> None:
    env = clean_environment(CUDA_VISIBLE_DEVICES="", **told)
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM % argument], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    assert float(ended.stdout) == waits_s
