"""PEFT's adapters as they are, with DeepSpeed's configs, on dsrun: LoRA at every stage, in DPO, and resumed; AdaLoRA.

What is looked at is what the engine counted, the losses, and the adapter's file. The oracles are the same scripts
without DeepSpeed: in one process, and for AdaLoRA, whose loss has a term for each rank, in two that torch's DDP joins.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from support import clients, trl_clients
from support.clients import EXAMPLES
from support.trl_clients import NONE, Job, Training

clients.need("peft", "trl", "datasets")

pytestmark = pytest.mark.timeout(clients.DEADLINE_S * 2)

LORA = ["0", "1", "2", "2-cpu", "3", "3-cpu"]
SFT = ["0", "3", "3-cpu"]
WITH_HEAD = ["0", "3"]
DPO = ["0", "2", "3-cpu"]
ADALORA = ["0", "1", "2", "3"]
RESUMED = ["2", "3", "3-cpu"]
ADAPTER = "adapter/adapter_model.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("peft")


@pytest.fixture(scope="module")
def alone(folder: Path) -> Job:
    # Two micro batches are what the two ranks have.
    one_rank = [*_on(folder, ["0", "3"]), "--accumulation", "2", "--out", "one-rank"]
    return trl_clients.run_alone(
        folder,
        [
            ["trl_tiny.py", "pretrained"],
            # Accelerate's variables stay in a process that has used DeepSpeed: without it first.
            ["peft_dpo.py", "--out", "plain-dpo", "--batch", "4"],
            ["peft_lora.py", "--out", "plain", "--batch", "4"],
            ["peft_lora.py", "--out", "plain-sft", "--batch", "4", "--through", "sft"],
            ["peft_lora.py", "--out", "plain-head", "--batch", "4", "--pretrained", "pretrained"],
            ["peft_lora.py", *one_rank],
        ],
        as_deepspeed=True,
    )


@pytest.fixture(scope="module")
def ranks(folder: Path, alone: Job) -> Job:
    return trl_clients.run_on_dsrun(
        folder,
        [
            ["peft_adalora.py", *_on(folder, [NONE]), "--out", "adalora"],
            ["peft_adalora.py", *_on(folder, ADALORA), "--out", "adalora"],
            ["peft_lora.py", *_on(folder, LORA), "--out", "lora"],
            ["peft_lora.py", *_on(folder, SFT), "--out", "lora-sft", "--through", "sft"],
            ["peft_dpo.py", *_on(folder, DPO), "--out", "dpo"],
            ["peft_lora.py", *_on(folder, WITH_HEAD), "--out", "lora-head", "--pretrained", "pretrained"],
            ["peft_lora.py", *_on(folder, RESUMED), "--out", "resumed", "--resume", "lora"],
            _example(folder),
        ],
    )


def _example(folder: Path) -> list[str]:
    texts = [{"text": f"w{number} w{number + 1} w{number + 2}"} for number in range(16)]
    (folder / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    words = ["--model", "pretrained", "--texts", "texts.jsonl", "--output_dir", "example", "--use_cpu"]
    words += ["--per_device_train_batch_size", "2", "--num_train_epochs", "1", "--save_strategy", "no"]
    words += ["--report_to", "none", *_on(folder, ["3"])]
    return [str(EXAMPLES / "lora_sft.py"), *words]


def _on(folder: Path, names: Sequence[str]) -> list[str]:
    paths = trl_clients.write_configs(folder)
    return ["--deepspeed", *(paths.get(name, name) for name in names)]


def _all(job: Job, script: str, names: Sequence[str]) -> list[Training]:
    return [job.training(script, name) for name in names]


def _assert_the_same(trainings: Sequence[Training]) -> None:
    """Losses, norms and the adapter's file bit for bit."""
    first = trainings[0]
    for training in trainings:
        for key in ("loss", "grad_norm", "learning_rate"):
            assert training.series(key) == first.series(key), (training.folder, key)
        assert training.weights(ADAPTER) == first.weights(ADAPTER), training.folder


def _assert_close(training: Training, oracle: Training) -> None:
    assert oracle.is_plain
    assert not training.is_plain
    for key, tolerance in {"loss": 1e-5, "grad_norm": 1e-4, "learning_rate": 0.0}.items():
        assert training.series(key) == pytest.approx(oracle.series(key), rel=tolerance), (training.folder, key)


def test_each_adapter_is_trained_by_an_engine_at_its_stage(ranks: Job) -> None:
    trained = [*[8] * len(ADALORA), *[5] * (len(LORA) + len(SFT) + len(DPO) + len(WITH_HEAD))]
    assert ranks.steps == [*trained, *[2] * len(RESUMED), 4]
    for script, names, steps in (("adalora", ADALORA, 8), ("lora", LORA, 5), ("dpo", DPO, 5)):
        for training in _all(ranks, script, names):
            assert training.engine_steps() == [(int(training.folder.name[0]), steps)] * 2


def test_lora_has_the_same_losses_and_file_at_every_stage_and_those_of_plain_torch(alone: Job, ranks: Job) -> None:
    trainings = _all(ranks, "lora", LORA)
    _assert_the_same(trainings)
    _assert_close(trainings[0], alone.training("plain", NONE))
    assert trainings[0].losses[-1] < trainings[0].losses[0]


def test_adapters_that_trl_makes_train_alike(alone: Job, ranks: Job) -> None:
    trainings = _all(ranks, "lora-sft", SFT)
    _assert_the_same(trainings)
    _assert_close(trainings[0], alone.training("plain-sft", NONE))


def test_dpo_finds_its_reference_with_the_adapter_off_and_trains_with_it_on(alone: Job, ranks: Job) -> None:
    trainings = _all(ranks, "dpo", DPO)
    _assert_the_same(trainings)
    _assert_close(trainings[0], alone.training("plain-dpo", NONE))


def test_a_copied_head_of_a_model_read_in_slices_trains_beside_the_adapter(alone: Job, ranks: Job) -> None:
    trainings = _all(ranks, "lora-head", WITH_HEAD)
    _assert_the_same(trainings)
    _assert_close(trainings[0], alone.training("plain-head", NONE))


def test_adalora_ranks_its_directions_by_gradients_and_masks_them_as_ddp_does(ranks: Job) -> None:
    oracle = ranks.training("adalora", NONE)
    trainings = _all(ranks, "adalora", ADALORA)
    _assert_the_same(trainings)
    for training in trainings:
        _assert_close(training, oracle)
        for mine, theirs in zip(training.ranks, oracle.ranks, strict=True):
            assert mine["ranks"] == theirs["ranks"]
            kept = [sum(mask) for mask in mine["ranks"].values()]
            assert sum(kept) == 8, "the budget"
            assert len(set(kept)) > 1, "chosen by what the gradients said"


def test_checkpoints_of_adapters_leave_frozen_parameters_out(ranks: Job) -> None:
    for training in _all(ranks, "lora", LORA):
        index = training.folder / "checkpoints/checkpoint-3/global_step3/index.json"
        tensors = json.loads(index.read_text())["tensors"]
        names = [name for name, roles in tensors.items() if "param" in roles]
        assert any("lora_A" in name for name in names)
        assert all("lora_" in name for name in names), names


def test_another_trainer_resumes_an_adapter_where_it_was(ranks: Job) -> None:
    _assert_the_same([*_all(ranks, "lora", RESUMED), *_all(ranks, "resumed", RESUMED)])


@pytest.mark.soak(
    "test_another_trainer_resumes_an_adapter_where_it_was, in the same job, and in new ones "
    "tests/clients/test_hf_trainer.py::test_a_kill_inside_a_save_leaves_a_checkpoint_that_goes_on"
)
def test_a_new_job_resumes_an_adapter_where_it_was(folder: Path, ranks: Job) -> None:
    words = ["--resume", "lora", "--out", "resumed-anew"]
    job = trl_clients.run_on_dsrun(folder, [["peft_lora.py", *_on(folder, RESUMED), *words]])
    assert job.steps == [2] * len(RESUMED), "from the third step to the fifth"
    _assert_the_same([*_all(ranks, "lora", RESUMED), *_all(job, "resumed-anew", RESUMED)])


def test_one_process_without_a_launcher_writes_the_same_adapter_as_two_ranks(alone: Job, ranks: Job) -> None:
    trainings = _all(alone, "one-rank", ["0", "3"])
    assert [training.engine_steps() for training in trainings] == [[(0, 5)], [(3, 5)]]
    _assert_the_same([*_all(ranks, "lora", ["0", "3"]), *trainings])


def test_the_example_writes_an_adapter(folder: Path, ranks: Job) -> None:
    assert ranks.steps[-1] == 4
    assert (folder / "example" / "adapter_model.safetensors").is_file()
