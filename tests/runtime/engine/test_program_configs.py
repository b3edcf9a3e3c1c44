"""A script that takes dsrun for DeepSpeed keeps the very dict that it hands over, and is told once what is changed."""

from __future__ import annotations

import copy
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn

import dsrun
from dsrun import zero
from dsrun.contract.environment import AS_DEEPSPEED_ENV, RUN_DIR_ENV
from dsrun.contract.job_paths import JobPaths
from dsrun.errors import CheckpointError, ConfigError, InputError
from dsrun.runtime.engine.compose import config_notes
from support.ranks import run_ranks

RECORDED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "fixtures" / "program_configs" / "recorded.json").read_text()
)["configs"]


@pytest.fixture(autouse=True)
def as_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AS_DEEPSPEED_ENV, "0.19.8")
    config_notes._print_once.cache_clear()


def of_one_rank(name: str) -> dict[str, Any]:
    """A recorded config without its batch of two ranks."""
    given = copy.deepcopy(RECORDED[name])
    given.pop("train_batch_size")
    return given


@pytest.mark.parametrize("argument", ["config", "config_params"])
def test_the_config_of_an_engine_is_the_very_dict_and_nobody_changes_it(argument: str) -> None:
    given = of_one_rank("trl reference, zero3_offload")
    engine = dsrun.initialize(model=nn.Linear(3, 3), **{argument: given})[0]
    assert engine.config is given
    assert given == of_one_rank("trl reference, zero3_offload")


def test_a_dict_that_its_owner_changes_later_is_saved_as_it_was(tmp_path: Path) -> None:
    given = of_one_rank("transformers zero2")
    engine = dsrun.initialize(model=nn.Linear(3, 3), config=given)[0]
    given["zero_optimization"]["stage"] = object()  # nothing that a file could hold
    engine.save_checkpoint(tmp_path, tag="one")
    assert engine.zero_optimization_stage() == 2
    assert list((tmp_path / "one").iterdir())


def test_the_config_of_an_engine_is_a_files_content_where_a_file_is_given(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(of_one_rank("transformers zero2")))
    assert dsrun.initialize(model=nn.Linear(3, 3), config=path)[0].config == json.loads(path.read_text())


def test_what_is_changed_is_in_the_records_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_DIR_ENV, str(tmp_path))
    dsrun.initialize(model=nn.Linear(3, 3), config=of_one_rank("trl reference, zero3_offload"))
    records = [json.loads(line) for line in JobPaths(tmp_path).records.read_text().splitlines()]
    (notes,) = (record["notes"] for record in records if record["event"] == "config_notes")
    assert any("zero_optimization.reduce_bucket_size" in note for note in notes)


@pytest.mark.parametrize(("counted", "is_refused"), [(1, False), (2, True)])
def test_a_job_whose_processes_accelerate_counts_otherwise_is_refused(
    counted: int, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = ModuleType("accelerate.state")
    state.PartialState = type("PartialState", (), {"_shared_state": {"num_processes": counted}})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "accelerate.state", state)
    with (
        pytest.raises(InputError, match="Accelerate counts 2 processes, and the job has 1 ranks")
        if is_refused
        else (nullcontext())
    ):
        dsrun.initialize(model=nn.Linear(3, 3), config=of_one_rank("transformers zero2"))


def test_what_is_changed_is_told_once_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        dsrun.initialize(model=nn.Linear(3, 3), config=of_one_rank("trl reference, zero3_offload"))
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("dsrun: config: ")]
    size = "stage3_prefetch_bucket_size"
    assert len(told) == len(set(told)) == 6
    assert (
        f"dsrun: config: `zero_optimization.{size}` is 1166.3999999999999; read as 1166, for elements are whole" in told
    )
    assert any(
        "`checkpoint.asynchronous` is not set; read as false" in line and line.endswith("beside training)")
        for line in told
    )


def test_a_script_of_dsrun_is_told_nothing_and_refused_as_a_file_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(AS_DEEPSPEED_ENV)
    dsrun.initialize(model=nn.Linear(3, 3), config=of_one_rank("transformers zero2"))
    assert "dsrun: config" not in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"`zero_optimization\.reduce_bucket_size` is not a key"):
        dsrun.initialize(model=nn.Linear(3, 3), config=of_one_rank("trl reference, zero3_offload"))


def is_cut(settings: dict[str, Any]) -> bool:
    with zero.Init(config_dict_or_path=settings):
        model = nn.Linear(2, 3)
    return all(map(zero.is_zero_param, model.parameters()))


def test_init_reads_the_dicts_of_programs_and_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    given: dict[str, Any] = {"zero_optimization.stage": 3, "fp16": {"enabled": "auto"}, "train_batch_size": "auto"}
    kept = copy.deepcopy(given)
    assert is_cut(given)
    assert not is_cut({"zero_optimization.stage": 2})
    assert given == kept
    assert capsys.readouterr().out == ""


def _keep_their_dicts() -> list[str]:
    """Makes an engine of each recorded config; returns those whose engine has another dict, or a changed one."""
    os.environ[AS_DEEPSPEED_ENV] = "0.19.8"
    wrong: list[str] = []
    for name, recorded in RECORDED.items():
        given = copy.deepcopy(recorded)
        engine = dsrun.initialize(model=nn.Linear(3, 3), config_params=given)[0]
        if engine.config is not given or given != recorded:
            wrong.append(name)
    return wrong


def test_two_ranks_make_an_engine_of_every_recorded_config() -> None:
    assert run_ranks(2, _keep_their_dicts) == [[], []]


def test_a_checkpoint_that_is_not_there_yet_is_told_and_nothing_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = dsrun.initialize(model=nn.Linear(3, 3), config=of_one_rank("transformers zero2"))[0]
    place = tmp_path / "run"
    assert engine.load_checkpoint(place) == (None, None)
    place.mkdir()
    assert engine.load_checkpoint(place) == (None, None)
    engine.save_checkpoint(place, tag="one", save_latest=False)
    assert engine.load_checkpoint(place) == (None, None)
    said = [line for line in capsys.readouterr().out.splitlines() if "load_checkpoint" in line]
    assert said == [
        f"dsrun: load_checkpoint: there is no folder {place} yet; nothing was loaded",
        f"dsrun: load_checkpoint: there is no checkpoint in {place} yet; nothing was loaded",
        f"dsrun: load_checkpoint: {place} has no file `latest`, and holds one (`tag=` loads one); nothing was loaded",
    ]
    assert engine.load_checkpoint(place, tag="one")[0] == str(place / "one")
    with pytest.raises(CheckpointError, match="no checkpoint here"):
        engine.load_checkpoint(place, missing_ok=False)
    monkeypatch.delenv(AS_DEEPSPEED_ENV)
    with pytest.raises(CheckpointError, match="no checkpoint here"):
        engine.load_checkpoint(place)
