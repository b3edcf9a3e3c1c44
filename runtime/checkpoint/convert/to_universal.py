"""A checkpoint as a universal one: dsrun's own files, and beside them the files that DeepSpeed 0.19 loads as universal.

[Note: universal folders] Every checkpoint of dsrun's loads at any layout, so its own files are what dsrun loads of such
a folder, linked and not copied. DeepSpeed loads `zero/<name>/fp32.pt`, `exp_avg.pt`, ..., one whole tensor each, and
`zero/optimizer_state.pt`; of `*model_states.pt` it takes counters, schedule and client state. It looks for that file
under one name at stages 1 and 2, and under another one at stage 3.
Source: DeepSpeed 0.19, deepspeed/checkpoint/{ds_to_universal,universal_checkpoint}.py.
"""

from __future__ import annotations

import os
import shutil
from collections import OrderedDict
from collections.abc import Callable
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any

import torch

from dsrun.as_deepspeed.version import STANDARD
from dsrun.checkpoint_files.folder.find import find_tag
from dsrun.checkpoint_files.folder.removal import held
from dsrun.checkpoint_files.folder.scratch import scratch_folder
from dsrun.checkpoint_files.index.value import INDEX_FILE, Index
from dsrun.checkpoint_files.parse import read_index
from dsrun.checkpoint_files.storage.deepspeed_tags import LATEST_UNIVERSAL_FILE, is_deepspeed_tag
from dsrun.checkpoint_files.storage.tags import check_tag
from dsrun.checkpoint_files.tensors.rounding import FLOATS
from dsrun.errors import CheckpointError
from dsrun.files.atomic import sync_folder, write_atomic

from ..format import client_state as script_state
from ..format.json_values import from_json
from ..format.load import batches, read_whole
from . import deepspeed_keys as keys
from .deepspeed import read_deepspeed
from .write import write

_OF_STAGES_1_AND_2 = "mp_rank_00_model_states.pt"
_OF_STAGE_3 = "zero_pp_rank_0_mp_rank_00_model_states.pt"
_OPTIMIZER_STATE = "zero/optimizer_state.pt"
_SCALAR = "scalar:"


def to_universal(source: Path, out: Path, *, progress: Callable[[], None] = lambda: None) -> list[str]:
    """Makes a universal checkpoint of one of dsrun's or of DeepSpeed's, and lets `latest_universal` beside it name it.

    The folder gets its name when it is complete; one that this has made before is replaced then, and nothing else.

    Args:
        source: folder of the checkpoint, or one whose `latest` names it.
        out: folder to make.
        progress: callback after each tensor that is written.

    Returns:
        descriptions of what was not taken over.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or `out` is something else than such a folder, or one
            that the checkpoint lies in.
        OSError: the file system refuses.
    """
    out = out.absolute()
    check_tag(out.name)
    target = find_tag(source, of_deepspeed=True)
    assert isinstance(target, Path), "a path leads to a path"
    if target.resolve() == out.resolve():
        raise CheckpointError(f"{out}: it is the checkpoint that is to be converted", hint="name another folder")
    _check_replaceable(out)
    if target.resolve().is_relative_to(out.resolve()):
        raise CheckpointError(f"{out}: the checkpoint that is to be converted lies in it", hint="name another folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    left: list[str] = []
    with scratch_folder(out.parent, "universal") as between, held(target):
        made = between / out.name
        if is_deepspeed_tag(target):
            contents = read_deepspeed(target, ignored=())
            # Whose they are, the files do not say for sure, and DeepSpeed does not compare.
            contents.optimizer = None
            if contents.scheduler is not None:
                contents.scheduler["type"] = None
            left += contents.left
            write(contents, between, out.name, progress=progress)
        else:
            _link(target, made)
        left += write_for_deepspeed(read_index(made), made, progress=progress)
        _sync(made)
        if out.exists():
            out.rename(between / "replaced")
        made.rename(out)
        sync_folder(out.parent)
    write_atomic(out.parent / LATEST_UNIVERSAL_FILE, out.name.encode())
    return left


def _check_replaceable(out: Path) -> None:
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise CheckpointError(f"{out}: it is no folder, and is not replaced", hint="name another folder")
    names = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    if not names:
        return
    of_this = {"zero", INDEX_FILE, _OF_STAGES_1_AND_2, _OF_STAGE_3}
    strange = [name for name in names if name not in of_this and not fnmatchcase(name, "rank-*.safetensors")]
    lacking = [name for name in (INDEX_FILE, _OPTIMIZER_STATE) if not (out / name).is_file()]
    if strange or lacking:
        why = f"`{strange[0]}` is in it" if strange else f"`{lacking[0]}` is not in it"
        raise CheckpointError(
            f"{out}: it holds something else than a universal checkpoint of dsrun's, and is not replaced: {why}",
            hint="name another folder, or remove this one first",
        )


def _link(source: Path, made: Path) -> None:
    """Gives the files of a checkpoint a second name, or copies them where that cannot be."""
    made.mkdir()
    for name in [*read_index(source).files, INDEX_FILE]:
        try:
            os.link(source / name, made / name, follow_symlinks=False)
        except OSError:  # another file system, or one without links: copying says what else is wrong
            shutil.copyfile(source / name, made / name)


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_for_deepspeed(index: Index, folder: Path, *, progress: Callable[[], None] = lambda: None) -> list[str]:
    """Writes the files that DeepSpeed loads into the folder of a checkpoint; see [Note: universal folders].

    Args:
        index: index of the checkpoint.
        folder: the tag's folder.
        progress: callback after each parameter.

    Returns:
        descriptions of what DeepSpeed's files cannot hold.

    Raises:
        CheckpointError: a file of the checkpoint is damaged.
        OSError: the file system refuses.
    """
    left: list[str] = []
    trained = set(trained_names(index))
    params = {name: stored for (name, role), stored in index.tensors.items() if role == "param"}
    strange = [name for name in params if Path(name).name != name]
    if strange:
        raise CheckpointError(f"{folder}: a parameter has the name {strange[0]!r}, which is no plain folder name")
    for name in params:
        (folder / "zero" / name).mkdir(parents=True)
    for role in ("param", *sorted(role for role in index.state_roles() if not role.startswith(_SCALAR))):
        fitting: list[str] = []
        for name, param in params.items():
            stored = index.find(name, role) if role == "param" or name in trained else None
            if stored is not None and (stored.shape == param.shape and stored.dtype in FLOATS):
                fitting.append(name)
            elif stored is not None:
                left.append(f"{role} of `{name}` is in codes or of another shape, which DeepSpeed does not load")
        for batch in batches(fitting, [4 * prod(params[name].shape) for name in fitting]):
            for name, tensor in read_whole(index, folder, batch, role=role).items():
                content = {keys.PARAM: tensor.float(), keys.CAT_DIM: 0}
                _save(content, folder / "zero" / name / f"{keys.FP32_WEIGHT_KEY if role == 'param' else role}.pt")
                progress()
    steps = [name for name in params if index.find(name, f"{_SCALAR}step") is not None]
    for name, step in read_whole(index, folder, steps, role=f"{_SCALAR}step").items():
        _save(step.float(), folder / "zero" / name / "step.pt")
    _save(optimizer_state(index, folder, trained_names(index)), folder / _OPTIMIZER_STATE)
    _save(model_states(index, folder, trained_names(index)), folder / _OF_STAGES_1_AND_2)
    os.link(folder / _OF_STAGES_1_AND_2, folder / _OF_STAGE_3)
    if index.values.get("loss_scale") is not None:
        left.append("the dynamic loss scale, for DeepSpeed keeps an object of its own: it begins anew there")
    return left


def trained_names(index: Index) -> list[str]:
    """Returns the parameters with states of the optimizer, or all where none has any."""
    roles = index.state_roles()
    params = [name for name, role in index.tensors if role == "param"]
    return [name for name in params if any((name, role) in index.tensors for role in roles)] or params


def model_states(index: Index, folder: Path, trained: list[str]) -> dict[str, Any]:
    """Returns what a file of model states holds; the weights that are trained are not in it, as at stage 3.

    Args:
        index: index of the checkpoint.
        folder: the tag's folder.
        trained: names of the parameters that are trained.

    Raises:
        CheckpointError: a file of the checkpoint is damaged.
    """
    values, is_trained = index.values, set(trained)
    buffers = [name for name, role in index.tensors if role == "buffer"]
    frozen = [name for name, role in index.tensors if role == "param" and name not in is_trained]
    fragments = read_whole(index, folder, frozen, role="param")
    state, counters = values["client_state"], values["counters"]
    kept = read_whole(index, folder, script_state.tensors_in(state), role=script_state.ROLE)
    schedule: dict[str, Any] | None = values.get("scheduler")
    return {
        **script_state.put_together(state, kept),
        "module": OrderedDict(read_whole(index, folder, buffers, role="buffer") | fragments),
        keys.BUFFER_NAMES: buffers,
        "optimizer": None,
        keys.PARAM_SHAPES: [OrderedDict((name, torch.Size(index.tensors[name, "param"].shape)) for name in trained)],
        keys.FROZEN_PARAM_SHAPES: OrderedDict((name, one.shape) for name, one in fragments.items()),
        keys.FROZEN_PARAM_FRAGMENTS: OrderedDict(fragments),
        "shared_params": dict(index.aliases),
        "lr_scheduler": None if schedule is None else from_json(schedule["state"]),
        "data_sampler": None,
        "random_ltd": None,
        **{key: counters[key] for key in ("skipped_steps", "global_steps", "global_samples")},
        "dp_world_size": index.world_size,
        "mp_world_size": 1,
        keys.CHECKPOINT_PARALLEL_DIMS: {keys.CHECKPOINT_PP_DEGREE: 1, keys.CHECKPOINT_TP_DEGREE: 1},
        "ds_config": values["config"],
        keys.DS_VERSION: STANDARD,
    }


def optimizer_state(index: Index, folder: Path, trained: list[str]) -> dict[str, Any]:
    """Returns what is common to all parameters: DeepSpeed reads the groups at stages 1 and 2, the rest at stage 3.

    Args:
        index: index of the checkpoint.
        folder: the tag's folder.
        trained: names of the parameters that are trained.

    Raises:
        CheckpointError: a file of the checkpoint is damaged.
    """
    groups = [
        {**{key: tuple(v) if isinstance(v, list) else v for key, v in group.items()}, "params": [number]}
        for number, group in enumerate(index.values["optimizer"]["groups"])
    ]
    steps = [name for name in trained if index.find(name, f"{_SCALAR}step") is not None][:1]
    step = read_whole(index, folder, steps, role=f"{_SCALAR}step")
    states = {number: {"step": step[name].float()} for number, name in enumerate(steps)}
    return {
        keys.ZERO_STAGE: (index.values["config"].get("zero_optimization") or {}).get("stage", 0),
        "overflow": False,
        keys.PARTITION_COUNT: 1,
        keys.DS_VERSION: STANDARD,
        keys.PARAM_GROUPS: groups,
        keys.OPTIMIZER_STATE_DICT: {"state": states, keys.PARAM_GROUPS: groups},
    }


def _save(value: Any, path: Path) -> None:
    torch.save(value, path)
