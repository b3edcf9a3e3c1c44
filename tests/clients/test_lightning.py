"""Lightning's Trainer and Fabric as they are, with their DeepSpeed strategies, on dsrun.

Lightning has these strategies on CUDA alone; what its devices are on a CPU stands in scripts/examples/lightning_cpu.py.
Oracles are the same networks without DeepSpeed in one process, and numbers of DeepSpeed 0.19.8 under the same scripts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support import clients
from support.clients import EXAMPLES, Job

clients.need("lightning")

pytestmark = pytest.mark.timeout(3 * clients.DEADLINE_S)

FIT = EXAMPLES / "lightning_fit.py"
STAGES = ["stage_1", "stage_2", "stage_3", "stage_2_offload", "stage_3_offload"]
#: Losses of two ranks of DeepSpeed 0.19.8 with this example, one of every micro batch; recorded by running it.
OF_DEEPSPEED = {
    "32-true": [
        0.5319587588310242, 0.7542678117752075, 0.8008785247802734, 0.9149521589279175,
        0.619137167930603, 0.6254544258117676, 0.7218027114868164, 0.5465560555458069,
        0.17482900619506836, 0.30411750078201294, 0.4803001284599304, 0.4861881136894226,
        0.3417736887931824, 0.38885051012039185, 0.49793142080307007, 0.3879839777946472,
    ],
    "bf16-mixed": [
        0.5318477749824524, 0.7541931867599487, 0.80054771900177, 0.9145874977111816,
        0.6180877685546875, 0.625746488571167, 0.722628116607666, 0.5470466017723083,
        0.17465434968471527, 0.3045547604560852, 0.4796619415283203, 0.48599347472190857,
        0.3425515294075012, 0.38868647813796997, 0.4985349774360657, 0.38838985562324524,
    ],
}  # fmt: skip
#: Its loss in a test by another trainer, and those of one more epoch by a third; and those of steps by hand.
TESTED, GONE_ON = 0.40112102031707764, [0.12163867056369781, 0.2696468234062195, 0.42549562454223633]
BY_HAND = [0.5319587588310242, 0.6738795042037964, 0.7958686351776123, 0.8208087682723999]


def fit(out: str, *words: str) -> list[str | Path]:
    return [FIT, "--cpu", "--out", out, *words]


def on_ranks(out: str, strategy: str, *words: str) -> list[str | Path]:
    return fit(out, "--strategy", f"deepspeed_{strategy}", *words)


def fabric(out: str, *words: str) -> list[str | Path]:
    return ["lightning_fabric.py", "--out", out, *words]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lightning")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Path:
    alone = ["--strategy", "none", "--batch", "4"]
    (folder / "plain").mkdir()
    clients.run_alone(
        folder,
        fit("plain/fit", *alone, "--accumulation", "1"),
        ["lightning_plain.py", "plain/losses.json"],
        fabric("plain/fabric", *alone),
        fabric("plain/config", *alone, "--clip", "0.1"),
    )
    return folder / "plain"


@pytest.fixture(scope="module")
def job(folder: Path, plain: Path) -> Job:
    runs = [on_ranks(f"fit/{name}", name) for name in STAGES]
    runs += [on_ranks(f"bf16/{name}", name, "--precision", "bf16-mixed") for name in ("stage_2", "stage_3")]
    runs += [
        on_ranks("bf16/true", "stage_3", "--precision", "bf16-true"),
        on_ranks("fp16", "stage_2", "--precision", "16-mixed"),
        on_ranks("one", "stage_3", "--accumulation", "1"),
        on_ranks("half", "stage_2", "--epochs", "1"),
        on_ranks("resumed/stage_2", "stage_2", "--resume", "half/last.ckpt"),
        on_ranks("resumed/stage_3", "stage_3", "--resume", "half/last.ckpt"),
    ]
    runs += [fabric(f"fabric/{name}", "--strategy", f"deepspeed_{name}") for name in ("stage_1", "stage_2", "stage_3")]
    runs += [
        fabric("fabric/config", "--strategy", "config"),
        fabric("fabric/bf16", "--strategy", "deepspeed_stage_3", "--precision", "bf16-mixed"),
        ["lightning_cases.py", "--plain", "plain/fit/last.ckpt", "--out", "cases"],
    ]
    return clients.run_on_dsrun(folder, *runs, preload=("lightning", "support.preloaded"))


def said(run: Path) -> dict[str, Any]:
    return json.loads((run / "facts.json").read_text())


def case(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / "cases" / f"{name}.json").read_text())


def test_the_trainer_has_the_losses_that_deepspeed_has_and_the_same_bits_at_every_stage(
    job: Job, folder: Path, plain: Path
) -> None:
    oracle = json.loads((plain / "losses.json").read_text())
    for name in STAGES:
        facts = said(folder / "fit" / name)
        assert facts["updates"] == facts["engine_updates"] == 8
        assert facts["losses"] == pytest.approx(oracle, abs=1e-5), name
        # Recorded on another CPU, whose kernels round otherwise.
        assert facts["losses"] == pytest.approx(OF_DEEPSPEED["32-true"], abs=1e-5), name
        assert facts["rates"] == pytest.approx([0.01 / (1 + 0.2 * (step // 2)) for step in range(16)])
        assert facts["best"] == "epoch=1.ckpt"
        alike = "stage_2_offload" if "offload" in name else "stage_1"
        assert facts == said(folder / "fit" / alike), name


def test_without_accumulation_losses_are_those_of_the_trainer_without_deepspeed(
    job: Job, folder: Path, plain: Path
) -> None:
    ours, theirs = said(folder / "one"), said(plain / "fit")
    assert (ours["engine_updates"], theirs["engine_updates"]) == (16, None)
    for key in ("losses", "rates", "val", "test"):
        assert ours[key] == pytest.approx(theirs[key], abs=1e-5), key
    assert ours["losses"][-1] < ours["losses"][0]


def test_half_precision_trains_as_deepspeed_does(job: Job, folder: Path) -> None:
    for name in ("stage_2", "stage_3"):
        facts = said(folder / "bf16" / name)
        assert facts["losses"] == pytest.approx(OF_DEEPSPEED["bf16-mixed"], abs=4e-3)
        assert facts == said(folder / "bf16" / "stage_2")
    for run in (folder / "bf16" / "true", folder / "fp16"):
        assert said(run)["engine_updates"] == 8
        assert said(run)["losses"] == pytest.approx(OF_DEEPSPEED["32-true"], abs=4e-3)


@pytest.mark.parametrize("name", ["stage_2", "stage_3"])
def test_a_checkpoint_of_the_trainer_goes_on_as_without_a_break_at_either_stage(
    job: Job, folder: Path, name: str
) -> None:
    whole, resumed = said(folder / "fit" / "stage_2"), said(folder / "resumed" / name)
    assert resumed["losses"] == whole["losses"][8:]
    assert resumed["rates"] == whole["rates"][8:]
    assert (resumed["updates"], resumed["engine_updates"], resumed["val"]) == (8, 8, whole["val"])


def test_fabric_takes_steps_by_its_optimizer_and_loads_what_it_has_saved(job: Job, folder: Path, plain: Path) -> None:
    for name in ("stage_1", "stage_2", "stage_3"):
        facts = said(folder / "fabric" / name)
        assert facts["losses"] == pytest.approx(said(plain / "fabric")["losses"], abs=1e-5)
        assert facts["rate"] == said(plain / "fabric")["rate"] == pytest.approx(0.01 / 16)
        assert facts["stage"] == int(name[-1])
        assert facts["again"] == facts["losses"][4:]
        assert facts["batches"] == 4  # as it was saved
        assert facts["losses"] == said(folder / "fabric" / "stage_1")["losses"]
    facts = said(folder / "fabric" / "config")
    assert facts["losses"] == pytest.approx(said(plain / "config")["losses"], abs=1e-5)
    facts = said(folder / "fabric" / "bf16")
    assert facts["again"] == facts["losses"][4:]
    assert facts["losses"] == pytest.approx(said(plain / "fabric")["losses"], abs=4e-3)


def test_the_optimizer_of_an_engine_is_one_of_deepspeeds_to_fabric(job: Job, folder: Path) -> None:
    for name in ("stage_1", "stage_2", "stage_3", "config", "bf16"):
        assert said(folder / "fabric" / name)["is_deepspeeds"], name


def test_steps_taken_by_hand_are_those_that_the_trainer_takes(job: Job, folder: Path) -> None:
    runs = case(folder, "by_hand")
    assert len(runs) == 4
    for losses, updates in runs.values():
        assert losses[:4] == pytest.approx(BY_HAND, abs=1e-6)
        assert (losses, updates) == (next(iter(runs.values()))[0], 8)


def test_whole_weights_of_a_file_are_tested_and_trained_on_at_stage_3(job: Job, folder: Path, plain: Path) -> None:
    # DeepSpeed goes on from the network's first weights after one step.
    facts = case(folder, "whole_weights")
    assert facts["tested"] == pytest.approx(said(plain / "fit")["test"], abs=1e-5)
    assert facts["epoch"] == 3
    assert len(facts["losses"]) == 8
    assert all(loss < other for loss, other in zip(facts["losses"], said(plain / "fit")["losses"], strict=False))


def test_an_optimizer_and_a_schedule_of_a_file_are_used(job: Job, folder: Path) -> None:
    facts = case(folder, "config_file")
    assert facts["rates"][:3] == [0.0, 0.0, pytest.approx(0.005)]
    assert facts["rates"][4:] == [0.01] * 4
    assert facts["losses"][:2] == pytest.approx(OF_DEEPSPEED["32-true"][:2], abs=1e-6)  # at rate 0
    assert facts["losses"][-1] < 0.52


def test_other_trainers_test_and_train_a_network_that_was_trained(job: Job, folder: Path) -> None:
    facts = case(folder, "two_trainers")
    assert facts["tested"] == pytest.approx(TESTED, abs=1e-6)
    assert facts["losses"][:4] == pytest.approx(BY_HAND, abs=1e-6)
    assert facts["losses"][8:11] == pytest.approx(GONE_ON, abs=1e-6)


def test_lightnings_own_conversion_makes_one_file_of_a_checkpoint(job: Job, folder: Path) -> None:
    facts = case(folder, "weights")
    for stage in (2, 3):
        assert facts[f"epoch {stage}"] == 1
        assert len(facts[f"equal {stage}"]) == 6
        assert all(facts[f"equal {stage}"].values())


def test_nothing_is_refused_or_warned_of(job: Job) -> None:
    told = [line for line in job.text.splitlines() if "dsrun" in line and ("warning" in line or "error" in line)]
    assert told == []
