"""A loader's workers leave the signals of a stop to their rank, and end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress

import pytest

from dsrun.errors import InputError
from dsrun.runtime.data.worker_process import check_temporary_folder
from support.forked_programs import run_programs, with_words
from support.processes import wait_for_end

#: Iterates, has another process send each worker a signal, iterates again, and ends with its workers alive.
PROGRAM = """
import os, signal, subprocess, sys
from torch.utils.data import DataLoader, Dataset
from dsrun.runtime.data.worker_process import leave_signals_to_rank

class Pids(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return os.getpid()

loader = DataLoader(Pids(), num_workers=2, persistent_workers=True, worker_init_fn=leave_signals_to_rank)
before = sorted({int(pid) for pid in loader})
kill = "import os, sys; [os.kill(int(pid), int(sys.argv[1])) for pid in sys.argv[2:]]"
subprocess.run([sys.executable, "-c", kill, str(int(signal.Signals[sys.argv[1]])), *map(str, before)], check=True)
assert len(before) == 2
assert sorted({int(pid) for pid in loader}) == before, "these are other workers"
if sys.argv[2] == "dies":
    print(*before, flush=True)
    signal.pause()
print("done")
"""


def test_workers_live_through_a_stop_and_end_when_their_rank_does() -> None:
    names = ("SIGTERM", "SIGUSR1", "SIGUSR2")
    for name, done in zip(names, run_programs([with_words(PROGRAM, name, "ends") for name in names]), strict=True):
        assert (done.code, done.out) == (0, "done\n"), f"{name}: {done.err}"


def test_workers_end_when_asked_to_once_their_rank_is_gone() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "SIGTERM", "dies"], stdout=subprocess.PIPE, text=True
    ) as rank:
        assert rank.stdout is not None
        workers = [int(word) for word in rank.stdout.readline().split()]
        rank.kill()
        rank.wait()
        for pid in workers:
            with suppress(ProcessLookupError):  # torch's own watch has noticed it first
                os.kill(pid, signal.SIGTERM)
        assert all(wait_for_end(pid, timeout_s=60) for pid in workers)
        rank.stdout.close()
    assert len(workers) == 2


def test_a_folder_too_deep_for_the_workers_sockets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_temporary_folder()
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + "d" * 80)
    with pytest.raises(InputError, match=r"has 85 bytes; .* it may have 75") as caught:
        check_temporary_folder()
    assert caught.value.hint is not None
    assert "TMPDIR" in caught.value.hint
