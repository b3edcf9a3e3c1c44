"""Whether a rank has a GPU to train on, and that no accelerator is passed over for the CPU unasked. Makes no context.

torch says "no GPU" of a machine without one, of a driver that fails, and of a build for another maker's devices alike.
What the kernel shows tells them apart, see [Note: given] of dsrun.host.gpu_presence. A CPU build of torch is a choice
of who installed it; the launcher tells of GPUs that stay idle by it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dsrun.errors import InputError
from dsrun.host.gpu_presence import hides_all_gpus, nvidia_presence

_GLOO = '`--backend gloo`, or `init_distributed("gloo")`, trains on the CPU'
#: Types of torch's devices, and whose they are.
_MAKERS = {"xpu": "an Intel GPU", "mps": "Apple's GPU", "hpu": "Intel's Gaudi", "npu": "Huawei's Ascend"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchDevices:
    """What torch sees.

    Attributes:
        cuda: CUDA version that it was built for; None for another build.
        hip: ROCm version that torch was built for; None for another build.
        is_available: `torch.cuda` has a device, which in a build for ROCm is AMD's.
        other: type of a device beside `torch.cuda`'s: `xpu`, `mps`; None without any.
    """

    cuda: str | None
    hip: str | None
    is_available: bool
    other: str | None


def torch_devices() -> TorchDevices:
    """Asks torch, which warns itself of a driver that fails: the error says it here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        is_available = torch.cuda.is_available()
    return TorchDevices(
        cuda=torch.version.cuda, hip=torch.version.hip, is_available=is_available, other=_other_accelerator()
    )


def has_gpu(
    seen: TorchDevices | None = None,
    *,
    is_given: Callable[[], bool] | None = None,
    reason: Callable[[], str] | None = None,
) -> bool:
    """Returns whether this rank trains on a GPU where nobody said on what.

    Args:
        seen: devices that torch sees; None: torch is asked.
        is_given: whether the kernel shows a GPU of NVIDIA that this process may use; looked for if None.
        reason: function that returns torch's explanation why it has no GPU; None: torch is asked.

    Raises:
        InputError: there is an accelerator, and it does not serve: of another maker, or its driver fails.
    """
    seen = seen or torch_devices()
    if seen.is_available and seen.hip is None:
        return True
    if seen.is_available:
        raise InputError(
            f"torch is built for ROCm {seen.hip} and sees an AMD GPU; dsrun trains on GPUs of NVIDIA, and on CPUs",
            hint=_GLOO,
        )
    if seen.cuda is not None and (is_given or _is_given)():
        raise InputError(
            f"this process was given a GPU, and torch cannot use it: {(reason or _reason)()}{_choice()}",
            hint=f"`dsrun doctor` looks for the cause; {_GLOO}",
        )
    if seen.other is not None:
        maker = _MAKERS.get(seen.other, f"a device of type {seen.other}")
        raise InputError(f"torch sees {maker}; dsrun trains on GPUs of NVIDIA, and on CPUs", hint=_GLOO)
    return False


def _is_given() -> bool:
    return not hides_all_gpus(os.environ) and nvidia_presence().is_given


def _choice() -> str:
    """Returns what the environment says of GPUs, which may name none of those that are there."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if value is None else f" (CUDA_VISIBLE_DEVICES is `{value[:200]}`)"


def _reason() -> str:
    """Returns what torch says of a CUDA that does not start: it tells only who insists."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            return str(error).strip().partition("\n")[0].partition(". Please")[0].rstrip(".")
    return "it sees no device"


def _other_accelerator() -> str | None:
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None or device.type == "cuda" else device.type
