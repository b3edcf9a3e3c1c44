"""A signal to any rank: all of them finish the step, save, and end with the code that says which signal it was."""

from __future__ import annotations

import gc
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import dsrun
from dsrun.checkpoint_files.storage.tags import complete_tags
from dsrun.config.load import load
from dsrun.errors import ConfigError, InputError
from support.inside_engine import saver_of
from support.ranks import run_ranks
from support.training import config, full_parameters, make_engine, train

#: Two after the last one that any rank takes before it is stopped.
STEPS = 6


def _train_until_signalled(
    folder: str, stage: int, accumulation: int, by_config: bool, at: dict[int, int]
) -> tuple[int, int, list[float]]:
    """Trains; ranks signal themselves before a micro step. Returns the exit code, finished steps and losses."""
    dsrun.init_distributed()
    section = {"save_on_signal": folder, "signals": ["SIGTERM", "SIGUSR1"]} if by_config else {}
    engine = make_engine(config(stage, micro=1, accumulation=accumulation, checkpoint=section))
    if not by_config:
        engine.save_on_signal(folder, ["SIGUSR1", "SIGTERM"], client_state=lambda: {"at": engine.global_steps})
    samples = accumulation * engine.world_size
    losses: list[float] = []
    micro_step = at.get(engine.global_rank)
    assert not engine.stop_requested
    forward = engine.module.forward

    def signalled(*args: Any) -> Any:
        if engine.micro_steps == micro_step:
            os.kill(os.getpid(), signal.SIGTERM if engine.global_rank else signal.SIGUSR1)
        return forward(*args)

    engine.module.forward = signalled

    def to_the_end() -> None:
        for step in range(STEPS):
            losses.extend(train(engine, range(step, step + 1), samples=samples))

    with pytest.raises(SystemExit) as ended:
        to_the_end()
    assert engine.stop_requested == (engine.global_rank in at), "the others learn of it with the step"
    engine.destroy()
    assert isinstance(ended.value.code, int)
    return ended.value.code, engine.global_steps, losses


def _resume(folder: str, stage: int, accumulation: int) -> tuple[Any, list[float], dict[str, Any]]:
    engine = make_engine(config(stage, micro=1, accumulation=accumulation), seed=99)
    _, client_state = engine.load_checkpoint(folder)
    first = engine.global_steps
    return (
        client_state,
        train(engine, range(first, STEPS), samples=accumulation * engine.world_size),
        full_parameters(engine),
    )


def _undisturbed(stage: int, accumulation: int) -> tuple[list[float], dict[str, Any]]:
    engine = make_engine(config(stage, micro=1, accumulation=accumulation))
    return train(engine, range(STEPS), samples=accumulation * engine.world_size), full_parameters(engine)


@pytest.mark.parametrize(
    ("stage", "accumulation", "by_config", "at", "code", "steps"),
    [
        (0, 1, True, {1: 3}, 143, 4),
        (2, 2, False, {0: 4}, 128 + signal.SIGUSR1, 3),
        (3, 2, True, {0: 5, 1: 4}, 143, 3),
    ],
)
def test_all_ranks_save_after_the_same_step_and_the_run_goes_on_from_there(
    tmp_path: Path, stage: int, accumulation: int, by_config: bool, at: dict[int, int], code: int, steps: int
) -> None:
    expected, weights = run_ranks(2, _undisturbed, stage, accumulation)[0]
    ended = run_ranks(2, _train_until_signalled, str(tmp_path), stage, accumulation, by_config, at)
    assert [rank[:2] for rank in ended] == [(code, steps)] * 2
    assert ended[0][2] == expected[: steps - 1], "the last step was finished, and its loss not handed out"
    client_state, losses, resumed = run_ranks(2, _resume, str(tmp_path), stage, accumulation)[0]
    assert client_state == ({} if by_config else {"at": steps})
    assert losses == expected[steps:]
    assert all((resumed[name] == weight).all() for name, weight in weights.items())


def _stopped_while_saving(folder: str, fails: bool) -> tuple[int, list[str]]:
    """A signal comes while a checkpoint is being written, whose next one would be refused."""
    section = {"when_busy": "refuse", "save_on_signal": folder}
    engine = make_engine(config(1, micro=1, checkpoint=section))
    train(engine, range(2), samples=1)
    waited_for = threading.Event()
    write, wait = saver_of(engine)._beside.write, engine.wait_for_checkpoint

    def write_once_it_is_waited_for(*arguments: Any) -> Any:
        assert waited_for.wait(60)
        if fails:
            raise OSError("no disk")
        return write(*arguments)

    def wait_for_it() -> None:
        waited_for.set()
        try:
            wait()
        finally:
            saver_of(engine)._beside.write = write

    saver_of(engine)._beside.write = write_once_it_is_waited_for
    engine.wait_for_checkpoint = wait_for_it
    engine.save_checkpoint(folder)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        train(engine, range(2, 3), samples=1)
    engine.destroy()
    assert isinstance(ended.value.code, int)
    return ended.value.code, complete_tags(Path(folder))


@pytest.mark.parametrize("fails", [False, True])
def test_a_signal_saves_whatever_became_of_a_save_that_is_under_way(tmp_path: Path, fails: bool) -> None:
    tags = ["global_step3"] if fails else ["global_step2", "global_step3"]
    assert run_ranks(1, _stopped_while_saving, str(tmp_path), fails) == [(143, tags)]


def _given_back() -> list[bool]:
    def mine(signum: int, frame: Any) -> None:
        raise KeyError(signum)

    signal.signal(signal.SIGTERM, mine)
    found: list[bool] = []
    engine = make_engine(config(1, micro=1))
    engine.save_on_signal("nowhere")
    engine.save_on_signal("nowhere", ["SIGTERM", "SIGUSR1"])
    found.append(signal.getsignal(signal.SIGTERM) is mine)
    engine.destroy()
    found.append(signal.getsignal(signal.SIGTERM) is mine)
    engine = make_engine(config(1, micro=1))
    engine.save_on_signal("nowhere")
    del engine
    gc.collect()
    with pytest.raises(KeyError):
        os.kill(os.getpid(), signal.SIGTERM)
    return found


def test_a_signal_means_what_it_did_once_the_engine_is_gone() -> None:
    assert run_ranks(1, _given_back) == [[False, True]]


def _refused() -> list[str]:
    engine = make_engine(config(1, micro=1))
    found: list[str] = []
    # A folder below a file, which would be missed when the signal comes.
    for arguments in (("", ["SIGTERM"]), ("folder", ["SIGKILL"]), (f"{__file__}/folder", ["SIGTERM"])):
        with pytest.raises(InputError) as caught:
            engine.save_on_signal(*arguments)
        found.append(str(caught.value))
    return found


def test_what_cannot_be_done_is_refused() -> None:
    empty, unknown, unusable = run_ranks(1, _refused)[0]
    assert f"save_on_signal: {__file__}/folder: {__file__} is no folder" in unusable
    assert "save_on_signal: save_dir is empty" in empty
    assert "signals are ['SIGKILL']" in unknown
    for signals in ([], ["SIGKILL"], "SIGTERM"):
        with pytest.raises(ConfigError, match="signals"):
            load({**config(1, micro=1), "checkpoint": {"save_on_signal": "x", "signals": signals}}, world_size=1)


def _save_nothing(*arguments: Any, **options: Any) -> bool:
    return True


def _told_on_rank_0_alone(folder: str) -> str:
    engine = make_engine(config(1, micro=1))
    if engine.global_rank == 0:
        engine.save_on_signal(folder)
        os.kill(os.getpid(), signal.SIGTERM)
        # What it would save waits for the other one, which has an error to tell.
        engine.save_checkpoint = _save_nothing
    with pytest.raises((SystemExit, InputError)) as caught:
        train(engine, range(1), samples=engine.world_size)
    return str(caught.value)


def test_a_rank_that_was_not_told_where_to_save_says_so(tmp_path: Path) -> None:
    assert run_ranks(2, _told_on_rank_0_alone, str(tmp_path)) == [
        "143",
        "save_on_signal: a rank got SIGTERM, and this one does not know where to save",
    ]
