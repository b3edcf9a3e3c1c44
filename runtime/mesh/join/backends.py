"""Which library moves the ranks' tensors: NCCL on GPUs, or Gloo on the CPU. Text in, names out; makes no group.

[Note: backend config] torch names what a group has by type of device: `cpu:gloo,cuda:nccl`. A script that joins by
`init_process_group()` or by such a text has a group whose one name, `dist.get_backend()`, is `undefined` or the whole
text; its parts are what counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch

from dsrun.errors import InputError

from .hardware import has_gpu

Backend = Literal["nccl", "gloo"]


def choose_backend(asked: str | None) -> Backend:
    """Returns the backend asked for, else NCCL where there is a GPU, else Gloo.

    Raises:
        InputError: an unknown backend, NCCL on a machine without a usable GPU, or none asked for where an accelerator
            does not serve; see `hardware.has_gpu`.
    """
    if asked is None:
        return "nccl" if has_gpu() else "gloo"
    if asked not in ("nccl", "gloo"):
        raise InputError(f"backend is {asked!r}; expected nccl or gloo")
    if asked == "nccl" and torch.version.hip is not None:
        raise InputError(
            f"backend is nccl, and torch is built for ROCm {torch.version.hip}: dsrun trains on GPUs of NVIDIA alone",
            hint="use `--backend gloo` to train on the CPU",
        )
    if asked == "nccl" and not torch.cuda.is_available():
        raise InputError(
            "backend is nccl, but torch sees no CUDA device in this process",
            hint="use `--backend gloo` to train on the CPU, or check CUDA_VISIBLE_DEVICES and `dsrun probe`",
        )
    return "nccl" if asked == "nccl" else "gloo"


def backend_of(parts: Mapping[str, str], *, has_gpu: Callable[[], bool]) -> Backend:
    """Returns what training goes by in a group that the script has joined: NCCL where the group has it, and a GPU.

    Args:
        parts: backend of the group for each device type; see `compat.backends_of`.
        has_gpu: whether torch sees a GPU; asked only where it matters.

    Raises:
        InputError: the group is of neither GPUs of NVIDIA nor the CPU.
    """
    if not parts.keys() & {"cpu", "cuda"}:
        raise InputError(
            f"the script has joined its ranks by {_in_words(parts)}; dsrun trains on GPUs of NVIDIA, and on CPUs",
            hint='join by `dsrun.init_distributed("gloo")` to train on the CPU',
        )
    return "nccl" if parts.get("cuda") == "nccl" and has_gpu() else "gloo"


def serves(parts: Mapping[str, str], backend: Backend) -> bool:
    """Whether a group of these parts moves by `backend` what training gives it: GPU tensors by NCCL, others by Gloo."""
    return parts.get("cuda" if backend == "nccl" else "cpu") == backend


def idle_gpus_text(parts: Mapping[str, str], *, gpus: int) -> str:
    """Returns the warning to a script that joined by Gloo alone where there are GPUs, and never said that it meant it.

    Args:
        parts: backend of the script's group for each device type.
        gpus: number of GPUs that torch sees.
    """
    idle = "GPUs are idle" if gpus > 1 else "GPU is idle"
    return (
        f"the script has joined its ranks by Gloo alone ({_in_words(parts)}): they train on the CPU, and {gpus} "
        f"visible {idle}; join by `init_process_group()` or `dsrun.init_distributed()`, or "
        "start with `--backend nccl`; `--backend gloo` says that the CPU is meant"
    )


def _in_words(parts: Mapping[str, str]) -> str:
    return ",".join(f"{device}:{backend}" for device, backend in parts.items())


def order_warning(environ: Mapping[str, str]) -> str | None:
    """Returns the warning of a variable by which two communicators may wait for each other for ever; None without one.

    See [Note: two communicators] in c10d.
    """
    found = [
        f"{name}=1"
        for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_LAUNCH_ORDER_IMPLICIT")
        if environ.get(name) == "1"
    ]
    if not found:
        return None
    return (
        f"{' and '.join(found)} in the environment: gathers and reductions then run in the order in which each rank "
        "calls them, and ranks that use different blocks of the model hang; unset it, unless all ranks use all of it"
    )
