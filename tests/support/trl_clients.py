"""What came of the scripts of TRL and PEFT, each of which trains once for each config; `clients.py` runs them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support import clients

#: Variables that spare the log bars of progress.
_QUIET = {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
#: What the scripts import.
_PRELOADED = (*clients.HUGGING_FACE, "peft", *(f"trl.trainer.{name}_trainer" for name in ("sft", "dpo", "grpo")))
#: What stands for a config in a script's words where it trains without DeepSpeed.
NONE = "none"

_AUTO = ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"]
_AUTO_AT_3 = ["reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"]


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


def run_alone(folder: Path, runs: Sequence[Sequence[str]], *, as_deepspeed: bool = False) -> Job:
    """Runs scripts in one process without a launcher.

    Args:
        folder: folder for all that is written.
        runs: runs, each a script and its own words.
        as_deepspeed: whether `deepspeed` is dsrun there; else it is not to be had.
    """
    face = ["-m", "dsrun.as_deepspeed"] if as_deepspeed else []
    return Job(folder, clients.run_words(folder, [*face, *clients.several(*runs)], **_QUIET).text)


def run_on_dsrun(folder: Path, runs: Sequence[Sequence[str]], *, ranks: int = 2) -> Job:
    """Runs scripts in ranks of `dsrun --as-deepspeed`.

    Args:
        folder: folder for all that is written.
        runs: runs, each a script and its own words.
        ranks: number of ranks.
    """
    job = clients.run_on_dsrun(folder, *runs, ranks=ranks, preload=_PRELOADED, **_QUIET)
    return Job(folder, job.text, [count for count in job.updates if count])
