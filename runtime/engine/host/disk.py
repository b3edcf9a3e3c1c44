"""Optimizer states on a disk put together, as `offload_optimizer` and `aio` say: which files, how read and written."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn, optim

from dsrun.config.config import Config
from dsrun.direct_io.configured import io_settings
from dsrun.direct_io.counts import IoCounts, added_up
from dsrun.direct_io.extent_file import ExtentFile
from dsrun.direct_io.memory_folders import memory_file_system

from ...checkpoint.staging.sources import OnDrive, in_memory
from ...memory.arenas import Arenas
from ...memory.host_pool import Say
from ...observe.records import RecordWriter
from ...observe.wear import DiskWear
from ...offload.disk.states import DiskStates
from ...offload.params.on_disk import DiskShards
from ...optim.registry import factory_of, states_of_group
from ...optim.states.format import STATE_FORMATS
from ...protocols import FileStretch
from ..compose.optimizer import OptimizerLike

#: Where a script makes the optimizer by a function, which is not called before there are masters: room for Adam's.
_USUAL_STATES = 2


def states_on_disk(settings: Config, given: OptimizerLike | None, memory: Arenas, *, rank: int) -> DiskStates | None:
    """Returns where masters and optimizer states lie, if the config puts them on a disk.

    Args:
        settings: the config.
        given: the script's optimizer, or a function that makes it.
        memory: arenas that the buffers are reserved in which masters and states are read into.
        rank: rank of this process, for error messages.

    Raises:
        OffloadError: no file can be made in a path.
    """
    section = settings.zero_optimization.offload_optimizer
    if section.device != "nvme":
        return None
    assert section.nvme_path, "the config was checked"
    file = ExtentFile(section.nvme_path, io_settings(settings.aio), what=f"optimizer states of rank {rank}")
    return DiskStates(
        file,
        memory,
        states=foreseen_states(settings, given),
        frames=section.buffer_count,
        read_ahead=section.pipeline_read,
        write_behind=section.pipeline_write,
        writes_zeros=not section.fast_init,
        form=STATE_FORMATS[section.state_format],
    )


def tell_of_drives(settings: Config, say: Say) -> None:
    """Warns of folders for drives whose files are memory, and says where bytes that a drive has changed go unnoticed.

    Args:
        settings: the config.
        say: callback that prints a message once for the whole job, on rank 0.
    """
    zero, inputs = settings.zero_optimization, settings.activation_checkpointing.nvme_path
    asked = {
        f"zero_optimization.{name}.nvme_path": section.nvme_path if section.device == "nvme" else None
        for name, section in (("offload_optimizer", zero.offload_optimizer), ("offload_param", zero.offload_param))
    }
    used = {key: folders for key, folders in {**asked, "activation_checkpointing.nvme_path": inputs}.items() if folders}
    for key, folders in used.items():
        for folder in folders:
            kind = memory_file_system(folder)
            if kind is not None:
                say(f"dsrun: `{key}`: {folder} is {kind}, memory of this host and no drive: what goes there takes RAM")
    if used and not settings.aio.verify:
        say(
            f"dsrun: {', '.join(f'`{key}`' for key in used)}: what the drive gives back is not verified, so a flipped "
            "bit would train on; `aio.verify` true turns that on"
        )


def file_of_parameters(settings: Config, *, rank: int) -> ExtentFile:
    """Returns a new file for slices of parameters.

    Raises:
        OffloadError: no file can be made in a path.
    """
    section = settings.zero_optimization.offload_param
    assert section.nvme_path, "the config was checked"
    return ExtentFile(section.nvme_path, io_settings(settings.aio), what=f"parameters of rank {rank}")


def finder_of(states: DiskStates | None, slices: DiskShards | None) -> OnDrive:
    """Returns what finds tensors of a checkpoint on a drive.

    Args:
        states: masters and optimizer states on a disk.
        slices: slices of parameters there.
    """
    files = [*([] if states is None else states.addresses()), *([] if slices is None else slices.addresses())]
    if not files:
        return in_memory

    def find(values: Tensor) -> Sequence[FileStretch] | None:
        return next((found for file in files if (found := file.find(values)) is not None), None)

    return find


def counts_of_drives(states: DiskStates | None, slices: DiskShards | None) -> IoCounts:
    """Returns what has been read from drives and written there.

    Args:
        states: masters and optimizer states on a disk.
        slices: slices of parameters there.
    """
    return added_up([*([] if states is None else [states.counts()]), *([] if slices is None else slices.counts())])


def bytes_on_drives(states: DiskStates | None, slices: DiskShards | None) -> int:
    """Returns the bytes of this rank's files on drives.

    Args:
        states: masters and optimizer states on a disk.
        slices: slices of parameters there.
    """
    return (0 if states is None else states.file_bytes) + (0 if slices is None else slices.file_bytes)


def wear_of(
    states: DiskStates | None, slices: DiskShards | None, settings: Config, records: RecordWriter, *, rank: int
) -> DiskWear | None:
    """Returns what tells of the bytes that go to disks; None where none do.

    Args:
        states: masters and optimizer states on a disk.
        slices: slices of parameters there.
        settings: config with the paths on the drives.
        records: writer of the records that report the bytes.
        rank: rank of this process.
    """
    if states is None and slices is None:
        return None
    zero = settings.zero_optimization
    of_states = zero.offload_optimizer.nvme_path if states is not None else None
    of_slices = zero.offload_param.nvme_path if slices is not None else None
    paths = dict.fromkeys([*(of_states or ()), *(of_slices or ())])
    return DiskWear(partial(counts_of_drives, states, slices), list(paths), records, rank=rank)


def foreseen_states(settings: Config, given: OptimizerLike | None) -> int:
    """Returns how many states an optimizer that is yet to be made will keep for each element.

    Args:
        settings: the config, for its `optimizer` section.
        given: the script's, which goes before.
    """
    optimizer = given
    if optimizer is None and settings.optimizer is not None:
        section = settings.optimizer
        leaf = nn.Parameter(torch.zeros(1))
        optimizer = factory_of(section.type, section.params.model_dump())([{"params": [leaf]}])
    if not isinstance(optimizer, optim.Optimizer):
        return _USUAL_STATES
    return max((states_of_group(optimizer, group) for group in optimizer.param_groups), default=0)
