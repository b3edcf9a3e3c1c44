"""DeepSpeed's checkpoints of data-parallel runs: stages 0 to 3, and universal ones. Writes nothing.

[Note: DeepSpeed's files]
`*model_states.pt` has counters, the config, buffers, frozen parameters and, at stages 0 to 2, weights in the dtype of
the forward; `*optim_states.pt`, one a rank, has fp32 masters and optimizer states as flat partitions; a universal
checkpoint has `zero/<name>/fp32.pt`, `exp_avg.pt`, ... instead.
Source: DeepSpeed 0.19, deepspeed/utils/zero_to_fp32.py and deepspeed/checkpoint/ds_to_universal.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsrun.checkpoint_files.storage.deepspeed_tags import MODEL_STATES
from dsrun.config.sections.optimizer_table import imported_class
from dsrun.errors import CheckpointError

from ..format import client_state as script_state
from ..format.json_values import to_json
from .flat_partitions import gather
from .foreign import ForeignCheckpoint, FoundTensor, held, json_or_none
from .pickles import Inert, read_torch_file
from .stage0 import add_plain_states
from .universal import add_universal
from .zero_stages import add_zero

Read = Callable[[Path], Any]
_RANK = re.compile(r"_pp_rank_(\d+)_")
#: What DeepSpeed puts beside what the script saves.
_OWN_KEYS = frozenset(
    {
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "frozen_param_fragments",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "sparse_tensor_module_names",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "checkpoint_parallel_dimensions",
        "ds_config",
        "ds_version",
        "universal_checkpoint_info",
        "autoep_layers",
        "ds_autoep_layers",
        "num_experts",
        "compression_scheduler",
    }
)


def read_deepspeed(folder: Path, *, ignored: Collection[str] | None) -> ForeignCheckpoint:
    """Returns what a tag of DeepSpeed's holds.

    Args:
        folder: the tag's.
        ignored: names in the checkpoint's pickles that are read as inert placeholders instead of being refused; None:
            all that are not known, for whoever wants no client state.

    Raises:
        CheckpointError: it is of another kind of run, damaged, or names what is not known.
    """
    _check_kind(folder)
    read = partial(read_torch_file, ignored=ignored)
    models = [_object(read(path), path) for path in _by_rank(folder, MODEL_STATES)]
    optims = [_object(read(path), path) for path in _by_rank(folder, "*optim_states.pt")]
    try:
        return _found(folder, models, optims, read)
    except CheckpointError:
        raise
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{folder}: it is not as DeepSpeed 0.19 saves it: {type(error).__name__}: {error}",
            hint="convert it with DeepSpeed's `ds_to_universal` first, and import that",
        ) from error


def _found(folder: Path, models: list[dict[str, Any]], optims: list[dict[str, Any]], read: Read) -> ForeignCheckpoint:
    first = models[0]
    found = ForeignCheckpoint([], f"DeepSpeed {first.get('ds_version')}, {folder}")
    _take_values(found, first)
    trained = {name: tuple(s) for group in first["param_shapes"] or () for name, s in group.items()}
    _take_module(found, models, trained)
    found.frozen = any(one.role == "param" for one in found.tensors)
    if (folder / "zero").is_dir():
        add_universal(found, folder / "zero", trained, read)
    elif optims:
        world = len(optims)
        if world != int(first["dp_world_size"]):
            raise CheckpointError(f"{folder}: {world} optimizer files are there, of {first['dp_world_size']} ranks")
        add_zero(found, [one["optimizer_state_dict"] for one in optims], first["param_shapes"])
    else:
        add_plain_states(found, first.get("optimizer"))
    if found.optimizer is None:
        found.optimizer = _class_of(found)
    loss_scaler = (optims[0]["optimizer_state_dict"] if optims else {}).get("loss_scaler")
    if isinstance(loss_scaler, Inert) and loss_scaler.value("dynamic"):
        found.loss_scale = {
            "scale": float(loss_scaler.value("cur_scale")),
            "hysteresis": int(loss_scaler.value("cur_hysteresis")),
            "steps": int(loss_scaler.value("cur_iter")),
            "last_overflow": int(loss_scaler.value("last_overflow_iter")),
        }
    return found


def _check_kind(folder: Path) -> None:
    """Refuses what holds parts of a model that this does not put together."""
    for pattern, what in (
        ("layer_*model_states.pt", "pipeline parallelism"),
        ("*expert_*model_states.pt", "expert parallelism"),
        ("*mp_rank_01_*", "tensor parallelism"),
    ):
        strange = next(folder.glob(pattern), None)
        if strange is not None:
            raise CheckpointError(
                f"{strange}: it is of a run with {what}, which is not imported",
                hint="import a checkpoint of a data-parallel run, at any ZeRO stage",
            )


def _by_rank(folder: Path, pattern: str) -> list[Path]:
    def rank(path: Path) -> tuple[int, str]:
        match = _RANK.search(path.name)
        return (-1 if match is None else int(match[1]), path.name)

    return sorted(folder.glob(pattern), key=rank)


def _object(value: Any, path: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: it holds a {type(value).__name__}; expected a dict, as DeepSpeed saves it")
    return value


def _take_values(found: ForeignCheckpoint, state: Mapping[str, Any]) -> None:
    """Takes counters, config, schedule and what the script saved."""
    found.config = json_or_none(state.get("ds_config") or {})[1] or {}
    steps = int(state["global_steps"])
    found.counters = {
        "global_steps": steps,
        "global_samples": int(state.get("global_samples") or 0),
        "skipped_steps": int(state.get("skipped_steps") or 0),
        "micro_steps": steps * _accumulation(found.config, int(state["dp_world_size"])),
    }
    is_json, schedule = json_or_none(to_json(state.get("lr_scheduler")))
    if schedule is not None and is_json:
        found.scheduler = {"type": (found.config.get("scheduler") or {}).get("type"), "state": schedule}
    elif not is_json:
        found.left.append("the schedule: its state has more than numbers and text")
    for key, value in state.items():
        if key not in _OWN_KEYS:
            try:
                taken, entries = script_state.take_apart({key: value}, stores=True)
            except CheckpointError as error:
                found.left.append(str(error))
                continue
            found.client_state |= taken
            found.tensors += [held(one.name, one.role, one.tensor.view(one.shape)) for one in entries]


def _accumulation(config: Mapping[str, Any], ranks: int) -> int:
    steps = config.get("gradient_accumulation_steps")
    if isinstance(steps, int):
        return steps
    whole, micro = config.get("train_batch_size"), config.get("train_micro_batch_size_per_gpu")
    return whole // (micro * ranks) if isinstance(whole, int) and isinstance(micro, int) else 1


def _take_module(found: ForeignCheckpoint, models: list[dict[str, Any]], trained: Mapping[str, Any]) -> None:
    """Takes buffers, tied names and frozen parameters; at stage 0 every parameter."""
    first = models[0]
    buffers, frozen = set(first["buffer_names"]), first.get("frozen_param_shapes") or {}
    found.aliases = {str(alias): str(name) for alias, name in (first.get("shared_params") or {}).items()}
    seen: dict[tuple[int, int, tuple[int, ...]], str] = {}
    for name, tensor in first["module"].items():
        if name in buffers:
            found.tensors.append(held(name, "buffer", tensor))
        elif name in frozen:
            found.tensors.append(_frozen(name, frozen[name], [one["frozen_param_fragments"][name] for one in models]))
        elif name not in trained and name not in found.aliases:
            # Parameters that share memory are one, under their first name.
            place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape))
            if tensor.numel() == 0 and len(tensor.shape) == 1 and len(models) > 1:
                found.left.append(f"`{name}`: tied to another parameter, the files do not say to which")
            elif tensor.numel() and place in seen:
                found.aliases[name] = seen[place]
            else:
                seen[place] = name
                found.tensors.append(held(name, "param", tensor))


def _frozen(name: str, shape: Any, fragments: list[Tensor]) -> FoundTensor:
    whole = torch.Size(shape)
    if fragments[0].numel() == whole.numel():
        return held(name, "param", fragments[0].view(whole))
    return FoundTensor(
        name, "param", tuple(whole), fragments[0].dtype, lambda: gather(fragments, 0, whole.numel()).view(whole)
    )


def _class_of(found: ForeignCheckpoint) -> str | None:
    """Returns which class of optimizer dsrun has for it."""
    section = found.config.get("optimizer") or {}
    kind = str(section.get("type", "")).lower()
    known = imported_class(kind)
    if known == "AdamW" and kind != "adamw" and (section.get("params") or {}).get("adam_w_mode") is False:
        return "Adam"
    if known is not None:
        return known
    if found.groups and "exp_avg_sq" in {one.role for one in found.tensors}:
        return "AdamW" if found.groups[0].get("decoupled_weight_decay", True) else "Adam"
    return None
