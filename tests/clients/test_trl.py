"""TRL's trainers as they are, with DeepSpeed's configs, on dsrun: SFT, DPO and GRPO at every stage, and resumed.

What is looked at is what the engine counted, the losses and the files. The oracles are the same scripts without
DeepSpeed: in one process, and where a trainer draws numbers on each rank, in two that torch's DDP joins.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from support import clients, trl_clients
from support.trl_clients import NONE, Job, Training

clients.need("trl", "datasets")

pytestmark = pytest.mark.timeout(clients.DEADLINE_S * 2)

SFT = ["0", "1", "1-cpu", "2", "2-cpu", "3", "3-cpu"]
DPO = ["2", "3", "3-cpu"]
GRPO = ["0", "3", "3-cpu"]
TIED = ["0", "3"]
RESUMED = ["2", "3", "3-cpu"]
#: Of each training, in the order of the runs: five of SFT and DPO, three of GRPO.
STEPS = [*[5] * len(SFT), *[5] * len(TIED), *[5] * len(DPO), *[5] * 2, *[5] * 2, *[3] * len(GRPO), 3, *[3] * 2]
#: Those that go on from the fourth step.
STEPS += [1] * len(RESUMED)
WEIGHTS = "model/model.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trl")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Job:
    return trl_clients.run_alone(
        folder,
        [
            ["trl_tiny.py", "pretrained", "--preferences", "preferences.jsonl"],
            ["trl_sft.py", "--out", "plain-sft", "--batch", "4"],
            ["trl_sft.py", "--out", "plain-sft-tied", "--batch", "4", "--tied"],
            ["trl_dpo.py", "--out", "plain-dpo", "--batch", "4"],
        ],
    )


@pytest.fixture(scope="module")
def ranks(folder: Path, plain: Job) -> Job:
    paths = trl_clients.write_configs(folder)

    def on(names: Sequence[str]) -> list[str]:
        return ["--deepspeed", *(paths.get(name, name) for name in names)]

    reference = ["--beta", "0.1", "--pretrained", "pretrained"]
    return trl_clients.run_on_dsrun(
        folder,
        [
            # Accelerate's variables stay in a process that has used DeepSpeed: these first.
            ["trl_grpo.py", *on([NONE]), "--out", "grpo"],
            ["trl_grpo.py", *on([NONE]), "--out", "grpo-reference", *reference],
            ["trl_sft.py", *on(SFT), "--out", "sft"],
            ["trl_sft.py", *on(TIED), "--out", "sft-tied", "--tied"],
            ["trl_dpo.py", *on(DPO), "--out", "dpo"],
            ["trl_dpo.py", *on(["2", "3"]), "--out", "dpo-pretrained", "--pretrained", "pretrained"],
            ["trl_dpo.py", *on(["2", "3"]), "--out", "dpo-precomputed", "--data", "preferences.jsonl"],
            ["trl_grpo.py", *on(GRPO), "--out", "grpo"],
            ["trl_grpo.py", *on(["3"]), "--out", "grpo-released", "--no-gather"],
            ["trl_grpo.py", *on(["0", "3"]), "--out", "grpo-reference", *reference],
            ["trl_sft.py", *on(RESUMED), "--out", "resumed", "--resume", "sft"],
        ],
    )


def _all(job: Job, script: str, names: Sequence[str]) -> list[Training]:
    return [job.training(script, name) for name in names]


def _assert_the_same(trainings: Sequence[Training]) -> None:
    """Losses, norms and saved weights bit for bit."""
    first = trainings[0]
    for training in trainings:
        for key in ("loss", "grad_norm", "eval_loss", "learning_rate"):
            assert training.series(key) == first.series(key), (training.folder, key)
        assert training.weights(WEIGHTS) == first.weights(WEIGHTS), training.folder


def _assert_close(training: Training, oracle: Training) -> None:
    assert oracle.is_plain
    assert not training.is_plain
    for key in ("loss", "grad_norm", "eval_loss", "learning_rate"):
        assert training.series(key) == pytest.approx(oracle.series(key), rel=1e-5, abs=1e-5), (training.folder, key)


def test_each_training_is_done_by_an_engine_at_its_stage(ranks: Job) -> None:
    assert ranks.steps == STEPS
    for script, names, steps in (
        ("sft", SFT, 5),
        ("dpo", DPO, 5),
        ("grpo", GRPO, 3),
        ("grpo-reference", ["0", "3"], 3),
    ):
        for name in names:
            training = ranks.training(script, name)
            assert training.engine_steps() == [(int(name[0]), steps)] * 2
            assert all(facts["world_size"] == 2 for facts in training.ranks)


def test_sft_has_the_same_losses_and_weights_at_every_stage_and_those_of_plain_torch(plain: Job, ranks: Job) -> None:
    trainings = _all(ranks, "sft", SFT)
    _assert_the_same(trainings)
    _assert_close(trainings[0], plain.training("plain-sft", NONE))
    assert trainings[0].losses[-1] < trainings[0].losses[0]


def test_tied_weights_train_as_in_plain_torch(plain: Job, ranks: Job) -> None:
    whole, cut = _all(ranks, "sft-tied", TIED)
    assert whole.losses == cut.losses
    _assert_close(whole, plain.training("plain-sft-tied", NONE))


def test_dpo_trains_against_an_engine_that_only_evaluates(plain: Job, ranks: Job) -> None:
    trainings = _all(ranks, "dpo", DPO)
    assert all(facts["reference"] == "Engine" for training in trainings for facts in training.ranks)
    _assert_the_same(trainings)
    _assert_close(trainings[0], plain.training("plain-dpo", NONE))
    assert len(trainings[0].series("eval_loss")) == 2


def test_dpo_reads_model_and_reference_from_a_folder_in_slices(ranks: Job) -> None:
    _assert_the_same(_all(ranks, "dpo-pretrained", ["2", "3"]))


def test_dpo_computes_what_the_reference_says_before_training(plain: Job, ranks: Job) -> None:
    trainings = _all(ranks, "dpo-precomputed", ["2", "3"])
    _assert_the_same(trainings)
    losses = plain.training("plain-dpo", NONE).losses
    assert trainings[0].losses == pytest.approx(losses, rel=1e-5), "the same preferences, in the same order"


def test_grpo_generates_unequal_lengths_and_trains_as_ddp_does(ranks: Job) -> None:
    oracle = ranks.training("grpo", NONE)
    first, second = (facts["lengths"] for facts in oracle.ranks)
    assert len(first) == len(second) == 3, "a generation before each step"
    assert sum(mine[0] != theirs[0] for mine, theirs in zip(first, second, strict=True)) >= 2, "unequal prompts"
    assert any(max(mine[1:]) != max(theirs[1:]) for mine, theirs in zip(first, second, strict=True)), "unequal ends"
    trainings = _all(ranks, "grpo", GRPO)
    _assert_the_same(trainings)
    for training in trainings:
        assert [facts["lengths"] for facts in training.ranks] == [first, second]
        _assert_close(training, oracle)


def test_generation_without_a_gather_before_it_draws_the_same(ranks: Job) -> None:
    released, gathered = ranks.training("grpo-released", "3"), ranks.training("grpo", "3")
    _assert_the_same([gathered, released])
    assert [facts["lengths"] for facts in released.ranks] == [facts["lengths"] for facts in gathered.ranks]


def test_a_reference_follows_the_model_from_one_engine_to_another(ranks: Job) -> None:
    whole, cut = _all(ranks, "grpo-reference", ["0", "3"])
    oracle = ranks.training("grpo-reference", NONE)
    _assert_the_same([whole, cut])
    _assert_close(whole, oracle)
    assert whole.series("kl") == cut.series("kl") == pytest.approx(oracle.series("kl"), rel=1e-3)
    assert max(whole.series("kl")) > 0


def test_programs_configs_are_taken_with_notes(ranks: Job) -> None:
    assert "is not a key of the config" not in ranks.text
    assert "`zero_optimization.stage3_prefetch_bucket_size` is written as one key, with dots" in ranks.text


def test_sft_resumes_where_it_was(ranks: Job) -> None:
    for training in _all(ranks, "resumed", RESUMED):
        assert training.engine_steps() == [(int(training.folder.name[0]), 5)] * 2
        _assert_the_same([ranks.training("sft", training.folder.name), training])
