"""DeepSpeed's arguments of scripts and of `initialize`: added to a parser, checked against the job's environment, and
which of them is the config.

Nothing is joined, built or loaded here.
"""

from __future__ import annotations

import argparse
import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from dsrun.config.text.source import ConfigSource
from dsrun.contract.environment import CONFIG_ENV, RankInfo, stands_for_deepspeed
from dsrun.errors import ConfigError, InputError

#: What an `mpu` is asked; parallelism of these kinds has size 1 here.
_MPU_SIZES = (
    "get_model_parallel_world_size",
    "get_tensor_model_parallel_world_size",
    "get_pipeline_model_parallel_world_size",
    "get_pipe_parallel_world_size",
    "get_sequence_parallel_world_size",
)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds `--deepspeed` and `--deepspeed_config` to a script's parser and returns it.

    `dsrun.initialize(args=...)` reads `args.deepspeed_config`. A script of dsrun's gets `--local_rank` too, unless it
    has one; those of DeepSpeed bring it themselves, before or after this call.
    """
    group = parser.add_argument_group("dsrun", "training engine")
    group.add_argument("--deepspeed", action="store_true", help="accepted for scripts written for DeepSpeed; no effect")
    group.add_argument("--deepspeed_config", default=None, metavar="PATH", help="training config")
    if not stands_for_deepspeed():
        with suppress(argparse.ArgumentError):  # the script has it
            group.add_argument(
                "--local_rank", type=int, default=-1, help="accepted; the environment's LOCAL_RANK decides"
            )
    return parser


def config_source(
    args: Namespace | Mapping[str, Any] | None,
    config: ConfigSource | None,
    config_params: ConfigSource | None,
) -> ConfigSource:
    """Returns the one config that was given, in the script, in its arguments or to the launcher.

    Args:
        args: the script's, of which `deepspeed_config` is read.
        config: path, dict or text.
        config_params: DeepSpeed's older name of it.

    Raises:
        ConfigError: there is none, or there are two that differ.
    """
    words = args if isinstance(args, Mapping) else vars(args) if args is not None else {}
    given = [source for source in (config, config_params, words.get("deepspeed_config")) if source is not None]
    if len(given) > 1 and any(source != given[0] for source in given[1:]):
        raise ConfigError(
            f"dsrun.initialize: {len(given)} different configs were given: {', '.join(str(s)[:80] for s in given)}",
            hint="give one: config=, config_params= or args.deepspeed_config",
        )
    source = given[0] if given else os.environ.get(CONFIG_ENV)
    if source is None:
        raise ConfigError(
            "dsrun.initialize: no config was given",
            hint="pass config=, or start the script with `dsrun SCRIPT --config FILE`",
        )
    return source


def check_parallelism(mpu: object, mesh_param: Sequence[int] | None, *, world_size: int) -> None:
    """Refuses parallelism other than that of data, as a script's own groups or mesh ask for it.

    Args:
        mpu: Megatron's object of groups, or None.
        mesh_param: (data-parallel size, sequence-parallel size), or None.
        world_size: ranks of the job.

    Raises:
        InputError: naming the size that is not that of a data-parallel job.
    """
    for name in _MPU_SIZES:
        ask = getattr(mpu, name, None)
        if ask is not None and int(ask()) != 1:
            raise InputError(
                f"dsrun.initialize: mpu.{name}() is {int(ask())}; only data parallelism is supported",
                hint="leave mpu out, or make its groups of one rank",
            )
    data = getattr(mpu, "get_data_parallel_world_size", None)
    if data is not None and int(data()) != world_size:
        raise InputError(
            f"dsrun.initialize: mpu.get_data_parallel_world_size() is {int(data())}; the job has {world_size} ranks",
            hint="leave mpu out: every rank is a data-parallel one",
        )
    if mesh_param is not None and tuple(mesh_param) not in ((world_size, 1), (world_size,)):
        raise InputError(
            f"dsrun.initialize: mesh_param is {tuple(mesh_param)}; expected ({world_size}, 1), for only data "
            "parallelism is supported",
            hint="leave mesh_param out",
        )


def check_joined(dist_init_required: bool | None) -> None:
    """Refuses a script that says it has joined its process group, and has not.

    Args:
        dist_init_required: False: the script has joined; None or True: whoever has not joins.

    Raises:
        InputError: there is no process group.
    """
    if dist_init_required is False and not dist.is_initialized():
        raise InputError(
            "dist_init_required is False, and this process is in no process group",
            hint="leave it out, or call torch.distributed.init_process_group first",
        )


def check_place(info: RankInfo, *, init_method: str | None, rank: int, world_size: int) -> None:
    """Refuses a place in the job that is another than the environment's.

    Args:
        info: the place that the environment says.
        init_method: the script's `init_method` for torch's `init_process_group`; None or `env://`.
        rank: the script's rank; -1 where it names none.
        world_size: the script's world size; -1 where it names none.

    Raises:
        InputError: naming what differs.
    """
    if init_method not in (None, "env://"):
        raise InputError(
            f"init_distributed: init_method is {init_method!r}; ranks meet where the environment says",
            hint="leave it out, and set MASTER_ADDR and MASTER_PORT, as dsrun and torchrun do",
        )
    for name, said, is_so in (("rank", rank, info.rank), ("world_size", world_size, info.world_size)):
        if said not in (-1, is_so):
            raise InputError(
                f"init_distributed: {name} is {said}; the environment says {is_so}",
                hint="leave it out; dsrun, torchrun, Slurm and mpirun set it for each process",
            )
