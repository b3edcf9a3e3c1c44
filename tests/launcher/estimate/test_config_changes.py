"""Sizes of axes from the command line: how they are read, and what they change in a config and in a plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsrun.errors import UsageError
from dsrun.estimate.run.settings import RunSettings
from dsrun.launcher.estimate.config_changes import LETTERS, parse_axes, with_axes, with_choice
from support.cli import Result, invoke

MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"
MEANINGS = (
    "d data parallel ranks; t tensor parallel ranks; p pipeline stages; v chunks of layers on each stage; "
    "m micro batches of an update; u ranks that share a sequence by heads (Ulysses); "
    "c ranks that share a sequence in a ring"
)


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


def plan(axes: str, *words: str) -> Result:
    return invoke("plan", "7B", "--gpus", "8xA100-80G", "--seq", "1024", "--axes", axes, *words)


def as_json(axes: str) -> Any:
    result = plan(axes, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("t8p4", {"t": 8, "p": 4}),
        ("T8P4", {"t": 8, "p": 4}),
        ("d1t2p3v4m5u6c7", {"d": 1, "t": 2, "p": 3, "v": 4, "m": 5, "u": 6, "c": 7}),
        ("p16m1048576", {"p": 16, "m": 1048576}),
    ],
)
def test_letters_with_sizes_are_read_in_any_order_and_case(text: str, sizes: dict[str, int]) -> None:
    assert parse_axes(text) == sizes
    assert set(sizes) <= set(LETTERS)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("x3", "`--axes` is `x3`; expected letters with sizes, as `t8p4`, and `x` is no axis", MEANINGS),
        ("t2X3", "`--axes` is `t2X3`; expected letters with sizes, as `t8p4`, and `x` is no axis", MEANINGS),
        ("t2t4", "`--axes` is `t2t4`, which sizes `t` twice", "give each letter once"),
        ("t2T2", "`--axes` is `t2T2`, which sizes `t` twice", "give each letter once"),
        *(
            (text, f"`--axes` is `{text}`; expected letters with sizes, as `t8p4`", MEANINGS)
            for text in ("", "t0", "t-2", "t08", "8t", "t8p", "t2,p2", "t2 p2", "t12345678")
        ),
    ],
)
def test_what_is_no_letters_with_sizes_is_refused(text: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_axes(text)
    assert [(problem.message, problem.hint) for problem in raised.value.problems] == [(message, hint)]
    result = plan(text)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"error: {message}\nhint: {hint}\n"


@pytest.mark.parametrize("section", [{}, {"pipeline": {"stages": 1}}])
def test_chunks_without_stages_are_refused(section: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as raised:
        with_axes(section, {"v": 2})
    assert raised.value.render() == "error: `--axes` has v2 chunks and one pipeline stage\nhint: add p4, say"
    assert with_axes(section, {"v": 1}) == {}


@pytest.mark.parametrize(
    ("axes", "message", "hint"),
    [
        ("d4", "`--axes` says d4; 8 ranks leave 8", "leave d out, or plan for 4 ranks"),
        ("t4d3", "`--axes` says d3; 8 ranks leave 2 beside tensor 4", "leave d out, or plan for 12 ranks"),
        (
            "u2c2d1",
            "`--axes` says d1; 8 ranks leave 2 beside ring 2 beside ulysses 2",
            "leave d out, or plan for 4 ranks",
        ),
    ],
)
def test_data_ranks_that_the_others_do_not_leave_are_refused(axes: str, message: str, hint: str) -> None:
    result = plan(axes)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"error: {message}\nhint: {hint}\n"


def test_data_ranks_that_the_others_leave_change_nothing() -> None:
    assert as_json("t4d2") == as_json("t4")
    assert as_json("d8")["settings"]["axis_sizes"] == {"pipe": 1, "expert": 1, "ring": 1, "ulysses": 1, "tensor": 1}


@pytest.mark.parametrize(
    ("axes", "name", "samples", "refused"),
    [
        ("u4", "ulysses", 2, "`sequence_parallel_size`"),
        ("c4", "ring", 2, "`--axes c`"),
        ("u2c2", "ring", 2, "`sequence_parallel_size`, `--axes c`"),
    ],
)
def test_ranks_that_share_a_sequence_are_planned_and_told_not_to_be_built(
    axes: str, name: str, samples: int, refused: str
) -> None:
    told = as_json(axes)
    assert told["settings"]["axis_sizes"][name] == int(axes[1])
    assert told["step"]["tokens"] == samples * 1024, "the others have samples of their own"
    assert not told["runs"]
    assert f"this version refuses {refused}" in " ".join(plan(axes).stdout.split())


def test_ranks_that_do_not_divide_are_refused() -> None:
    result = plan("c3")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "error: 8 ranks do not divide by context parallel 3\nhint: use a multiple of 3 ranks\n"


def test_micro_batches_are_those_of_an_update() -> None:
    assert as_json("m8")["step"]["tokens"] == 8 * as_json("m1")["step"]["tokens"]
    assert with_axes({MICRO: 2, STEPS: 4, "train_batch_size": 64}, {"m": 16}) == {MICRO: 2, STEPS: 16}
    assert with_axes({"train_batch_size": 64}, {"m": 16}) == {"train_batch_size": 64, STEPS: 16}


def test_sections_of_a_config_keep_what_is_no_size() -> None:
    raw = {
        "tensor_parallel": {"tp": {"tp_size": 2}, "exact": True},
        "pipeline": {"stages": 2, "schedule": "zbv", "partition": "uniform"},
    }
    assert with_axes(raw, {"t": 4, "p": 8}) == {
        "tensor_parallel": {"exact": True, "autotp_size": 4},
        "pipeline": {"stages": 8, "schedule": "zbv", "partition": "uniform"},
    }
    assert with_axes(raw, {"v": 4})["pipeline"] == {"stages": 2, "partition": "uniform", "virtual_stages": 4}
    assert with_axes(raw, {"p": 1}).keys() == {"tensor_parallel"}
    assert with_axes({}, {"t": 2}) == {"tensor_parallel": {"autotp_size": 2, "sequence_parallel": True}}
    assert with_axes({}, {"u": 2, "c": 2, "d": 2}) == {"sequence_parallel_size": 2}


def test_another_recomputation_keeps_where_inputs_lie_and_in_which_format() -> None:
    kept = {"packing": "int8", "cpu_checkpointing": True, "partition_activations": True, "profile": True}
    raw = {"activation_checkpointing": {"policy": "interval", "interval": 4, **kept}}
    asked = RunSettings(recompute="blocks", policy="interval", interval=4, packed_activations=True)
    chosen = replace(asked, policy="every_block", interval=None)
    assert with_choice(raw, chosen, asked)["activation_checkpointing"] == {"policy": "every_block", **kept}
    assert with_choice(raw, asked, asked)["activation_checkpointing"] == raw["activation_checkpointing"]
