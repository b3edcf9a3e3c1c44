"""`deepspeed.utils.zero_to_fp32` on dsrun's checkpoints and on DeepSpeed's: the same names, order and bits."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from dsrun.as_deepspeed.commands.zero_to_fp32 import main, main_of_dtypes
from dsrun.as_deepspeed.search_path import SITE
from dsrun.errors import CheckpointError, InputError
from dsrun.runtime.checkpoint.convert import zero_to_fp32
from dsrun.runtime.checkpoint.convert.to_universal import to_universal
from dsrun.runtime.checkpoint.convert.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    convert_zero_checkpoint_to_state_dict,
    get_checkpoint_files,
    get_fp32_state_dict_from_zero_checkpoint,
    get_model_state_file,
    get_model_state_files,
    get_optim_files,
    load_state_dict_from_zero_checkpoint,
    natural_keys,
    to_torch_tensor,
)
from support.cli import clean_environment
from support.deepspeed_runs import MADE, Tiny, engine_of, update
from support.ranks import run_ranks

TAG = "global_step3"
#: As DeepSpeed 0.19.8 gives them; at stage 1 it leaves out `frozen.weight`, which its files have.
ORDER = ["seen", "frozen.weight", "embed.weight", "first.weight", "first.bias", "norm.weight", "norm.bias"]


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], value) for name, value in expected.items())


def _save(folder: str) -> dict[str, Tensor]:
    """Saves a checkpoint of two steps from two ranks, and returns the weights."""
    engine = engine_of(3)
    for step in range(2):
        update(engine, step)
    engine.save_checkpoint(folder, client_state={"meta": {"seed": 7}, "shape": (1, 2)})
    weights = engine.module_state_dict(all_ranks=True)
    engine.destroy()
    return {name: value.float() for name, value in weights.items()}


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint of dsrun's, and its weights."""
    folder = tmp_path_factory.mktemp("run")
    return folder, run_ranks(2, _save, str(folder))[0]


@pytest.mark.parametrize("kind", ["stage0", "stage1", "stage2", "stage3", "universal_of_stage1"])
def test_deepspeeds_folders_give_their_fp32_masters_with_tied_names(kind: str, tmp_path: Path) -> None:
    shutil.copytree(MADE / kind, tmp_path / "run")
    (tag,) = (path for path in (tmp_path / "run").iterdir() if path.is_dir())
    weights = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "run", tag.name)
    assert list(weights) == [*ORDER, "head.weight"] or kind == "stage0"
    assert weights["head.weight"] is weights["embed.weight"]
    expected = load_file(MADE / kind / "expected.safetensors")
    for name in ORDER:
        wanted = expected.get(f"{name}:param", expected.get(f"{name}:buffer"))
        assert wanted is not None
        assert torch.equal(weights[name], wanted.float()), name
    before = {name: value.clone() for name, value in weights.items()}
    for path in tag.rglob("*.pt"):
        path.write_bytes(b"\0" * path.stat().st_size)
    assert same(weights, before), "they do not look into the files"


def test_dsruns_checkpoint_gives_the_engines_weights(ours: tuple[Path, dict[str, Tensor]]) -> None:
    folder, expected = ours
    weights = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    assert list(weights) == [*ORDER, "head.weight"]
    assert same(weights, expected)
    trained = get_fp32_state_dict_from_zero_checkpoint(folder, "global_step2", exclude_frozen_parameters=True)
    assert list(trained) == [name for name in weights if name != "frozen.weight"]
    lazy = get_fp32_state_dict_from_zero_checkpoint(folder / "global_step2", lazy_mode=True)
    assert {name: tuple(one.shape) for name, one in lazy.items()} == {n: tuple(w.shape) for n, w in weights.items()}
    assert same({name: one.contiguous() for name, one in lazy.items()}, expected)
    half = to_torch_tensor(lazy, dtype="bf16")
    assert half["head.weight"] is half["embed.weight"]
    assert same(half, {name: value.bfloat16() for name, value in expected.items()})
    empty = to_torch_tensor(lazy, return_empty_tensor=True)
    assert {name: (w.shape, w.dtype) for name, w in empty.items()} == {
        n: (w.shape, w.dtype) for n, w in weights.items()
    }


def test_files_are_written_in_shards_and_dtypes_in_place_of_those_before(
    ours: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    folder, expected = ours
    convert_zero_checkpoint_to_fp32_state_dict(folder, tmp_path, max_shard_size="300B")
    weight_map = json.loads((tmp_path / "pytorch_model.bin.index.json").read_text())["weight_map"]
    assert weight_map.keys() == expected.keys()
    assert same({name: torch.load(tmp_path / file)[name] for name, file in weight_map.items()}, expected)
    convert_zero_checkpoint_to_fp32_state_dict(folder, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["pytorch_model.bin"]
    assert same(torch.load(tmp_path / "pytorch_model.bin"), expected)
    convert_zero_checkpoint_to_state_dict(MADE / "stage3", tmp_path, "fp16", None, safe_serialization=True)
    found = load_file(tmp_path / "model.safetensors")
    theirs = get_fp32_state_dict_from_zero_checkpoint(MADE / "stage3")
    assert same(found, {name: value.half() for name, value in theirs.items() if name != "head.weight"})
    for wrong in ({"max_shard_size": "much"}, {"dtype": "int8"}):
        with pytest.raises(InputError, match=f"{next(iter(wrong))} is "):
            convert_zero_checkpoint_to_state_dict(folder, tmp_path, **wrong)  # pyright: ignore[reportArgumentType]


def test_a_plain_model_gets_the_weights_and_what_differs_is_said(
    ours: tuple[Path, dict[str, Tensor]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, expected = ours
    model = Tiny()
    assert load_state_dict_from_zero_checkpoint(model, folder) is model
    assert same(model.state_dict(), expected)
    assert capsys.readouterr().out == ""
    load_state_dict_from_zero_checkpoint(nn.ModuleDict({"first": nn.Linear(5, 7), "other": nn.LayerNorm(1)}), folder)
    out = capsys.readouterr().out
    assert "the checkpoint does not have: other.weight, other.bias\n" in out
    assert "has beyond the model: seen, frozen.weight, embed.weight, norm.weight, norm.bias and 1 more\n" in out


#: Lightning's converter and xtuner's tools read these files by torch.load.
def test_clients_read_stage_counters_and_client_state_from_files_that_are_made_for_them(
    ours: tuple[Path, dict[str, Tensor]],
) -> None:
    tag = ours[0] / "global_step2"
    (optimizer,) = get_optim_files(tag)
    state = torch.load(optimizer, weights_only=False)["optimizer_state_dict"]
    assert state["zero_stage"] == 3
    assert [group["weight_decay"] for group in state["param_groups"]] == [0.1, 0.0]
    assert "fp32_flat_groups" not in state
    paths = [*get_model_state_files(str(tag)), get_model_state_file(tag, 3)]
    assert [os.path.basename(path) for path in paths] == [
        "mp_rank_00_model_states.pt",
        "zero_pp_rank_0_mp_rank_00_model_states.pt",
    ]
    for path in paths:
        states = torch.load(path, weights_only=False)
        assert states["global_steps"] == 2
        assert states["meta"] == {"seed": 7}
        assert states["shape"] == (1, 2)
        assert list(states["module"]) == ["seen", "frozen.weight"]
        assert states["param_shapes"][0]["first.weight"] == torch.Size([7, 5])
    assert not list(ours[0].rglob("*.pt")), "the checkpoint has no files that its index does not name"


def test_deepspeeds_own_files_are_named_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    tag = MADE / "stage3" / TAG
    names = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(2)]
    assert get_model_state_files(tag) == [str(tag / name) for name in names]
    assert get_model_state_file(tag, 3) == str(tag / names[0])
    assert [os.path.basename(path) for path in get_optim_files(tag)] == [
        f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)
    ]
    for number in (10, 9, 100):
        (tmp_path / f"a{number}.pt").touch()
    assert [Path(path).name for path in get_checkpoint_files(tmp_path, "*.pt")] == ["a9.pt", "a10.pt", "a100.pt"]
    assert natural_keys("a10.pt") == ["a", 10, ".pt"]
    for look in (get_optim_files, get_model_state_files):
        with pytest.raises(FileNotFoundError, match="there are no files"):
            look(tmp_path)
    with pytest.raises(FileNotFoundError, match="there are no files mp_rank_00_model_states"):
        get_model_state_file(tag, 2)
    to_universal(tag, tmp_path / "universal")
    assert len(get_model_state_files(tmp_path / "universal")) == 2, "they are there"


@pytest.mark.parametrize("tag", ["..", "../stage2", "/etc", ".", ""])
def test_a_tag_that_names_a_parent_leads_nowhere(tag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CheckpointError, match="checkpoint tag is"):
        get_fp32_state_dict_from_zero_checkpoint(MADE / "stage2", tag)
    assert main([str(MADE / "stage2"), str(tmp_path / "out"), "-t", tag]) == 1
    assert capsys.readouterr().err.startswith("error: checkpoint tag is")


def test_what_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{tmp_path}: there is no checkpoint here"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="nowhere: no such folder"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="global_step9: no such folder"):
        get_fp32_state_dict_from_zero_checkpoint(MADE / "stage2", "global_step9")
    shutil.copytree(MADE / "stage2", tmp_path / "run")
    (file, _) = sorted((tmp_path / "run" / TAG).glob("*optim_states.pt"))
    file.write_bytes(file.read_bytes()[:-3000])
    with pytest.raises(CheckpointError, match=f"{file.name}: cannot be read"):
        convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "run" / "latest").write_text("../stage2")
    with pytest.raises(CheckpointError, match=r"latest: it names '\.\./stage2', which is no complete checkpoint"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path / "run")


class _Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


class _Stranger:
    """A class of a script's, in the client state."""


def test_weights_are_read_beside_client_states_of_unknown_classes_and_nothing_is_run(tmp_path: Path) -> None:
    shutil.copytree(MADE / "stage2", tmp_path / "run")
    path = tmp_path / "run" / TAG / "mp_rank_00_model_states.pt"
    state = torch.load(path, weights_only=True)
    torch.save({**state, "args": _Stranger()}, path)
    assert len(get_fp32_state_dict_from_zero_checkpoint(tmp_path / "run")) == 8
    torch.save({**state, "args": _Trap(tmp_path / "trap")}, path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path / "run")
    assert not (tmp_path / "trap").exists()


def test_the_scripts_run_as_modules_and_take_deepspeeds_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deepspeed.utils.zero_to_fp32", str(MADE / "stage3"), str(tmp_path / "a")],
        env=clean_environment(PYTHONPATH=str(SITE)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{tmp_path / 'a' / 'pytorch_model.bin'}  ")
    assert same(
        torch.load(tmp_path / "a" / "pytorch_model.bin"), get_fp32_state_dict_from_zero_checkpoint(MADE / "stage3")
    )
    words = [str(MADE / "stage3"), str(tmp_path / "b"), "--dtype", "bf16", "--safe_serialization", "-t", TAG]
    assert main_of_dtypes(words) == 0
    assert load_file(tmp_path / "b" / "model.safetensors")["first.weight"].dtype == torch.bfloat16
    assert main([str(MADE / "stage3"), str(tmp_path / "a")]) == 1
    assert "a model is there already: pytorch_model.bin" in capsys.readouterr().err
    assert main([str(MADE / "stage3"), str(tmp_path / "c"), "--max_shard_size", "x"]) == 2
    assert "`--max_shard_size` is 'x'" in capsys.readouterr().err


def test_functions_take_deepspeeds_arguments_in_its_order() -> None:
    """Recorded from DeepSpeed 0.19.8 by `inspect.signature`."""
    expected = {
        "get_fp32_state_dict_from_zero_checkpoint": "checkpoint_dir tag exclude_frozen_parameters lazy_mode",
        "convert_zero_checkpoint_to_fp32_state_dict": "checkpoint_dir output_dir max_shard_size safe_serialization tag "
        "exclude_frozen_parameters",
        "convert_zero_checkpoint_to_state_dict": "checkpoint_dir output_dir dtype max_shard_size safe_serialization "
        "tag exclude_frozen_parameters",
        "load_state_dict_from_zero_checkpoint": "model checkpoint_dir tag",
        "get_model_state_file": "checkpoint_dir zero_stage",
        "get_checkpoint_files": "checkpoint_dir glob_pattern",
        "to_torch_tensor": "state_dict return_empty_tensor dtype",
    }
    found = {name: " ".join(inspect.signature(getattr(zero_to_fp32, name)).parameters) for name in expected}
    assert found == expected
