"""A process of two ranks (threads) that saves without an end, killed at some moment, and what must be left.

For rows C1 and C2 of the fault matrix, and for scripts/soak.
"""

from __future__ import annotations

import random
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path

import psutil
import torch

from dsrun.checkpoint_files.folder.verify import verify
from dsrun.checkpoint_files.parse import read_index
from dsrun.checkpoint_files.storage.tags import complete_tags, latest_tag
from dsrun.errors import CheckpointError
from dsrun.runtime.checkpoint.format.load import read
from dsrun.runtime.checkpoint.save.request import SaveRequest
from dsrun.runtime.checkpoint.save.saver import Saver
from support.entries import entry_of
from support.ranks import forkserver, start
from support.savers import nothing, save_one, value_of, with_savers

SIZE = 2
NUMEL = 6 << 20
LATEST_MOMENT_S = 0.8
VICTIMS = ("rank", "all", "a writer", "writers")


def kill_while_saving(folder: Path, *, seed: str, repeated: bool, asynchronous: bool) -> str:
    """Kills a process that saves, at a random moment; returns what was killed.

    Args:
        folder: folder for the checkpoints of the process.
        seed: seed of the random moment and victim.
        repeated: whether the process saves one tag again and again; else it saves a new tag each time.
        asynchronous: whether the process saves through writer processes, beside training.

    Raises:
        AssertionError: what is left is not whole, or older than what was said to be saved.
    """
    chance = random.Random(seed)
    victim = chance.choice(VICTIMS if asynchronous else VICTIMS[:1])
    ours, theirs = forkserver.Pipe(duplex=False)
    process = forkserver.Process(
        target=_save_on_and_on, args=(theirs, str(folder), repeated, asynchronous), daemon=False
    )
    start(process)
    theirs.close()
    try:
        assert ours.poll(60), "it never saved"
        wait([process.sentinel], timeout=chance.uniform(0, LATEST_MOMENT_S))
        writers = _kill(psutil.Process(process.pid), victim)
        # Writers that were killed between two saves are replaced, and saving goes on.
        wait([process.sentinel], timeout=chance.uniform(0, LATEST_MOMENT_S))
        if process.is_alive():
            writers += _kill(psutil.Process(process.pid), "rank")
        said = 0.0
        with suppress(EOFError):
            while ours.poll(60):
                said = ours.recv()
                assert isinstance(said, float), f"a save failed in another way: {said}"
    finally:
        process.kill()
        process.join()
        ours.close()
    # A writer goes when its rank does, but not at the same moment, and has its file locked until then.
    _, left = psutil.wait_procs(writers, timeout=60)
    assert not left, f"writers outlive their rank: {left}"
    _check(folder, said)
    return f"{victim}, {'the same tag' if repeated else 'new tags'}, {'beside' if asynchronous else 'in'} training"


def _kill(rank: psutil.Process, victim: str) -> list[psutil.Process]:
    """Kills a rank, writers of it, or both; returns its writers."""
    with suppress(psutil.NoSuchProcess):
        rank.suspend()  # so that it starts no writer meanwhile
        writers = rank.children()
        for writer in writers[:1] if victim == "a writer" else writers if victim in ("writers", "all") else ():
            with suppress(psutil.NoSuchProcess):
                writer.kill()
        if victim in ("rank", "all"):
            rank.kill()
        else:
            rank.resume()
        return writers
    return []


def _check(folder: Path, said: float) -> None:
    tags = complete_tags(folder)
    values = {}
    for tag in tags:
        index = read_index(folder / tag)
        assert list(verify(folder / tag, index)) == [], tag
        values[tag] = index.values["value"]
        found = torch.empty(NUMEL)
        read(index, folder / tag, [entry_of("w", found)])
        assert torch.equal(found, torch.full((NUMEL,), values[tag])), f"{tag} is a mixture"
    latest = latest_tag(folder)
    assert latest in values, f"latest is {latest}; there are {tags}"
    assert values[latest] >= said, f"save {said} was said to be there; the latest one is {values[latest]}"
    for tag in tags[-1:]:
        save_one(folder, tag, 1.0)
        assert value_of(folder / tag, sizes=(1,)) == 1.0
        assert len(list((folder / tag).iterdir())) == 2, "what was killed is gone after the next save"


def _save_on_and_on(end: Connection, folder: str, repeated: bool, asynchronous: bool) -> None:
    """Says the number of each save that is there; ends where one fails, as a killed writer makes it."""
    torch.set_num_threads(1)

    def body(saver: Saver, rank: int) -> None:
        number = 0.0
        while True:
            number += 1
            half = torch.full((NUMEL // SIZE,), number)
            entry = entry_of("w", half, shape=(NUMEL,), start=rank * NUMEL // SIZE)
            wanted = SaveRequest(
                entries=[entry],
                values={"value": number},
                rank_values={},
                aliases={},
                save_latest=True,
                when_saved=lambda nbytes, seconds: None,
            )
            tag = "t" if repeated else f"global_step{int(number)}"
            try:
                saver.save(Path(folder), tag, lambda wanted=wanted: wanted, progress=nothing)  # type: ignore[misc]
                saver.finish(nothing)
            except CheckpointError as error:
                if "the process that writes checkpoints was killed by signal 9" not in str(error) and rank == 0:
                    end.send(str(error))
                return
            if rank == 0:
                end.send(number)

    with_savers(SIZE, body, asynchronous=asynchronous, keep_last=3)
    end.close()
