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
from dsrun.mesh_spec import MeshSpec, Role

#: What an `mpu` is asked, and what the ranks that it counts have in common.
_MPU_SIZES: tuple[tuple[str, Role], ...] = (
    ("get_model_parallel_world_size", "tensor"),
    ("get_tensor_model_parallel_world_size", "tensor"),
    ("get_pipeline_model_parallel_world_size", "pipe"),
    ("get_pipe_parallel_world_size", "pipe"),
    ("get_sequence_parallel_world_size", "context"),
    ("get_data_parallel_world_size", "batch"),
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


def check_parallelism(mpu: object, mesh_param: Sequence[int] | None, spec: MeshSpec, *, rank: int) -> None:
    """Refuses ranks that are divided otherwise than the config divides them, as a script's groups or mesh say it.

    Args:
        mpu: Megatron's object of groups, or None.
        mesh_param: (data-parallel size, sequence-parallel size), or None.
        spec: the ranks as the config divides them.
        rank: this rank.

    Raises:
        InputError: naming what is another size, or another place of this rank.
    """
    for name, role in _MPU_SIZES:
        ask, size = getattr(mpu, name, None), spec.role_size(role)
        # A pipeline's grid counts its stages among the ranks that have a model together.
        sizes = {size, size * spec.stages} if name == "get_model_parallel_world_size" else {size}
        if ask is not None and int(ask()) not in sizes:
            raise InputError(
                f"dsrun.initialize: mpu.{name}() is {int(ask())}; the config divides the {spec.world_size} ranks "
                f"so that it is {size}",
                hint="leave mpu out, and give the axes their sizes in the config: `tensor_parallel.autotp_size`, "
                "`pipeline.stages`",
            )
    ask, place = getattr(mpu, "get_data_parallel_rank", None), spec.peers(rank, spec.role_axes("batch")).index(rank)
    if ask is not None and int(ask()) != place:
        raise InputError(
            f"dsrun.initialize: mpu.get_data_parallel_rank() is {int(ask())} on rank {rank}, which reads the samples "
            f"of data rank {place}",
            hint="leave mpu out: ranks that share a layer are neighbours, and a stage's ranks are too",
        )
    expected = spec.role_size("batch"), spec.role_size("context")
    if mesh_param is not None and tuple(mesh_param) not in (expected, expected[:1]):
        raise InputError(
            f"dsrun.initialize: mesh_param is {tuple(mesh_param)}; expected {expected}, as the config divides ranks",
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
