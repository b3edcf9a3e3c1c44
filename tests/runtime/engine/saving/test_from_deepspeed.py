"""A checkpoint that DeepSpeed saved is gone on from as DeepSpeed goes on; scripts change nothing for it."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
from torch import nn, optim

import dsrun
from dsrun.contract.environment import AS_DEEPSPEED_ENV
from dsrun.errors import CheckpointError, DsrunError
from dsrun.runtime.optim.algorithms.deepspeed_classes import FusedAdam, FusedLion
from support.deepspeed_runs import LOSSES, MADE, Tiny, engine_of, go_on, refusal
from support.ranks import run_ranks

TAG = "global_step3"


@pytest.mark.parametrize(
    ("kind", "size", "stage"), [("stage1_fp32", 1, 3), ("stage2", 4, 1), ("stage3_fp32", 2, 2), ("stage3_fp32", 1, 0)]
)
def test_the_next_losses_are_deepspeeds_own(tmp_path: Path, kind: str, size: int, stage: int) -> None:
    shutil.copytree(MADE / kind, tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    results = run_ranks(size, go_on, str(tmp_path / "run"), stage)
    assert [sum(losses) / size for losses in zip(*(one["losses"] for one in results), strict=True)] == pytest.approx(
        LOSSES, rel=1e-6
    )
    for one in results:
        assert one["path"] == str(tmp_path / "run" / TAG)
        assert one["state"] == {"epoch": 2, "note": "tiny"}
        assert one["rate"] == 0.004771212547196624, "DeepSpeed's after three steps"
        assert one["steps"] == 3 + len(LOSSES)
    assert sorted(tmp_path.rglob("*")) == before, "nothing is left beside it"


@pytest.mark.parametrize("kind", ["universal_of_stage1", "universal_of_stage3"])
def test_a_universal_checkpoint_of_deepspeeds_is_the_latest_one_where_the_config_says_so(
    tmp_path: Path, kind: str
) -> None:
    shutil.copytree(MADE / kind, tmp_path / "run")
    (found,) = run_ranks(1, go_on, str(tmp_path / "run"), 2, True)
    assert found["path"] == str(tmp_path / "run" / f"{TAG}_universal")
    assert found["steps"] == 3 + len(LOSSES)
    # They are of runs in bf16, whose losses are rounded.
    assert found["losses"][0] == pytest.approx(LOSSES[0], rel=0.02)


def test_what_cannot_be_loaded_is_said_on_every_rank_and_training_goes_on(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    shutil.copytree(MADE / "stage2", gone)
    next((gone / TAG).glob("*rank_1*optim_states.pt")).unlink()
    for text, goes_on in run_ranks(2, refusal, str(gone), True):
        assert "1 optimizer files are there, of 2 ranks" in text
        assert goes_on
    damaged = tmp_path / "damaged"
    shutil.copytree(MADE / "stage2", damaged)
    path = damaged / TAG / "mp_rank_00_model_states.pt"
    path.write_bytes(path.read_bytes()[:1000])
    ((text, goes_on),) = run_ranks(1, refusal, str(damaged), True)
    assert f"error: {path}: cannot be read" in text
    assert goes_on
    assert sorted(path.name for path in damaged.iterdir()) == ["expected.safetensors", TAG, "latest", "losses.json"]


def test_a_pickle_that_names_a_function_is_refused_and_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(MADE / "stage2", folder)
    path = folder / TAG / "mp_rank_00_model_states.pt"
    state = torch.load(path, weights_only=True)
    torch.save({**state, "trap": _Trap(tmp_path / "trap")}, path)
    ((text, goes_on),) = run_ranks(1, refusal, str(folder), True)
    assert "its pickle names `posix.mkdir`" in text
    assert not (tmp_path / "trap").exists()
    assert goes_on


class _Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def test_outside_of_drop_in_mode_the_command_that_imports_it_is_named(tmp_path: Path) -> None:
    shutil.copytree(MADE / "stage2", tmp_path / "run")
    ((text, goes_on),) = run_ranks(1, refusal, str(tmp_path / "run"), False)
    assert f"`dsrun checkpoint import --trust-pickle {tmp_path / 'run' / TAG} OUT`, and load OUT" in text
    assert goes_on


def _with_each_optimizer(folder: str) -> dict[str, str]:
    """What a load says with each optimizer, and `steps` where the run goes on."""
    os.environ[AS_DEEPSPEED_ENV] = "0.19.8"
    said: dict[str, str] = {}
    for name, make in {
        "AdamW": optim.AdamW,
        "Adam": optim.Adam,
        "FusedAdam": FusedAdam,
        "SGD": optim.SGD,
        "momentum": lambda groups, lr: optim.SGD(groups, lr=lr, momentum=0.9),
        "RMSprop": optim.RMSprop,
        "amsgrad": lambda groups, lr: optim.AdamW(groups, lr=lr, amsgrad=True),
        "NAdam": optim.NAdam,
        "Lion": FusedLion,
    }.items():
        model = Tiny()
        trained = [p for p in model.parameters() if p.requires_grad]
        groups = [{"params": [p for p in trained if (p.ndim > 1) is many]} for many in (True, False)]
        config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}}
        engine = dsrun.initialize(model=model, optimizer=make(groups, lr=0.5), config=config)[0]
        before = model.first.weight.detach().clone()
        try:
            engine.load_checkpoint(folder)
            engine.backward(engine(torch.arange(4)))
            engine.step()
            said[name] = "steps"
        except CheckpointError as error:
            assert torch.equal(model.first.weight, before), "nothing is loaded"
            engine.load_checkpoint(folder, load_optimizer_states=False)
            assert not torch.equal(model.first.weight, before)
            assert engine.optimizer.param_groups[0]["lr"] == 0.5
            assert not any(engine.optimizer.state.values())
            engine.backward(engine(torch.arange(4)))
            engine.step()
            said[name] = error.render()
        engine.destroy()
    return said


def test_states_of_another_optimizer_are_refused_by_name_and_left_out_where_that_is_asked_for(tmp_path: Path) -> None:
    shutil.copytree(MADE / "stage2", tmp_path / "run")
    (said,) = run_ranks(1, _with_each_optimizer, str(tmp_path / "run"))
    assert {name for name, text in said.items() if text == "steps"} == {"AdamW", "Adam", "FusedAdam"}
    for name, kind, has in (
        ("SGD", "SGD", "none"),
        ("momentum", "SGD", "`momentum_buffer`"),
        ("RMSprop", "RMSprop", "`square_avg`"),
        ("amsgrad", "AdamW", "`exp_avg`, `exp_avg_sq`, `max_exp_avg_sq`"),
        ("NAdam", "NAdam", "`exp_avg`, `exp_avg_sq`, `mu_product`"),
        ("Lion", "Lion", "`exp_avg`"),
    ):
        assert said[name] == (
            f"error: {tmp_path / 'run' / TAG}: its optimizer states are `exp_avg`, `exp_avg_sq`; this run's optimizer, "
            f"{kind}, has {has}\nhint: use the optimizer that it was trained with, or pass load_optimizer_states=False"
        )


def _bytes_beside(folder: str) -> list[float]:
    """How many KiB are written beside it, with states of the optimizer and without."""
    os.environ[AS_DEEPSPEED_ENV] = "0.19.8"
    engine = engine_of(2)
    told: list[float] = []
    for states in (True, False):
        with redirect_stdout(StringIO()) as said:
            engine.load_checkpoint(folder, load_optimizer_states=states)
        found = re.search(r"is loaded by way of ([\d.]+) KiB beside it", said.getvalue())
        assert found, said.getvalue()
        told.append(float(found[1]))
    engine.destroy()
    return told


def test_states_that_are_not_loaded_are_not_written_beside_it(tmp_path: Path) -> None:
    shutil.copytree(MADE / "stage2", tmp_path / "run")
    ((whole, weights),) = run_ranks(1, _bytes_beside, str(tmp_path / "run"))
    trained = 9 * 5 + 7 * 5 + 7 + 7 + 7
    assert weights <= whole - 2 * 4 * trained / 1024 + 0.1, "two states of four bytes, as both are told rounded"


def _refused(folder: str) -> list[str]:
    """What loads say of another model, and of a folder that one of two ranks has, which is the first or the second."""
    os.environ[AS_DEEPSPEED_ENV] = "0.19.8"
    rank, said = int(os.environ["RANK"]), list[str]()
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}}
    other = dsrun.initialize(model=nn.Linear(3, 3), config=config)[0]
    same = engine_of(2)
    differing = [folder if rank == has else f"{folder}-not" for has in (0, 1)]
    differing.append(folder if rank == 0 else f"{folder}-other")
    for engine, given in ((other, folder), *((same, one) for one in differing)):
        try:
            engine.load_checkpoint(given, missing_ok=True)
        except DsrunError as error:
            said.append(error.render())
    for engine in (other, same):
        engine.destroy()
    return said


def test_what_a_load_refuses_names_the_folder_that_the_script_gave(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for name in ("run", "run-other"):
        shutil.copytree(MADE / "stage2", tmp_path / name)
    results = run_ranks(2, _refused, str(run))
    for others, *_ in results:
        assert f"{run / TAG}: no param of `weight`" in others
    for said in results:
        assert f"{run}-other/{TAG}: no complete checkpoint" in said[3]
        assert not any(".dsrun-" in text for text in said)
    for has in (0, 1):
        own, told = results[1 - has][1 + has], results[has][1 + has]
        assert f"error: {run}-not: other ranks have a checkpoint of DeepSpeed's there" in own
        assert f"rank {1 - has}: {run}-not: other ranks have" in told
