"""`deepspeed.utils.zero_to_fp32`: whole weights out of a checkpoint, of dsrun's or of DeepSpeed's own.

How they are found and written: `checkpoint/convert/fp32_weights.py`. What is here has DeepSpeed's names and arguments.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from dsrun.checkpoint_files.folder.find import find_tag
from dsrun.checkpoint_files.folder.removal import held
from dsrun.checkpoint_files.parse import read_index
from dsrun.checkpoint_files.storage.places import Place
from dsrun.checkpoint_files.storage.registry import place_of
from dsrun.checkpoint_files.storage.tags import is_complete, tag_to_load
from dsrun.errors import InputError
from dsrun.units import format_list, parse_bytes

from .fp32_weights import StoredWeight, stored_weights, write_weights
from .to_universal import model_states, optimizer_state, trained_names

__all__ = [
    "OUTPUT_DTYPE_NAMES",
    "atoi",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "convert_zero_checkpoint_to_state_dict",
    "get_checkpoint_files",
    "get_fp32_state_dict_from_zero_checkpoint",
    "get_model_state_file",
    "get_model_state_files",
    "get_optim_files",
    "load_state_dict_from_zero_checkpoint",
    "natural_keys",
    "to_torch_tensor",
]

PathText = str | os.PathLike[str]

#: Dtypes that weights are written in.
OUTPUT_DTYPE_NAMES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "bf16": torch.bfloat16,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "float32": torch.float32,
        "fp16": torch.float16,
        "fp32": torch.float32,
    }
)


@overload
def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: PathText,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: Literal[False] = False,
) -> dict[str, Tensor]: ...
@overload
def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: PathText,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    *,
    lazy_mode: Literal[True],
) -> dict[str, StoredWeight]: ...
def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: PathText,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor] | dict[str, StoredWeight]:
    """Returns a checkpoint's weights by name, tied ones under each of their names; floating point in fp32.

    Args:
        checkpoint_dir: folder with `latest`, or that of one checkpoint.
        tag: name of the checkpoint in it; None for the latest.
        exclude_frozen_parameters: whether parameters that are not trained are left out.
        lazy_mode: whether values are objects with `shape` and `dtype` whose `contiguous()` reads them, and not tensors.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    target = _target(checkpoint_dir, tag)
    with held(target):
        weights = stored_weights(target, frozen=not exclude_frozen_parameters)
        if lazy_mode:
            return weights.named | {alias: weights.named[name] for alias, name in weights.aliases.items()}
        # What is mapped from DeepSpeed's files is copied, so that these can go.
        found = {name: values.clone() for name, values in weights.in_turn()}
        return found | {alias: found[name] for alias, name in weights.aliases.items()}


def to_torch_tensor(
    state_dict: Mapping[str, StoredWeight | Tensor],
    return_empty_tensor: bool = False,
    dtype: str | torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Returns what a lazy state dict stands for; names of one weight have one tensor.

    Args:
        state_dict: state dict of the lazy mode.
        return_empty_tensor: whether tensors are only allocated, and not read.
        dtype: dtype of what has floating point; None: as it is.

    Raises:
        InputError: the dtype is none of `OUTPUT_DTYPE_NAMES`.
    """
    wanted = None if dtype is None else _dtype(dtype)
    made: dict[int, Tensor] = {}
    for one in state_dict.values():
        if id(one) not in made:
            target = wanted if wanted is not None and one.dtype.is_floating_point else one.dtype
            made[id(one)] = torch.empty(one.shape, dtype=target) if return_empty_tensor else one.contiguous().to(target)
    return {name: made[id(one)] for name, one in state_dict.items()}


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: PathText,
    output_dir: PathText,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Writes a checkpoint's weights in fp32, see `convert_zero_checkpoint_to_state_dict`.

    Args:
        checkpoint_dir: folder with `latest`, or that of one checkpoint.
        output_dir: folder for the files.
        max_shard_size: most bytes of one file, such as `500MB`; None: one file.
        safe_serialization: whether safetensors files are written, and not torch's.
        tag: name of the checkpoint; None for the latest.
        exclude_frozen_parameters: whether parameters that are not trained are left out.
    """
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir,
        output_dir,
        max_shard_size=max_shard_size,
        safe_serialization=safe_serialization,
        tag=tag,
        exclude_frozen_parameters=exclude_frozen_parameters,
    )


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: PathText,
    output_dir: PathText,
    dtype: str | torch.dtype = torch.float32,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Writes a checkpoint's weights as files that others load, in place of such files that are there.

    Args:
        checkpoint_dir: folder with `latest`, or that of one checkpoint.
        output_dir: folder for the files.
        dtype: dtype of what has floating point, or its name.
        max_shard_size: most bytes of one file, such as `500MB`; None: one file.
        safe_serialization: whether safetensors files are written, and not torch's.
        tag: name of the checkpoint; None for the latest.
        exclude_frozen_parameters: whether parameters that are not trained are left out.

    Raises:
        InputError: the dtype or the size is none.
        CheckpointError: there is no checkpoint, or it is damaged.
        OSError: the file system refuses.
    """
    write_weights(
        _target(checkpoint_dir, tag),
        Path(output_dir),
        shard_bytes=_size(max_shard_size),
        dtype=_dtype(dtype),
        as_safetensors=safe_serialization,
        frozen=not exclude_frozen_parameters,
        replaces=True,
    )


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: PathText, tag: str | None = None
) -> nn.Module:
    """Moves a plain model to the CPU, loads a checkpoint's weights into it in fp32, and returns it.

    What either has and the other has not is passed over, and said.

    Args:
        model: model without an engine.
        checkpoint_dir: folder with `latest`, or that of one checkpoint.
        tag: name of the checkpoint; None for the latest.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    weights = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    differing = model.load_state_dict(weights, strict=False)
    for names, text in ((differing.missing_keys, "does not have"), (differing.unexpected_keys, "has beyond the model")):
        if names:
            shown = format_list(names, 5)
            print(f"dsrun: load_state_dict_from_zero_checkpoint: the checkpoint {text}: {shown}", flush=True)
    return model


def get_checkpoint_files(checkpoint_dir: PathText, glob_pattern: str) -> list[str]:
    """Returns the files of a folder that have such names, in the order of the numbers in them.

    Args:
        checkpoint_dir: folder of one checkpoint.
        glob_pattern: pattern of the names.

    Raises:
        FileNotFoundError: there is none.
    """
    found = sorted(map(str, Path(checkpoint_dir).glob(glob_pattern)), key=natural_keys)
    if not found:
        raise FileNotFoundError(f"{checkpoint_dir}: there are no files {glob_pattern} in this folder")
    return found


def get_model_state_files(checkpoint_dir: PathText) -> list[str]:
    """Returns the files with counters, buffers, schedule and client state of one checkpoint.

    A checkpoint of dsrun's has none: one is made of it then, which lies elsewhere until this process ends. Weights that
    are trained are not in it.

    Args:
        checkpoint_dir: folder of one checkpoint.

    Raises:
        FileNotFoundError: there is no checkpoint.
    """
    folder = Path(checkpoint_dir)
    if _is_ours_alone(folder, "*_model_states.pt"):
        return [_made(folder, "mp_rank_00_model_states.pt")]
    return get_checkpoint_files(folder, "*_model_states.pt")


def get_model_state_file(checkpoint_dir: PathText, zero_stage: int) -> str:
    """Returns the file of model states that has what is common to all ranks, see `get_model_state_files`.

    Args:
        checkpoint_dir: folder of one checkpoint.
        zero_stage: ZeRO stage of the run.

    Raises:
        FileNotFoundError: there is no such file.
    """
    folder = Path(checkpoint_dir)
    name = "zero_pp_rank_0_mp_rank_00_model_states.pt" if zero_stage == 3 else "mp_rank_00_model_states.pt"
    if _is_ours_alone(folder, "*_model_states.pt"):
        return _made(folder, name)
    return get_checkpoint_files(folder, name)[0]


def get_optim_files(checkpoint_dir: PathText) -> list[str]:
    """Returns the files of the optimizer of one checkpoint.

    A checkpoint of dsrun's has none: one is made of it then, which has the ZeRO stage and the options of the groups. It
    has no tensors, so what DeepSpeed calls flat groups is missing in it.

    Args:
        checkpoint_dir: folder of one checkpoint.

    Raises:
        FileNotFoundError: there is no checkpoint.
    """
    folder = Path(checkpoint_dir)
    if _is_ours_alone(folder, "*_optim_states.pt"):
        return [_made(folder, "zero_pp_rank_0_mp_rank_00_optim_states.pt")]
    return get_checkpoint_files(folder, "*_optim_states.pt")


def natural_keys(text: str) -> list[str | int]:
    """Returns a key to sort by, as people do: the numbers in a text count as numbers.

    Args:
        text: text to sort.
    """
    return [atoi(part) for part in re.split(r"(\d+)", text)]


def atoi(text: str) -> str | int:
    """Returns the number that a text is, or the text.

    Args:
        text: digits, or something else.
    """
    return int(text) if text.isdigit() else text


def _target(checkpoint_dir: PathText, tag: str | None) -> Place:
    folder = place_of(os.fspath(checkpoint_dir))
    return find_tag(folder if tag is None else tag_to_load(folder, tag), of_deepspeed=True)


def _is_ours_alone(folder: Path, pattern: str) -> bool:
    return is_complete(folder) and next(folder.glob(pattern), None) is None


def _made(folder: Path, name: str) -> str:
    """Writes a file as DeepSpeed names it, in a folder that goes when this process ends."""
    with held(folder):
        index = read_index(folder)
        trained = trained_names(index)
        content: dict[str, Any]
        if name.endswith("_optim_states.pt"):
            content = {"optimizer_state_dict": optimizer_state(index, folder, trained)}
        else:
            content = model_states(index, folder, trained)
    place = tempfile.mkdtemp(prefix=f"dsrun-{folder.name}-")
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    torch.save(content, Path(place) / name)
    return os.path.join(place, name)


def _size(text: str | int | None) -> int | None:
    if text is None or isinstance(text, int):
        return text
    nbytes = parse_bytes(text)
    if nbytes is None:
        raise InputError(f"max_shard_size is {text!r}", hint="give a size like `5GB` or `500MiB`, or a number of bytes")
    return nbytes


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    found = OUTPUT_DTYPE_NAMES.get(dtype.lower().removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if found is None or found not in OUTPUT_DTYPE_NAMES.values():
        raise InputError(f"dtype is {dtype!r}", hint=f"give one of {', '.join(OUTPUT_DTYPE_NAMES)}")
    return found
