"""transformers' models at stage 3 beside plain training: built, loaded, resized, evaluated alone, and generating.

The oracles are the same models without DeepSpeed, and for what two ranks log, the same script under torch's DDP.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support import clients
from support.clients import Job

clients.need("transformers", "accelerate", "datasets")

pytestmark = pytest.mark.timeout(3 * clients.DEADLINE_S)

WORDS = [
    *("hf_generate.py", "--use_cpu", "--report_to", "none", "--disable_tqdm", "true", "--logging_steps", "1"),
    *("--per_device_train_batch_size", "2", "--per_device_eval_batch_size", "2", "--num_train_epochs", "3"),
    *("--learning_rate", "1e-2", "--save_strategy", "no", "--pretrained", "t5"),
    *("--predict_with_generate", "--generation_max_length", "12"),
]
TRAINED = ["3", "3op"]
AT_STAGE_0 = pytest.param("0", marks=pytest.mark.soak("stage 3, where parameters are gathered to generate"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    clients.write_configs(folder, clients.STAGES)
    return folder


@pytest.fixture(scope="module")
def trained(pytestconfig: pytest.Config) -> list[str]:
    """Names of the configs that are trained with."""
    return [*TRAINED, *(["0"] if pytestconfig.getoption("--soak") else [])]


@pytest.fixture(scope="module")
def job(folder: Path, trained: list[str]) -> Job:
    # Without an engine first: Accelerate's variables stay in a process that has used DeepSpeed.
    runs = [[*WORDS, "--output_dir", "ddp-evaluated", "--do_eval"], [*WORDS, "--output_dir", "ddp", "--do_train"]]
    runs += [[*WORDS, "--output_dir", "evaluated", "--do_eval", "--deepspeed", "3.json"]]
    runs += [[*WORDS, "--output_dir", name, "--do_train", "--deepspeed", f"{name}.json"] for name in trained]
    return clients.run_on_dsrun(folder, *runs, ["hf_from_pretrained.py", "--out", "models"])


@pytest.fixture(scope="module")
def models(job: Job, folder: Path) -> list[dict[str, Any]]:
    """Facts of each rank."""
    return [json.loads((folder / "models" / f"facts-{rank}.json").read_text()) for rank in (0, 1)]


def said(run: Path) -> dict[str, Any]:
    return json.loads((run / "facts.json").read_text())


def test_evaluating_and_generating_without_training_gives_what_ddp_gives(job: Job, folder: Path) -> None:
    ours, theirs = said(folder / "evaluated"), said(folder / "ddp-evaluated")
    assert ours["evaluated"] == pytest.approx(theirs["evaluated"], abs=1e-5)
    assert ours["before"]["answers"] == theirs["before"]["answers"]
    assert ours["before"]["loss"] == pytest.approx(theirs["before"]["loss"], abs=1e-5)


@pytest.mark.parametrize("name", [*TRAINED, AT_STAGE_0])
def test_ranks_generate_answers_of_unequal_lengths_after_training(job: Job, folder: Path, name: str) -> None:
    ours, theirs = said(folder / name), said(folder / "ddp")
    for key, tolerance in (("loss", 1e-4), ("grad_norm", 1e-2), ("learning_rate", 1e-12)):
        series = [[entry[key] for entry in facts["log"] if key in entry] for facts in (ours, theirs)]
        assert series[0] == pytest.approx(series[1], abs=tolerance), key
        assert len(series[0]) == 24
    assert ours["after"]["answers"] == theirs["after"]["answers"]
    assert len({len(answer) for answer in ours["after"]["answers"]}) > 2


def test_an_engine_counts_the_steps_of_what_was_trained(job: Job, trained: list[str]) -> None:
    assert job.updates == [0, *[24] * len(trained), 3, 3, 3]
    assert "LOAD REPORT" in job.text


@pytest.mark.parametrize("kind", ["grown", "with a new head", "nested"])
def test_a_model_in_slices_trains_as_its_whole_values_do(models: list[dict[str, Any]], kind: str) -> None:
    facts = models[0][kind]
    assert facts["missing"] == []
    assert facts["sharded"] == pytest.approx(facts["plain"], abs=1e-5)
    assert facts["sharded"] == models[1][kind]["sharded"]


def test_new_rows_of_a_vocabulary_are_drawn_beside_the_old_ones(models: list[dict[str, Any]]) -> None:
    for facts in models:
        assert facts["kept rows"]
        assert facts["still tied"]
        assert len(facts["new rows"]) == 8
        assert all(0 < spread < 0.05 for spread in facts["new rows"])


def test_a_head_that_no_file_has_is_drawn_once_for_all_ranks(models: list[dict[str, Any]]) -> None:
    spreads = [facts["head"] for facts in models]
    assert spreads[0] == spreads[1] == pytest.approx(0.02, rel=0.3)


def test_weights_from_a_config_are_drawn_as_the_model_says(models: list[dict[str, Any]]) -> None:
    for facts in models:
        assert facts["std of normal(0.02)"] == pytest.approx(0.02, rel=0.1)
        assert facts["norms"] == [1.0]


def test_buffers_and_what_is_made_after_zero_init_are_ordinary(models: list[dict[str, Any]]) -> None:
    for facts in models:
        assert facts["ordinary after"]
        assert all(facts[kind]["buffers differ"] == [] for kind in ("grown", "nested"))
        # A rotary embedding's, which is neither saved nor cast.
        assert facts["grown"]["buffer types"] == ["torch.float32"]


def test_a_slice_says_what_it_is_a_slice_of(models: list[dict[str, Any]]) -> None:
    for facts in models:
        assert facts["slices"] == {
            "class of zero.Init": True,
            "ds_numel": 1024,
            "ds_shape": [32, 32],
            "status": "NOT_AVAILABLE",
            "away": True,
            "slice": 512,
            "an empty one or whole": True,
        }
