"""The ranks of one contender as processes that wait for a word: started, asked all at once, ended. Measures nothing."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore

from .job import Job

_CHECKOUT = Path(__file__).resolve().parents[3]
#: For the slowest word there is; a rank that hangs is an error and not a figure.
_LIMIT_S = 300.0
#: Variable with the descriptor of the memory that a team's ranks share.
SHARED_MEMORY_ENV = "BENCH_SHARED_MEMORY"
#: Ranks of peers end with Gloo's threads at work; nobody waits for that.
_END_S = 10.0


class Team:
    """All ranks of a job, each a process with one thread; a context, at whose end none is left.

    Args:
        job: job that the ranks do.
        python: the interpreter that has the contender.
        checkout: checkout of this repository that the ranks import dsrun and the contenders from.
        shared_bytes: bytes of memory that the ranks share, see `SHARED_MEMORY_ENV`; 0: none.

    Attributes:
        build_s: seconds that each rank has built for, in order of rank.
    """

    def __init__(
        self, job: Job, *, python: str = sys.executable, checkout: Path = _CHECKOUT, shared_bytes: int = 0
    ) -> None:
        self.job = job
        self.build_s: list[float] = []
        self._python = python
        self._checkout = checkout
        self._memory: int | None = None
        if shared_bytes:
            self._memory = os.memfd_create("shared")
            os.ftruncate(self._memory, shared_bytes)
        self._ranks: list[subprocess.Popen[str]] = []
        self._store: TCPStore | None = None
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115

    def __enter__(self) -> Team:
        """Starts them and lets them build."""
        # The port is the kernel's choice, and the store this process's, as under torchrun.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.job.ranks):
            self._ranks.append(
                subprocess.Popen(
                    [self._python, "-m", self.job.program, self.job.to_json()],
                    env=self._environment(rank, self._store.port),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._log,
                    text=True,
                    pass_fds=() if self._memory is None else (self._memory,),
                )
            )
        try:
            self.build_s = self.ask("build")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Ends them."""
        for process in self._ranks:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._ranks:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._log.close()
        if self._memory is not None:
            os.close(self._memory)

    def ask(self, words: str) -> list[Any]:
        """Says one thing to all ranks and returns their answers, in order of rank."""
        for process in self._ranks:
            assert process.stdin is not None
            process.stdin.write(f"{words}\n")
            process.stdin.flush()
        return [json.loads(self._read(process)) for process in self._ranks]

    def step(self, count: int = 1) -> list[dict[str, float]]:
        """Takes steps; returns of each the slowest rank's seconds, the processor seconds of all ranks, and the loss."""
        return [_of_all(ranks) for ranks in zip(*self.ask(f"step {count}"), strict=True)]

    def _read(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        ready = select.select([process.stdout], [], [], _LIMIT_S)[0]
        line = process.stdout.readline() if ready else ""
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"{self.job}: no answer; the ranks said:\n{self._log.read()[-3000:]}")
        return line

    def _environment(self, rank: int, port: int) -> dict[str, str]:
        place = {
            "RANK": rank,
            "WORLD_SIZE": self.job.ranks,
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": self.job.ranks,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": 1,
            "DS_ACCELERATOR": "cpu",
        }
        if self._memory is not None:
            place[SHARED_MEMORY_ENV] = self._memory
        paths = [str(self._checkout / "scripts" / "bench"), str(self._checkout / "src")]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("DSRUN_")}
        return {**kept, "PYTHONPATH": os.pathsep.join(paths), **{name: str(value) for name, value in place.items()}}


def _of_all(ranks: Sequence[dict[str, Any]]) -> dict[str, float]:
    together = {
        key: (sum if key.endswith("cpu_s") else max)(rank[key] for rank in ranks) for key in ranks[0] if key != "loss"
    }
    # Of a pipeline, perhaps the last stage alone knows it.
    return {**together, "loss": next(rank["loss"] for rank in reversed(ranks) if rank["loss"] is not None)}
