"""Joining the job's process group, at the place that the environment says; DeepSpeed's words for it are taken too.

Nothing is built here. Groups are made in `mesh/join/groups.py`.
"""

from __future__ import annotations

import os
from datetime import timedelta

from dsrun.contract.environment import BACKEND_ENV, RankInfo, group_timeout_s, stands_for_deepspeed, store_nonce
from dsrun.errors import InputError

from ...mesh.join.backends import choose_backend
from ...mesh.join.gpus import choose_device
from ...mesh.join.groups import has_joined, join, keep, present_backend
from .arguments import check_joined, check_place

#: DeepSpeed's variable: minutes that a process group waits, where the script names no time.
DEEPSPEED_TIMEOUT_ENV = "DEEPSPEED_TIMEOUT"


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int | None = None,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: object = None,
    rank: int = -1,
    world_size: int = -1,
    *,
    timeout_s: float | None = None,
) -> RankInfo:
    """Joins the job's process group, unless that has happened; every rank must call.

    The group is the script's from here on, whoever has joined it: no engine's end takes it away.

    Args:
        dist_backend: `nccl` or `gloo`; None: what `dsrun --backend` said, else NCCL where there is a GPU. Without
            effect where the script has joined.
        auto_mpi_discovery: DeepSpeed's argument, without effect: under mpirun and srun, ranks always find their place.
        distributed_port: DeepSpeed's argument, without effect: ranks meet at the address in the environment.
        verbose: DeepSpeed's argument, without effect.
        timeout: DeepSpeed's form of `timeout_s`.
        init_method: None or `env://`.
        dist_init_required: False: the script has joined already.
        config: DeepSpeed's argument, without effect.
        rank: -1, or what the environment says.
        world_size: -1, or what the environment says.
        timeout_s: seconds to wait for the other ranks, here and in each later collective. None: a third longer than
            `--hang-timeout` and at least 40 minutes, so that the launcher reports first who hangs; DEEPSPEED_TIMEOUT
            minutes where that is set and the script takes dsrun for DeepSpeed.

    Returns:
        this process's place in the job.

    Raises:
        InputError: the backend cannot be used here, the environment is incomplete, or an argument says otherwise.
        LaunchError: the other ranks cannot be reached.
    """
    del auto_mpi_discovery, distributed_port, verbose, config
    check_place(RankInfo.from_env(), init_method=init_method, rank=rank, world_size=world_size)
    if timeout_s is None and timeout is not None:
        timeout_s = timeout.total_seconds()
    info = join_job(dist_backend, dist_init_required=dist_init_required, timeout_s=timeout_s)
    keep()
    return info


def join_job(
    dist_backend: str | None = None, *, dist_init_required: bool | None = None, timeout_s: float | None = None
) -> RankInfo:
    """Does so for an engine's sake: a group that is joined here ends with the last engine.

    Args:
        dist_backend: backend, `nccl` or `gloo`; None: the default; see `init_distributed`.
        dist_init_required: flag that is False where the script has joined the process group already; None or True: this
            call joins if needed. See `init_distributed`.
        timeout_s: seconds to wait for the other ranks, here and in each later collective; None: the default, see
            `init_distributed`.

    Returns:
        this process's place in the job.

    Raises:
        InputError: see `init_distributed`.
        LaunchError: the other ranks cannot be reached.
    """
    info = RankInfo.from_env()
    check_joined(dist_init_required)
    if timeout_s is None:
        timeout_s = _default_timeout_s()
    backend = present_backend() if has_joined() else choose_backend(dist_backend or os.environ.get(BACKEND_ENV))
    join(info, backend=backend, device=choose_device(backend, info), timeout_s=timeout_s, nonce=store_nonce())
    return info


def _default_timeout_s() -> float:
    """How long groups wait where the script does not say: DeepSpeed's variable counts for its scripts alone."""
    minutes = os.environ.get(DEEPSPEED_TIMEOUT_ENV) if stands_for_deepspeed() else None
    if not minutes:
        return group_timeout_s()
    if not minutes.strip().isdecimal() or int(minutes) == 0:
        raise InputError(
            f"environment: {DEEPSPEED_TIMEOUT_ENV} is {minutes!r}; expected a whole number of minutes, at least 1"
        )
    return int(minutes) * 60.0
