"""A real job on this machine that a test looks at while it runs: what its ranks say, and what commands print of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from dsrun.launcher.jobs.live_status import LiveRank, read_live
from support.cli import clean_environment, run_dsrun, start_dsrun

_LIVE_S, _END_S = 60, 90


class LiveJob:
    """A script that `dsrun` runs, the only job of its folder.

    Args:
        folder: Folder of the script and of the job's state.
        script: Text of the script.
        *words: Words of `dsrun` before the script's name.
    """

    def __init__(self, folder: Path, script: str, *words: str) -> None:
        self._folder = folder
        (folder / "train.py").write_text(script)
        self._env = clean_environment(OMP_NUM_THREADS="1", XDG_STATE_HOME=str(folder))
        self._process = start_dsrun(*words, "train.py", cwd=folder, env=self._env)

    @property
    def folders(self) -> list[Path]:
        """The job's folder, once there is one."""
        return list((self._folder / "dsrun" / "jobs").glob("*"))

    def wait_for_ranks(self, count: int, says: Callable[[LiveRank], object]) -> None:
        """Returns when so many ranks say something; fails if they do not in a minute."""
        seen: list[LiveRank] = []
        deadline_s = time.monotonic() + _LIVE_S
        while len(seen) < count and time.monotonic() < deadline_s:
            time.sleep(0.2)
            lives = [read_live(folder) for folder in self.folders]
            seen = [rank for live in lives if live is not None for rank in live.ranks if says(rank)]
        assert len(seen) == count, seen

    def ask(self, *words: str) -> str:
        """Returns what a command of `dsrun` prints of the job."""
        result = run_dsrun(*words, cwd=self._folder, env=self._env)
        assert result.exit_code == 0, result.stderr
        return result.stdout

    def end(self) -> str:
        """Waits for the job's end, which must be a good one; returns what the launcher has said."""
        exit_code, said = self.wait()
        assert exit_code == 0, said
        return said

    def wait(self) -> tuple[int, str]:
        """Waits for the job's end; returns the launcher's exit code and what it has said."""
        _, said = self._process.communicate(timeout=_END_S)
        return self._process.returncode, said.decode()

    def kill(self) -> None:
        """Ends the launcher, and with it all ranks, if they still run."""
        with self._process:
            self._process.kill()


@contextmanager
def live_job(folder: Path, script: str, *words: str) -> Generator[LiveJob]:
    """Runs a script for the time of a `with`; see `LiveJob`."""
    job = LiveJob(folder, script, *words)
    try:
        yield job
    finally:
        job.kill()
