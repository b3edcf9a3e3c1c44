"""A checkpoint that DeepSpeed saved is gone on from as DeepSpeed goes on; scripts change nothing for it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from support.deepspeed_runs import LOSSES, MADE, go_on, refusal
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
