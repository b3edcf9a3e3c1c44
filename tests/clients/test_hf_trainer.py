"""Hugging Face's Trainer as it is, with DeepSpeed's configs, on dsrun: stages, offload, accumulation, saves, resumes.

The oracle is the same script without DeepSpeed in one process, with the same batches. Losses of two ranks are those of
one process but for the order of sums; losses of two configs are the same to the last bit.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor, allclose, equal

from support import clients, killed_clients
from support.clients import EXAMPLES, STAGES, Job

clients.need("transformers", "accelerate", "datasets")

# The first test waits for the jobs that all are about.
pytestmark = pytest.mark.timeout(3 * clients.DEADLINE_S)

TRAIN = EXAMPLES / "hf_trainer.py"
WORDS = [
    *("--use_cpu", "--report_to", "none", "--disable_tqdm", "true", "--logging_steps", "1", "--seed", "7"),
    *("--learning_rate", "1e-2", "--warmup_steps", "2", "--max_grad_norm", "0.5", "--num_train_epochs", "2"),
]
UNSAVED = ["--save_strategy", "no"]
#: Four batches of two ranks an epoch: eight updates.
ONE = ["--samples", "16"]
#: Five micro batches an epoch, three to an update, and so two in the last: four updates.
THREE = ["--samples", "20", "--gradient_accumulation_steps", "3"]
SAVED = ["--save_strategy", "steps", "--save_steps", "2"]
BEST = [
    *(*SAVED, "--eval_strategy", "steps", "--eval_steps", "2", "--save_total_limit", "1", "--load_best_model_at_end"),
    # The first one, as losses fall.
    *("--metric_for_best_model", "eval_loss", "--greater_is_better", "true"),
]
#: Transformers takes BERT for a model that divides its loss by the number of all ranks' items, and it does not.
MEAN_OF_RANKS = ["--average_tokens_across_devices", "false"]
OPTIMIZER = {"type": "AdamW", "params": dict.fromkeys(["lr", "betas", "eps", "weight_decay"], "auto")}
#: All that Hugging Face can fill in, with an optimizer and a schedule of DeepSpeed's.
FULL = {
    "optimizer": OPTIMIZER,
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            **dict.fromkeys(["total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"], "auto"),
            "warmup_type": "linear",
        },
    },
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
}
AUTO_AT_3 = dict.fromkeys(
    ["reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"], "auto"
)
CONFIGS: dict[str, dict[str, Any]] = {
    **STAGES,
    "full-0": clients.zero(0) | FULL,
    "full-3": clients.zero(3, **AUTO_AT_3) | FULL,
    "optimizer": clients.zero(3) | {"optimizer": OPTIMIZER},
    "unsaved": clients.zero(3, stage3_gather_16bit_weights_on_model_save=False),
    **{f"tensor-{stage}": clients.zero(stage) | {"tensor_parallel": {"autotp_size": 2}} for stage in (0, 2)},
}
#: Accumulation has code of its own where gradients are whole, cut, and away; the others are run with `--soak`.
ACCUMULATED = ["0", "1", "2o", "3op"]
AT_STAGE_0 = pytest.param("0", marks=pytest.mark.soak("the other stages, and stage 0 in tests/runtime/checkpoint"))
RESUMED = ["2o", "3"]
#: At stage 3 transformers refuses to load a model with tensor parallelism.
TENSOR = ["2"]


def run(out: str, *words: str, deepspeed: str | None, family: str = "llama") -> list[str | Path]:
    """The words of one run; without DeepSpeed it has the batches of two ranks."""
    batch = ["--per_device_train_batch_size", "4" if deepspeed is None else "2"]
    config = [] if deepspeed is None else ["--deepspeed", f"{deepspeed}.json"]
    return [TRAIN, *WORDS, *batch, *config, "--output_dir", out, "--family", family, "--pretrained", family, *words]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trainer")
    clients.write_configs(folder, CONFIGS)
    return folder


@pytest.fixture(scope="module")
def plain(folder: Path) -> Path:
    def make(family: str) -> list[str | Path]:
        words = ["--output_dir", family, "--family", family, "--tied", "--max_steps", "1", "--learning_rate", "0"]
        return [TRAIN, *WORDS, *words, *UNSAVED]

    clients.run_alone(
        folder,
        make("llama"),
        make("bert"),
        run("plain/one", *ONE, *UNSAVED, deepspeed=None),
        run("plain/three", *THREE, *UNSAVED, deepspeed=None),
        run("plain/bert", *THREE, *UNSAVED, *MEAN_OF_RANKS, deepspeed=None, family="bert"),
        run("plain/best", *ONE, *BEST, deepspeed=None),
    )
    return folder / "plain"


@pytest.fixture(scope="module")
def job(folder: Path, plain: Path, pytestconfig: pytest.Config) -> Job:
    soak = bool(pytestconfig.getoption("--soak"))
    runs = [run(f"one/{name}", *ONE, *UNSAVED, deepspeed=name) for name in STAGES]
    accumulated = STAGES if soak else ACCUMULATED
    runs += [run(f"three/{name}", *THREE, *UNSAVED, deepspeed=name) for name in accumulated]
    bert = [*THREE, *UNSAVED, *MEAN_OF_RANKS, "--dataloader_num_workers", "1"]
    runs += [run(f"bert/{name}", *bert, deepspeed=name, family="bert") for name in ("0", "3op")]
    runs += [run("recomputed", *ONE, *UNSAVED, "--gradient_checkpointing", "true", deepspeed="3")]
    runs += [run("optimizer", *ONE, *UNSAVED, deepspeed="optimizer")]
    runs += [run(f"full/{name}", *ONE, *UNSAVED, deepspeed=f"full-{name}") for name in ("0", "3")]
    runs += [run(f"bf16/{name}", *ONE, *UNSAVED, "--bf16", deepspeed=f"full-{name}") for name in ("0", "3")]
    for name in [*RESUMED, *(["0"] if soak else [])]:
        runs += [run(f"whole/{name}", *ONE, *SAVED, deepspeed=name)]
        runs += [run(f"resumed/{name}", *ONE, *UNSAVED, *resume(f"whole/{name}/checkpoint-4"), deepspeed=name)]
    runs += [run(f"best/{name}", *ONE, *BEST, deepspeed=name) for name in ("1", "3")]
    runs += [run("unsaved", *ONE, *UNSAVED, deepspeed="unsaved")]
    # From a folder that stage 3 has saved, at stage 3 and without slices.
    runs += [run(f"reloaded/{name}", *ONE, *UNSAVED, "--pretrained", "one/3", deepspeed=name) for name in ("0", "3")]
    # Both ranks have the samples of two: the Trainer's own loader reads them for the ranks that share each layer.
    same = ["--per_device_train_batch_size", "4"]
    for name in [*TENSOR, *(["0"] if soak else [])]:
        runs += [run(f"tensor/{name}", *ONE, *SAVED, *same, deepspeed=f"tensor-{name}")]
        words = [*ONE, *UNSAVED, *same, *resume(f"tensor/{name}/checkpoint-4")]
        runs += [run(f"tensor/resumed-{name}", *words, deepspeed=f"tensor-{name}")]
    runs += [[TRAIN, *killed_clients.WORDS, "--deepspeed", "3.json", "--output_dir", "unbroken"]]
    return clients.run_on_dsrun(folder, *runs)


def resume(path: str) -> list[str]:
    return ["--resume_from_checkpoint", path]


def series(run: Path, key: str) -> list[float]:
    """The values of one key in the log that a run has saved."""
    log = json.loads((run / "trainer_state.json").read_text())["log_history"]
    return [entry[key] for entry in log if key in entry]


def updates(run: Path) -> int:
    """Optimizer steps as the engine has counted them."""
    return json.loads((run / "train_results.json").read_text())["engine_updates"]


def weights(run: Path) -> dict[str, Tensor]:
    """What a run has saved.

    Below stage 3 Accelerate copies each tensor, and so a tied head is in the file as well. At stage 3 transformers
    saves the norms of BERT under names that it has had in the past, which it reads as those of today.
    """
    old = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
    saved = load_file(run / "model.safetensors")
    for name in [name for name in saved if name.endswith(tuple(old))]:
        ending = ".".join(name.split(".")[-2:])
        saved[name.replace(ending, old[ending])] = saved.pop(name)
    head = saved.pop("lm_head.weight", None)
    assert head is None or equal(head, saved["model.embed_tokens.weight"])
    return saved


def are_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(equal(ours[name], theirs[name]) for name in ours)


def assert_the_same(run: Path, other: Path, *, keys: tuple[str, ...] = ("loss", "grad_norm", "learning_rate")) -> None:
    """Bit for bit."""
    for key in keys:
        assert series(run, key) == series(other, key), f"{key} of {run.name}"
    assert are_equal(weights(run), weights(other)), run


def assert_close(run: Path, oracle: Path) -> None:
    assert series(run, "loss") == pytest.approx(series(oracle, "loss"), abs=1e-5)
    assert series(run, "grad_norm") == pytest.approx(series(oracle, "grad_norm"), rel=1e-4)
    assert series(run, "learning_rate") == pytest.approx(series(oracle, "learning_rate"), rel=1e-12)
    ours, theirs = weights(run), weights(oracle)
    assert ours.keys() == theirs.keys()
    assert all(allclose(ours[name], theirs[name], atol=2e-4) for name in ours)


@pytest.mark.parametrize(
    ("kind", "names", "count"),
    [
        pytest.param("one", [*STAGES], 8, id="one"),
        pytest.param("three", ACCUMULATED, 4, id="three"),
        pytest.param(
            *("three", [*STAGES], 4),
            id="three-all",
            marks=pytest.mark.soak("all stages and offloads without accumulation, and four of eight with it"),
        ),
    ],
)
def test_losses_norms_and_weights_are_the_same_at_every_stage_and_offload(
    job: Job, folder: Path, kind: str, names: list[str], count: int
) -> None:
    for name in names:
        assert updates(folder / kind / name) == count == len(series(folder / kind / name, "loss"))
        assert_the_same(folder / kind / name, folder / kind / "0")


@pytest.mark.parametrize("kind", ["one", "three"])
def test_losses_norms_rates_and_weights_are_those_of_one_process_without_deepspeed(
    job: Job, folder: Path, plain: Path, kind: str
) -> None:
    assert_close(folder / kind / "0", plain / kind)
    losses = series(plain / kind, "loss")
    assert losses[-1] < losses[0] - 0.3


def test_a_classifier_trains_from_workers_as_without_deepspeed(job: Job, folder: Path, plain: Path) -> None:
    for name in ("0", "3op"):
        assert updates(folder / "bert" / name) == 4
        assert_close(folder / "bert" / name, plain / "bert")


def test_recomputed_activations_change_no_bit(job: Job, folder: Path) -> None:
    assert updates(folder / "recomputed") == 8
    assert_the_same(folder / "recomputed", folder / "one" / "3")


@pytest.mark.parametrize("name", [*TENSOR, AT_STAGE_0])
def test_layers_cut_over_ranks_train_and_are_saved_as_whole_ones(
    job: Job, folder: Path, plain: Path, name: str
) -> None:
    """The Trainer calls `tp_model_init`, counts samples on every rank, and asks for whole weights to save."""
    assert_close(folder / "tensor" / name, plain / "one")
    assert_the_same(folder / "tensor" / f"resumed-{name}", folder / "tensor" / name)


def test_an_optimizer_of_the_config_does_what_the_trainers_own_does(job: Job, folder: Path) -> None:
    assert updates(folder / "optimizer") == 8
    # The engine steps the schedule then, so that what is logged is the rate after a step.
    assert_the_same(folder / "optimizer", folder / "one" / "3", keys=("loss", "grad_norm"))
    assert series(folder / "optimizer", "learning_rate")[:-1] == series(folder / "one" / "3", "learning_rate")[1:]


def test_a_schedule_of_the_config_is_deepspeeds_own(job: Job, folder: Path, plain: Path) -> None:
    run, rates = folder / "full" / "0", series(plain / "one", "learning_rate")
    assert updates(folder / "full" / "3") == 8
    assert_the_same(folder / "full" / "3", run)
    # What is logged is the rate after a step, and the first two steps are taken with the lowest one.
    assert series(run, "learning_rate") == pytest.approx(rates, rel=1e-12)
    first, second, third = series(folder / "one" / "0", "loss")[:3]
    assert series(run, "loss")[:2] == [first, second]
    assert series(run, "loss")[2] > third
    assert series(run, "loss")[-1] < first - 0.3


def test_bf16_trains_alike_at_every_stage_and_near_fp32(job: Job, folder: Path) -> None:
    assert updates(folder / "bf16" / "3") == 8
    assert_the_same(folder / "bf16" / "3", folder / "bf16" / "0")
    assert series(folder / "bf16" / "3", "loss") == pytest.approx(series(folder / "full" / "3", "loss"), abs=0.02)
    assert {str(value.dtype) for value in weights(folder / "bf16" / "3").values()} == {"torch.bfloat16"}


@pytest.mark.parametrize("name", [*RESUMED, AT_STAGE_0])
def test_a_resumed_run_is_the_run_without_a_break(job: Job, folder: Path, name: str) -> None:
    assert_the_same(folder / "whole" / name, folder / "one" / name)
    assert updates(folder / "resumed" / name) == 8  # four of them before
    assert_the_same(folder / "resumed" / name, folder / "one" / name)


@pytest.mark.parametrize("name", ["1", "3"])
def test_the_best_model_is_kept_by_rotation_and_loaded_at_the_end(
    job: Job, folder: Path, plain: Path, name: str
) -> None:
    run = folder / "best" / name
    assert series(run, "eval_loss") == pytest.approx(series(plain / "best", "eval_loss"), abs=1e-5)
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-2"]
    assert are_equal(weights(run), weights(run / "checkpoint-2"))
    assert not are_equal(weights(run), weights(folder / "one" / name))


def test_a_model_in_slices_is_saved_whole_and_loads_again(job: Job, folder: Path) -> None:
    saved = weights(folder / "one" / "3")
    assert saved["model.embed_tokens.weight"].shape == (64, 32)
    assert "lm_head.weight" not in saved, "it is the embedding"
    first = series(folder / "reloaded" / "0", "loss")[0]
    assert first < series(folder / "one" / "3", "loss")[-1] + 0.1, "it is what was trained"
    assert_the_same(folder / "reloaded" / "3", folder / "reloaded" / "0")


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param([(0, 50)], id="once"),
        # In the second save, in the one that is the second after it, and while an older one is removed.
        pytest.param(
            [(0, 50), (1, 7), (0, 68)],
            id="thrice",
            marks=pytest.mark.soak("the first of these kills"),
        ),
    ],
)
def test_a_kill_inside_a_save_leaves_a_checkpoint_that_goes_on(
    job: Job, folder: Path, kills: list[tuple[int, int]]
) -> None:
    out = f"killed-{len(kills)}"
    assert killed_clients.kill_again_and_again(folder, out, config="3", kills=kills) == len(kills)
    assert len(series(folder / "unbroken", "loss")) == killed_clients.UPDATES
    assert_the_same(folder / out, folder / "unbroken")


def test_weights_are_saved_whole_also_where_the_config_gathers_none(job: Job, folder: Path) -> None:
    assert_the_same(folder / "unsaved", folder / "one" / "3")


def test_nothing_is_refused_or_warned_of(job: Job) -> None:
    said = [line for line in job.text.splitlines() if "dsrun" in line and ("warning" in line or "error" in line)]
    assert said == []
    assert all(math.isfinite(count) and count > 0 for count in job.updates)
