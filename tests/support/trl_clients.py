"""Runs the scripts of TRL and PEFT, by `dsrun --as-deepspeed` and as plain programs, and reads what came of them.

The scripts lie in tests/clients/scripts; one process runs several, for their imports take longer than their training.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support.cli import clean_environment, start_dsrun

SCRIPTS = Path(__file__).parent.parent / "clients" / "scripts"
INSTALL = "pip install -e '.[test-clients]'"
#: A job's deadline: a few times what it takes on two busy cores.
DEADLINE_S = 200
#: What stands for a config in a script's words where it trains without DeepSpeed.
NONE = "none"

_AUTO = ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"]
_AUTO_AT_3 = ["reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"]


def need(*packages: str) -> None:
    """Skips the file's tests where a package of the clients is missing."""
    for package in packages:
        pytest.importorskip(package, reason=f"needs {package}: {INSTALL}")


def write_configs(folder: Path) -> dict[str, str]:
    """Writes a DeepSpeed config for each stage and offload; returns their paths by `stage` or `stage-cpu`."""
    paths: dict[str, str] = {}
    for stage in range(4):
        for offload in ("", "-cpu") if stage else ("",):
            zero: dict[str, Any] = {"stage": stage}
            if offload:
                zero["offload_optimizer"] = {"device": "cpu"}
            if stage == 3:
                zero |= dict.fromkeys(_AUTO_AT_3, "auto") | {"stage3_gather_16bit_weights_on_model_save": True}
                if offload:
                    zero["offload_param"] = {"device": "cpu"}
            path = folder / f"{stage}{offload}.json"
            path.write_text(json.dumps(dict.fromkeys(_AUTO, "auto") | {"zero_optimization": zero}))
            paths[f"{stage}{offload}"] = str(path)
    return paths


@dataclass(frozen=True, slots=True)
class Training:
    """What a script has written of one training.

    Attributes:
        folder: folder of its files.
        ranks: facts of each rank.
    """

    folder: Path
    ranks: list[dict[str, Any]]

    def series(self, key: str) -> list[float]:
        """The values of one key of rank 0's log, in its order."""
        return [entry[key] for entry in self.ranks[0]["log"] if key in entry]

    @property
    def is_plain(self) -> bool:
        """Whether it was done without an engine."""
        return all(facts["engine"] is None for facts in self.ranks)

    @property
    def losses(self) -> list[float]:
        return self.series("loss")

    def engine_steps(self) -> list[tuple[int, int]]:
        """Each rank's stage and optimizer steps, as its engine says."""
        return [(facts["stage"], facts["engine_steps"]) for facts in self.ranks]

    def weights(self, name: str) -> bytes:
        """The bytes of the file of weights that the trainer has saved."""
        return (self.folder / name).read_bytes()


@dataclass(slots=True)
class Job:
    """A program that has run several scripts, one after the other.

    Attributes:
        folder: folder that the scripts write into, each into one of its own.
        text: all that it has said.
        steps: optimizer steps of every engine that took any, in their order, as the job's records have them.
    """

    folder: Path
    text: str
    steps: list[int] = field(default_factory=list)

    def training(self, script: str, name: str) -> Training:
        """What came of one config of one script.

        Args:
            script: the script's folder.
            name: name of the config.
        """
        folder = self.folder / script / name
        files = sorted(folder.glob("facts-*.json"))
        assert files, f"{folder} has no facts: {self.text}"
        return Training(folder, [json.loads(file.read_text()) for file in files])


def words_of(runs: Sequence[Sequence[str]]) -> list[str]:
    """The words of `several.py` for these runs, each a script and its own words."""
    joined: list[str] = []
    for run in runs:
        joined += [*(["+"] if joined else []), *run]
    return joined


def run_alone(folder: Path, runs: Sequence[Sequence[str]], *, as_deepspeed: bool = False) -> Job:
    """Runs scripts in one process without a launcher.

    Args:
        folder: folder for all that is written.
        runs: runs, each a script and its own words.
        as_deepspeed: whether `deepspeed` is dsrun there; else it is not to be had.
    """
    face = ["-m", "dsrun.as_deepspeed"] if as_deepspeed else []
    return _finish(
        folder,
        subprocess.Popen(
            [sys.executable, *face, str(SCRIPTS / "several.py"), *words_of(runs)],
            cwd=folder,
            env=_environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ),
    )


def run_on_dsrun(folder: Path, runs: Sequence[Sequence[str]], *, ranks: int = 2) -> Job:
    """Runs scripts in ranks of `dsrun --as-deepspeed`.

    Args:
        folder: folder for all that is written.
        runs: runs, each a script and its own words.
        ranks: number of ranks.
    """
    words = ["--as-deepspeed", "-n", str(ranks), "--no-gpu", str(SCRIPTS / "several.py"), *words_of(runs)]
    before = set(_records(folder))
    job = _finish(folder, start_dsrun(*words, cwd=folder, env=_environment(folder)))
    (records,) = set(_records(folder)) - before
    job.steps = _steps_of_engines(records)
    return job


def _finish(folder: Path, process: subprocess.Popen[bytes]) -> Job:
    try:
        out, err = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.terminate()  # dsrun ends its ranks, and says what each did last
        out, err = process.communicate(timeout=60)
        pytest.fail(f"the job did not end in {DEADLINE_S} s:\n{_text(out, err)}")
    assert process.returncode == 0, f"exit code {process.returncode}:\n{_text(out, err)}"
    return Job(folder, _text(out, err))


def _text(*streams: bytes | None) -> str:
    return "\n".join((stream or b"").decode(errors="replace") for stream in streams)


def _environment(folder: Path) -> dict[str, str]:
    return clean_environment(
        XDG_STATE_HOME=str(folder / "state"),
        HF_HOME=str(folder / "hf"),
        HF_HUB_OFFLINE="1",
        HF_DATASETS_DISABLE_PROGRESS_BARS="1",
        TQDM_DISABLE="1",
        CUDA_VISIBLE_DEVICES="",
        # As many as a rank has, so that the sums of a matrix product are taken in the same order.
        OMP_NUM_THREADS="1",
    )


def _records(folder: Path) -> list[Path]:
    return sorted((folder / "state").glob("dsrun/jobs/*/records.jsonl"))


def _steps_of_engines(records: Path) -> list[int]:
    counts: list[int] = []
    for line in records.read_text().splitlines():
        record = json.loads(line)
        if record["event"] == "start":
            counts.append(0)
        elif record["event"] == "step" and record["applied"]:
            counts[-1] += 1
    return [count for count in counts if count]
