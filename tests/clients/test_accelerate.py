"""Hugging Face's Accelerate as it is, with loops written by hand, on dsrun.

The oracle is the same loop without DeepSpeed in one process, with the same batches.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor, allclose, equal

from support import clients
from support.clients import EXAMPLES, STAGES, Job

clients.need("transformers", "accelerate")

pytestmark = pytest.mark.timeout(3 * clients.DEADLINE_S)

LOOP = EXAMPLES / "accelerate_loop.py"
#: Five micro batches of two ranks an epoch, and two epochs.
WORDS: list[str | Path] = [LOOP, "--cpu", "--samples", "20", "--epochs", "2"]
THREE = ["--accumulation", "3"]
PRELOADED = ("accelerate", "transformers", "datasets", "torch._dynamo", "torch.distributed.fsdp", "support.preloaded")
UPDATES = {"one": 10, "three": 4}
CPU = ["1o", "2o", "3o", "3op"]
#: An optimizer and a schedule in the file, for which Accelerate has stand-ins.
FULL = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(["total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"], "auto"),
    },
}


def on_ranks(out: str, *words: str) -> list[str | Path]:
    return [*WORDS, "--batch", "2", "--out", out, *words]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("accelerate")
    clients.write_configs(folder, STAGES | {f"full-{stage}": clients.zero(stage) | FULL for stage in (0, 3)})
    return folder


@pytest.fixture(scope="module")
def plain(folder: Path) -> Path:
    one_process = [*WORDS, "--batch", "4"]
    for name in ("one", "three", "unclipped"):
        (folder / "plain" / name).mkdir(parents=True)
    clients.run_alone(
        folder,
        [*one_process, "--out", "plain/one"],
        [*one_process, "--out", "plain/three", *THREE],
        [*one_process, "--out", "plain/unclipped", *THREE, "--clip", "1.0"],
        ["accelerate_engines.py", "--batch", "4", "--out", "plain/engines.json"],
    )
    return folder / "plain"


@pytest.fixture(scope="module")
def job(folder: Path, plain: Path) -> Job:
    stages = ["0", "1", "2", "3"]
    runs = [on_ranks(f"one/{name}", "--stage", name) for name in stages]
    runs += [on_ranks(f"three/{name}", *THREE, "--stage", name) for name in stages]
    runs += [on_ranks(f"file/{name}", *THREE, "--config", f"{name}.json") for name in ("0", *CPU)]
    for name in ("1", "3"):
        again = ["--stage", name, "--resume", f"three/{name}/epoch-0"]
        runs += [on_ranks(f"resumed/{name}", *THREE, *again)]
    runs += [on_ranks(f"full/{name}", "--config", f"full-{name}.json") for name in ("0", "3")]
    # The last one, as it ends the process group.
    engines = ["accelerate_engines.py", "--plugins", "--out", "engines.json"]
    return clients.run_on_dsrun(folder, *runs, engines, preload=PRELOADED)


def said(run: Path) -> dict[str, Any]:
    return json.loads((run / "facts.json").read_text())


def series(run: Path, key: str) -> list[float]:
    return [entry[key] for entry in said(run)["log"]]


def weights(run: Path) -> dict[str, Tensor]:
    return load_file(run / "model.safetensors")


def assert_the_same(run: Path, other: Path) -> None:
    """Bit for bit."""
    assert said(run)["log"] == said(other)["log"], run
    ours, theirs = weights(run), weights(other)
    assert ours.keys() == theirs.keys()
    assert all(equal(ours[name], theirs[name]) for name in ours), run


def assert_close(run: Path, oracle: Path) -> None:
    assert said(oracle)["updates"] is None
    for key, tolerance in (("loss", 1e-5), ("norm", 1e-5), ("lr", 1e-12)):
        assert series(run, key) == pytest.approx(series(oracle, key), abs=tolerance), key
    ours, theirs = weights(run), weights(oracle)
    assert ours.keys() == theirs.keys()
    assert all(allclose(ours[name], theirs[name], atol=1e-4) for name in ours)


@pytest.mark.parametrize("kind", ["one", "three"])
def test_losses_norms_rates_and_weights_are_those_without_deepspeed(
    job: Job, folder: Path, plain: Path, kind: str
) -> None:
    for name in ("0", "1", "2", "3"):
        facts = said(folder / kind / name)
        assert (facts["kind"], facts["class"]) == ("DistributedType.DEEPSPEED", "Sequential")
        assert facts["updates"] == UPDATES[kind] == len(facts["log"])
        assert_close(folder / kind / name, plain / kind)
    losses = series(plain / kind, "loss")
    assert losses[-1] < losses[0]


def test_without_accumulation_every_stage_gives_the_same_bits(job: Job, folder: Path) -> None:
    for name in ("1", "2", "3"):
        assert_the_same(folder / "one" / name, folder / "one" / "0")


def test_stages_that_accelerate_accumulates_alike_give_the_same_bits(job: Job, folder: Path) -> None:
    # It enters `engine.no_sync()` below stage 2 alone, where sums are taken in another order.
    for name, other in (("1", "0"), ("3", "2")):
        assert_the_same(folder / "three" / name, folder / "three" / other)


def test_a_file_with_offload_trains_as_without_deepspeed(job: Job, folder: Path, plain: Path) -> None:
    for name in ("0", *CPU):
        assert said(folder / "file" / name)["updates"] == 4
        assert_close(folder / "file" / name, plain / "unclipped")
    # Accelerate has put DeepSpeed's own Adam in the place of torch's.
    assert_the_same(folder / "file" / "3op", folder / "file" / "3o")


@pytest.mark.parametrize("name", ["1", "3"])
def test_loading_a_state_goes_on_as_without_a_break(job: Job, folder: Path, name: str) -> None:
    whole, resumed = folder / "three" / name, folder / "resumed" / name
    assert said(resumed)["log"] == said(whole)["log"][2:]
    ours, theirs = weights(resumed), weights(whole)
    assert all(equal(ours[key], theirs[key]) for key in theirs)
    assert said(resumed)["updates"] == 4  # two of them before


def test_stand_ins_train_with_the_optimizer_and_the_schedule_of_the_file(job: Job, folder: Path) -> None:
    rates = series(folder / "full" / "0", "lr")
    # At `log`, the rate as it is after each of ten updates.
    assert rates[:2] == [0.0, pytest.approx(0.01)]
    assert rates[2:] == pytest.approx([0.01 * (10 - step) / 8 for step in range(2, 10)])
    losses = series(folder / "full" / "0", "loss")
    assert losses[-1] < losses[0] - 0.05
    assert_the_same(folder / "full" / "3", folder / "full" / "0")


def test_three_engines_of_other_stages_train_side_by_side(job: Job, folder: Path, plain: Path) -> None:
    facts = json.loads((folder / "engines.json").read_text())
    oracle = json.loads((plain / "engines.json").read_text())
    assert facts["stages"] == [2, 0, 3]
    assert len(facts["log"]) == 4
    assert facts["log"] == [pytest.approx(pair, abs=1e-5) for pair in oracle["log"]]
    assert sum(job.updates[-3:]) == 8


def test_nothing_is_refused_or_warned_of(job: Job) -> None:
    said = [line for line in job.text.splitlines() if "dsrun" in line and ("warning" in line or "error" in line)]
    assert said == []


def test_accelerates_own_launcher_starts_ranks_on_dsrun(job: Job, folder: Path) -> None:
    launcher = ["--use_deepspeed", "--zero_stage", "3", "--num_processes", "2", "--gradient_clipping", "0.1"]
    words = [str(word) for word in on_ranks("launched", *THREE)]
    ended = clients.run_words(
        folder, ["-m", "dsrun.as_deepspeed", "-m", "accelerate.commands.launch", *launcher, *words]
    )
    assert said(folder / "launched")["updates"] == 4
    assert_the_same(folder / "launched", folder / "three" / "3")
    assert ended.text.count("deepspeed is dsrun") == 1


def test_a_job_that_accelerate_keeps_from_deepspeed_is_told_that_it_made_no_engine(folder: Path) -> None:
    run = on_ranks("cpu", "--stage", "2")
    ended = clients.run_on_dsrun(folder, run, preload=PRELOADED, ACCELERATE_USE_CPU="true")
    assert said(folder / "cpu")["kind"] == "DistributedType.MULTI_CPU"
    assert ended.updates == []
    assert ended.text.count("made no engine") == 1
