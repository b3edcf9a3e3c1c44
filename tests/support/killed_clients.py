"""Kills Hugging Face's Trainer inside its saves, goes on from what is left, and says whether that was whole.

The Trainer writes a checkpoint's files one by one, `trainer_state.json` last, and removes the one before it then. So a
folder without that file is one that was not finished: it is taken away, as its user would, and the newest other one
must do. For the tests of clients, and for scripts/soak.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

from support import clients
from support.clients import EXAMPLES, SCRIPTS

#: A rank that no job has.
NO_RANK = 9
#: Updates, with a checkpoint after each.
UPDATES = 8
WORDS = [
    *("--use_cpu", "--report_to", "none", "--disable_tqdm", "true", "--logging_steps", "1", "--seed", "7"),
    *(
        "--learning_rate",
        "1e-2",
        "--warmup_steps",
        "2",
        "--per_device_train_batch_size",
        "2",
        "--samples",
        "16",
        "--tied",
    ),
    *("--num_train_epochs", "2", "--save_strategy", "steps", "--save_steps", "1", "--save_total_limit", "1"),
]
#: About the changes of files that a rank makes in the saves of one run.
CHANGES = (250, 30)


def train(folder: Path, out: str, *, config: str, rank: int = NO_RANK, number: int = 1) -> bool:
    """Trains from the newest checkpoint that was finished; returns whether that came to its end, with no rank killed.

    Args:
        folder: folder with the config, and of the job.
        out: the run's own folder, below.
        config: name of the DeepSpeed config.
        rank: rank that is killed.
        number: change of a checkpoint's files at which it is.

    Raises:
        AssertionError: no checkpoint is left where one was finished, or the run ended in another way.
    """
    before = newest_finished(folder / out)
    resume = [] if before is None else ["--resume_from_checkpoint", "true"]
    script = [str(EXAMPLES / "hf_trainer.py"), *WORDS, "--deepspeed", f"{config}.json", "--output_dir", out, *resume]
    words = ["-m", "dsrun", "--as-deepspeed", "-n", "2", "--no-gpu", str(SCRIPTS / "killed.py")]
    variables = clients.preloading(*clients.HUGGING_FACE)
    ended = clients.run_words(folder, [*words, str(rank), str(number), *script], check=False, **variables)
    was_killed = f"rank {rank} on localhost was killed by SIGKILL" in ended.text
    assert was_killed != (ended.exit_code == 0), ended.text
    after = newest_finished(folder / out)
    assert before is None or (after is not None and after >= before), f"checkpoint {before} has gone: {ended.text}"
    return not was_killed


def newest_finished(out: Path) -> int | None:
    """Removes checkpoints that were not finished, and returns the number of the newest of the others."""
    finished: list[int] = []
    for path in out.glob("checkpoint-*"):
        if (path / "trainer_state.json").is_file():
            finished.append(int(path.name.removeprefix("checkpoint-")))
        else:
            shutil.rmtree(path)
    return max(finished, default=None)


def losses(out: Path) -> list[float]:
    """The losses of a run that has come to its end, those before a kill among them."""
    log = json.loads((out / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in log if "loss" in entry]


def kill_again_and_again(folder: Path, out: str, *, config: str, kills: Sequence[tuple[int, int]]) -> int:
    """Kills a run at each of these places, lets it end then, and returns how often it was killed.

    Args:
        folder: folder with the config, and of the jobs.
        out: the run's own folder, below.
        config: name of the DeepSpeed config.
        kills: rank and change of a checkpoint's files of each kill.
    """
    ends = [train(folder, out, config=config, rank=rank, number=number) for rank, number in kills]
    assert train(folder, out, config=config)
    assert [path.name for path in (folder / out).glob("checkpoint-*")] == [f"checkpoint-{UPDATES}"]
    return ends.count(False)


def kill_at_random(folder: Path, *, seed: str) -> str:
    """Kills a run three times at random places, and compares it with one that nothing has stopped; for soaks.

    Raises:
        AssertionError: what was left was not whole, or the losses are others.
    """
    chance = random.Random(seed)
    config = chance.choice(["0", "2o", "3", "3op"])
    clients.write_configs(folder, clients.STAGES)
    assert train(folder, "whole", config=config)
    ranks = [chance.randrange(2) for _ in range(3)]
    # A third of what a whole run changes: each goes on where the one before was killed.
    kills = [(rank, chance.randint(1, CHANGES[rank] // 3)) for rank in ranks]
    count = kill_again_and_again(folder, "killed", config=config, kills=kills)
    assert losses(folder / "killed") == losses(folder / "whole"), f"{config}, {kills}"
    return f"killed {count} times, config {config}"
