"""Runs programs that were written for DeepSpeed, as they are, on `dsrun --as-deepspeed` and without it.

The scripts lie in tests/clients/scripts and scripts/examples. One process runs several of them, for their imports take
longer than their training. What a run came to is read from its files and from the engine's records, and not from an
exit code alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from support.cli import clean_environment

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "clients" / "scripts"
EXAMPLES = ROOT / "scripts" / "examples"
#: Has a job's spawner import what each rank would import by itself, see `preloading`.
PRELOADING = ROOT / "tests" / "clients" / "preloading"
#: What programs of transformers import. With the last one comes dsrun's engine, which `deepspeed` is.
HUGGING_FACE = ("transformers.trainer", "transformers.models.llama.modeling_llama", "datasets", "support.preloaded")
#: A job's deadline: a few times what it takes on two busy cores.
DEADLINE_S = 240
#: Keys that Hugging Face fills in from its own arguments.
AUTO = dict.fromkeys(
    ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"], "auto"
)


def need(*packages: str) -> None:
    """Skips the file's tests where a package of the clients is missing."""
    if (reason := why_none(*packages)) is not None:
        pytest.skip(reason, allow_module_level=True)


def why_none(*packages: str) -> str | None:
    """Says which of these packages is missing, and how to get it. Nothing is imported here."""
    missing = next((package for package in packages if find_spec(package) is None), None)
    return None if missing is None else f"{missing} is not installed; pip install -e '.[test-clients]'"


def write_configs(folder: Path, configs: Mapping[str, dict[str, Any]]) -> None:
    """Writes each DeepSpeed config to `NAME.json`."""
    for name, config in configs.items():
        (folder / f"{name}.json").write_text(json.dumps(config))


def zero(stage: int, *, offload: str = "", **more: Any) -> dict[str, Any]:
    """A DeepSpeed config for a program that brings its own optimizer.

    Args:
        stage: ZeRO stage.
        offload: states that are moved to the CPU: `o` for the optimizer's, `op` for parameters too.
        **more: further keys of the section.
    """
    section: dict[str, Any] = {"stage": stage, **more}
    for letter, key in (("o", "offload_optimizer"), ("p", "offload_param")):
        if letter in offload:
            section[key] = {"device": "cpu"}
    return AUTO | {"zero_optimization": section}


#: Each stage and what it can move to the CPU.
STAGES = {
    "0": zero(0),
    "1": zero(1),
    "1o": zero(1, offload="o"),
    "2": zero(2),
    "2o": zero(2, offload="o"),
    "3": zero(3),
    "3o": zero(3, offload="o"),
    "3op": zero(3, offload="op"),
}


@dataclass(frozen=True, slots=True)
class Job:
    """A program that has ended.

    Attributes:
        exit_code: its exit code.
        text: all that it has said.
        updates: optimizer steps of each engine, in the order of their making, as the job's records have them.
    """

    exit_code: int
    text: str
    updates: list[int]


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Variables of a program that finds no GPU, reaches no hub, and leaves everything in `folder`."""
    return clean_environment(
        XDG_STATE_HOME=str(folder / "state"),
        HF_HOME=str(folder / "hf"),
        HF_HUB_OFFLINE="1",
        CUDA_VISIBLE_DEVICES="",
        # As many as a rank has, so that the sums of a matrix product are taken in the same order.
        OMP_NUM_THREADS="1",
        # Scripts of the tests import some of what the examples have.
        **{"PYTHONPATH": str(EXAMPLES), **more},
    )


def several(*runs: Sequence[str | Path]) -> list[str]:
    """The words that run scripts one after the other in one process, each with words of its own."""
    joined = [str(SCRIPTS / "several.py")]
    for number, run in enumerate(runs):
        joined += [*(["+"] if number else []), *map(str, run)]
    return joined


def run_alone(folder: Path, *runs: Sequence[str | Path]) -> Job:
    """Runs scripts in one process, without a launcher and without a `deepspeed`.

    Args:
        folder: folder of the process.
        *runs: runs, each a script and its own words.
    """
    return _finish(folder, [*several(*runs)], environment(folder), check=True)


def run_on_dsrun(
    folder: Path,
    *runs: Sequence[str | Path],
    ranks: int = 2,
    preload: Sequence[str] = HUGGING_FACE,
    **more: str,
) -> Job:
    """Runs scripts in ranks of `dsrun --as-deepspeed`.

    Args:
        folder: folder of the ranks.
        *runs: runs, each a script and its own words.
        ranks: number of ranks.
        preload: modules that the scripts use, see `preloading`.
        **more: further variables.
    """
    words = ["-m", "dsrun", "--as-deepspeed", "-n", str(ranks), "--no-gpu", *several(*runs)]
    return run_words(folder, words, **more | preloading(*preload, path=more.get("PYTHONPATH", str(EXAMPLES))))


def preloading(*modules: str, path: str = str(EXAMPLES)) -> dict[str, str]:
    """Variables of a job whose ranks have modules from their spawner, as they have torch.

    transformers' Trainer is ten seconds of a core in each rank, and its training of a tiny model less than one. That a
    rank which imports it itself finds dsrun is for jobs without this: those of Accelerate's own launcher and of
    tests/shared/as_deepspeed.

    Args:
        *modules: names of the modules.
        path: PYTHONPATH without this.
    """
    return {"PYTHONPATH": f"{path}:{PRELOADING}:{ROOT / 'tests'}", "CLIENTS_PRELOADED": " ".join(modules)}


def run_words(folder: Path, words: Sequence[str], *, check: bool = True, **more: str) -> Job:
    """Runs python with these words, and reads the records of the job that it was, if any.

    Args:
        folder: folder of the process.
        words: words after `python`.
        check: whether an exit code other than 0 fails the test.
        **more: further variables.
    """
    return _finish(folder, words, environment(folder, **more), check=check)


def _finish(folder: Path, words: Sequence[str], env: Mapping[str, str], *, check: bool) -> Job:
    before = set(_records(folder))
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.terminate()  # dsrun ends its ranks, and says what each did last
        try:
            out, _ = process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, _ = process.communicate()
        raise AssertionError(f"it did not end in {DEADLINE_S} s:\n{out.decode(errors='replace')}") from None
    text = out.decode(errors="replace")
    assert not check or process.returncode == 0, f"exit code {process.returncode}:\n{text}"
    return Job(process.returncode, text, [count for path in set(_records(folder)) - before for count in _updates(path)])


def _records(folder: Path) -> list[Path]:
    return sorted((folder / "state").glob("dsrun/jobs/*/records.jsonl"))


def _updates(records: Path) -> list[int]:
    counts: list[int] = []
    for line in records.read_text().splitlines():
        record = json.loads(line)
        if record["event"] == "start":
            counts.append(0)
        elif record["event"] == "step" and record["applied"]:
            counts[-1] += 1
    return counts
