"""Universal checkpoints: DeepSpeed's files are those that its own converter writes, and dsrun loads its own of them.

DeepSpeed 0.19.8 was run on folders made here, of `stage1_fp32` and of a checkpoint of dsrun's from two ranks: at its
stages 1 and 2 it goes on with the expected losses, to 2e-7. At stage 3 it gives all groups the options of the first,
and goes on from its own converter's folders with the same other losses.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dsrun.as_deepspeed.commands.ds_to_universal import main, parse_arguments
from dsrun.as_deepspeed.search_path import SITE
from dsrun.checkpoint_files.folder.scratch import scratch_folder
from dsrun.checkpoint_files.folder.verify import verify
from dsrun.checkpoint_files.parse import read_index
from dsrun.contract.environment import AS_DEEPSPEED_ENV
from dsrun.errors import CheckpointError
from dsrun.runtime.checkpoint.convert.pickles import read_torch_file
from dsrun.runtime.checkpoint.convert.to_universal import to_universal
from support.cli import clean_environment
from support.deepspeed_runs import LOSSES, MADE, engine_of, go_on, update
from support.forked_programs import run_programs, with_words
from support.ranks import run_ranks

TAG = "global_step3"
UNIVERSAL = f"ds_universal_{TAG}"


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """The files of `zero`, each a tensor."""
    found: dict[str, Tensor] = {}
    for path in (folder / "zero").glob("*/*.pt"):
        value = read_torch_file(path, ignored=[])
        found[f"{path.parent.name}/{path.name}"] = value["param"] if isinstance(value, dict) else value
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_its_files_are_those_of_deepspeeds_own_converter(tmp_path: Path, stage: int) -> None:
    assert to_universal(MADE / f"stage{stage}", tmp_path / UNIVERSAL) == []
    theirs = MADE / f"universal_of_stage{stage}" / f"{TAG}_universal"
    expected, found = tensors_in(theirs), tensors_in(tmp_path / UNIVERSAL)
    # Of stage 3 theirs has no `step.pt`, and of stage 1 weights that nothing is trained of.
    names = expected.keys() & found.keys()
    assert names == {name for name in found if stage == 1 or name.endswith(("fp32.pt", "avg.pt", "sq.pt"))} - (
        {"frozen.weight/fp32.pt"} if stage == 3 else set()
    )
    for name in names:
        assert torch.equal(found[name].flatten(), expected[name].flatten()), name
    assert all(found[name].dtype == torch.float32 for name in names)
    groups = [
        [{k: v for k, v in group.items() if k in ("lr", "betas", "eps", "weight_decay")} for group in one]
        for one in (
            read_torch_file(folder / "zero" / "optimizer_state.pt", ignored=[])["param_groups"]
            for folder in (tmp_path / UNIVERSAL, theirs)
        )
    ]
    assert groups[0] == groups[1]
    (file,) = theirs.glob("*_rank_00_model_states.pt" if stage == 1 else "*_rank_0_*_model_states.pt")
    states = read_torch_file(file, ignored=[])
    ours = read_torch_file(tmp_path / UNIVERSAL / file.name, ignored=[])
    assert states.keys() - {"num_experts", "ds_autoep_layers", "autoep_layers"} <= ours.keys()
    for name in ("global_steps", "skipped_steps", "global_samples", "lr_scheduler", "epoch", "note", "buffer_names"):
        assert ours[name] == states[name]
    assert ours["shared_params"] == states["shared_params"]


def _save(folder: str) -> list[float]:
    """Trains three steps, saves as DeepSpeed's scripts do, and takes the steps after."""
    engine = engine_of(3)
    for step in range(3):
        update(engine, step)
    states = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
    engine.save_checkpoint(folder, client_state={"training_step": 3, "rng_states": states})
    losses = [update(engine, step) for step in range(3, 3 + len(LOSSES))]
    engine.destroy()
    return losses


#: As open-instruct goes about it: a process of its own, the config that says `load_universal`, states of generators.
def test_a_job_converts_its_latest_checkpoint_and_goes_on_from_it_at_another_size(tmp_path: Path) -> None:
    run = tmp_path / "run"
    losses = run_ranks(2, _save, str(run))
    words = ["--input_folder", str(run / TAG), "--output_folder", str(run / UNIVERSAL), "--inject_missing_state"]
    done = subprocess.run(
        [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *words],
        env=clean_environment(PYTHONPATH=str(SITE), **{AS_DEEPSPEED_ENV: "0.19.8"}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (run / "latest_universal").read_text() == UNIVERSAL
    assert list(verify(run / UNIVERSAL, read_index(run / UNIVERSAL))) == []
    assert {(run / UNIVERSAL / name).stat().st_nlink for name in read_index(run / TAG).files} == {2}, "no copy"
    (found,) = run_ranks(1, go_on, str(run), 1, True)
    assert found["path"] == str(run / UNIVERSAL)
    assert found["losses"] == pytest.approx([sum(pair) / 2 for pair in zip(*losses, strict=True)], rel=1e-6)
    states: dict[str, Any] = found["state"]["rng_states"]
    torch.set_rng_state(states["torch"])
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])
    # By dsrun alone, from DeepSpeed's files.
    for path in (run / UNIVERSAL).glob("*.safetensors"):
        path.unlink()
    (run / UNIVERSAL / "index.json").unlink()
    (again,) = run_ranks(1, go_on, str(run), 2, True)
    assert again["losses"] == found["losses"]
    assert again["state"]["rng_states"]["numpy"][1].tolist() == states["numpy"][1].tolist()
    assert again["state"]["rng_states"]["python"] == states["python"]


def test_the_command_of_deepspeed_takes_its_words_and_replaces_an_earlier_folder(tmp_path: Path) -> None:
    shutil.copytree(MADE / "stage2", tmp_path / "run")
    out = tmp_path / "run" / UNIVERSAL
    given = ["--input_folder", str(tmp_path / "run"), "--output_folder", f"{out}/", "--num_extract_workers", "3"]
    given += ["--num_merge_workers", "1", "--keep_temp_folder", "--no_strict", "--inject_missing_state"]
    words = parse_arguments(given)
    assert vars(words) == {
        "input_folder": str(tmp_path / "run"),
        "output_folder": f"{out}/",
        "num_extract_workers": 3,
        "num_merge_workers": 1,
        "keep_temp_folder": True,
        "strict": False,
        "inject_missing_state": True,
    }
    main(words)
    first = (out / "index.json").stat().st_ino
    main(words)
    assert (out / "index.json").stat().st_ino != first
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        *("latest", "expected.safetensors", "losses.json", TAG),
        *("latest_universal", UNIVERSAL),
    }


def test_what_is_no_checkpoint_or_would_be_overwritten_is_named(tmp_path: Path) -> None:
    shutil.copytree(MADE / "stage2", tmp_path / "run")
    source, empty = tmp_path / "run" / TAG, tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(CheckpointError, match=f"{empty}: there is no checkpoint here"):
        to_universal(empty, tmp_path / "out")
    with pytest.raises(CheckpointError, match="gone: no such folder"):
        to_universal(tmp_path / "gone", tmp_path / "out")
    with pytest.raises(CheckpointError, match="it is the checkpoint that is to be converted"):
        to_universal(source, source)
    with pytest.raises(CheckpointError, match="it holds something else than a universal checkpoint"):
        to_universal(source, tmp_path / "run")
    with pytest.raises(CheckpointError, match="checkpoint tag is"):
        main(Namespace(input_folder=source, output_folder=tmp_path / ".hidden"))
    (source / "mp_rank_00_model_states.pt").write_bytes(b"no pickle")
    with pytest.raises(CheckpointError, match="cannot be read"):
        to_universal(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob("*latest_universal"))


def _train_and_save(folder: str) -> None:
    engine = engine_of(2)
    for step in range(2):
        update(engine, step)
        engine.save_checkpoint(folder)
    engine.destroy()


def test_only_a_folder_that_it_has_made_itself_is_replaced_and_never_what_holds_the_source(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_ranks(1, _train_and_save, str(run))
    source, newest = run / "global_step1", run / "global_step2"
    project = tmp_path / "project"
    (project / "zero").mkdir(parents=True)
    (project / "train.py").write_text("script")
    (project / "zero" / "a.py").write_text("module")
    noted, around, deep = (tmp_path / name for name in ("noted", "around", "deep"))
    for out in (noted, around, deep):
        to_universal(source, out)
    to_universal(source, noted)
    (noted / "notes.txt").write_text("mine")
    shutil.copytree(source, around / "global_step1")
    shutil.copytree(source, deep / "zero" / "global_step1")
    (tmp_path / "latest_universal").unlink()
    before = sorted(tmp_path.rglob("*"))
    for given, out, why in (
        (source, newest, "`zero/optimizer_state.pt` is not in it"),
        (source, project, "`train.py` is in it"),
        (source, noted, "`notes.txt` is in it"),
        (around / "global_step1", around, "`global_step1` is in it"),
        (deep / "zero" / "global_step1", deep, "the checkpoint that is to be converted lies in it"),
    ):
        with pytest.raises(CheckpointError, match=f"{out}: .*{why}") as raised:
            to_universal(given, out)
        assert "name another folder" in str(raised.value.hint)
    assert sorted(tmp_path.rglob("*")) == before
    assert read_index(newest).values["counters"]["global_steps"] == 2


def test_a_folder_that_is_replaced_is_gone_and_what_failed_leaves_the_earlier_one(tmp_path: Path) -> None:
    out = tmp_path / UNIVERSAL
    shutil.copytree(MADE / "stage1", tmp_path / "run")
    to_universal(tmp_path / "run" / TAG, out)
    names = sorted(path.name for path in tmp_path.iterdir())
    (out / "zero" / "stale").mkdir()

    def fail() -> None:
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        to_universal(tmp_path / "run" / TAG, out, progress=fail)
    assert (out / "zero" / "stale").is_dir()
    to_universal(tmp_path / "run" / TAG, out)
    assert not (out / "zero" / "stale").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == names


_DIES_REMOVING = """
import os, signal, sys
from pathlib import Path
from dsrun.runtime.checkpoint.convert.to_universal import to_universal
left = 3
def count(event, args):
    global left
    if event == "os.remove":
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(count)
to_universal(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def test_a_kill_while_the_earlier_folder_is_removed_leaves_the_new_one_whole(tmp_path: Path) -> None:
    source, out = tmp_path / "run" / TAG, tmp_path / UNIVERSAL
    shutil.copytree(MADE / "stage1", tmp_path / "run")
    to_universal(source, out)
    first, names = (out / "index.json").stat().st_ino, sorted(out.rglob("*.pt"))
    (done,) = run_programs([with_words(_DIES_REMOVING, str(source), str(out))])
    assert done.code == -9, done.err
    assert (out / "index.json").stat().st_ino != first
    assert sorted(out.rglob("*.pt")) == names
    assert list(verify(out, read_index(out))) == []


_DIES = """
import os, signal, sys
from pathlib import Path
from dsrun.runtime.checkpoint.convert.to_universal import to_universal
left = int(sys.argv[3])
def count():
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
to_universal(Path(sys.argv[1]), Path(sys.argv[2]), progress=count)
"""


def test_a_kill_half_way_leaves_no_folder_of_that_name_and_the_next_one_takes_away_what_it_left(tmp_path: Path) -> None:
    out = tmp_path / "run" / UNIVERSAL
    shutil.copytree(MADE / "stage1", tmp_path / "run")
    dies = [with_words(_DIES, str(tmp_path / "run" / TAG), str(out), step) for step in ("1", "9")]
    looks = f"import os; print(*os.listdir({str(tmp_path / 'run')!r}), sep='\\n')"
    first, there, second, there_then = run_programs([dies[0], looks, dies[1], looks])
    for done, names in ((first, there.out.splitlines()), (second, there_then.out.splitlines())):
        assert done.code == -9, done.err
        assert TAG in names
        assert not {UNIVERSAL, "latest_universal"} & set(names)
        scratch = [name for name in names if name.startswith(".dsrun-universal-")]
        assert len(scratch) == 1, "of the kill before nothing is left"
    with scratch_folder(tmp_path / "run", "other") as there:
        to_universal(tmp_path / "run" / TAG, out)
        assert there.is_dir(), "what another process works in stays"
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {UNIVERSAL, "latest_universal"}
    assert not list((tmp_path / "run").glob(".*"))


def test_nothing_but_its_own_files_is_linked(tmp_path: Path) -> None:
    """A second name of an index that somebody writes to later would change with it."""
    run_ranks(1, _save, str(tmp_path / "run"))
    out = tmp_path / "run" / "universal"
    to_universal(tmp_path / "run" / TAG, out)
    shutil.rmtree(tmp_path / "run" / TAG)
    assert list(verify(out, read_index(out))) == []
    assert os.listdir(tmp_path / "run" / "universal" / "zero")
