"""What numbers of GPUs mean where CUDA could count them in two ways.

[Note: numbers of GPUs] CUDA counts by speed unless CUDA_DEVICE_ORDER is PCI_BUS_ID, as NVML and dsrun always do. Among
equal GPUs both are the same. Ranks get PCI_BUS_ID where nobody has set the variable, so that a number means one GPU
in leases, bindings, labels and the script; where somebody wants FASTEST_FIRST, only names are sure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dsrun.errors import UsageError

from .environment import ORDER_ENV, VISIBLE_ENV
from .launch_plan import GpuPlace


def check_order(gpus: Sequence[GpuPlace], environ: Mapping[str, str], *, chosen: str | None) -> None:
    """Refuses numbers of GPUs that CUDA would count by a speed that dsrun does not know.

    Args:
        gpus: those of this machine.
        environ: environment of the ranks.
        chosen: source of a choice of GPUs by number, for the message; None for no such choice. It counts only where
            CUDA_VISIBLE_DEVICES is not set: with names there the numbers are sure.

    Raises:
        UsageError: these are numbers of unequal GPUs, and CUDA_DEVICE_ORDER is FASTEST_FIRST.
    """
    value = environ.get(VISIBLE_ENV)
    numbers = f"{VISIBLE_ENV}={value}" if _has_numbers(environ) else chosen if value is None else None
    if environ.get(ORDER_ENV) == "FASTEST_FIRST" and _models(gpus) and numbers is not None:
        raise UsageError(
            f"`{ORDER_ENV}=FASTEST_FIRST` leaves it to CUDA which GPU a number means, and {numbers} counts "
            f"{_models(gpus)}",
            hint=f"`unset {ORDER_ENV}` counts by PCI address; or name GPUs in {VISIBLE_ENV} as `nvidia-smi -L` does",
        )


def order_warnings(gpus: Sequence[GpuPlace], environ: Mapping[str, str]) -> tuple[str, ...]:
    """Says how numbers of unequal GPUs are counted, where nobody has said it.

    Args:
        gpus: those of this machine.
        environ: environment of the ranks.
    """
    if ORDER_ENV in environ or not _has_numbers(environ) or not _models(gpus):
        return ()
    return (
        f"warning: {VISIBLE_ENV}={environ[VISIBLE_ENV]} counts by PCI address here, {_models(gpus)}; "
        f"`{ORDER_ENV}=PCI_BUS_ID` says that this is meant",
    )


def _has_numbers(environ: Mapping[str, str]) -> bool:
    return any(entry.strip().isdecimal() for entry in environ.get(VISIBLE_ENV, "").split(","))


def _models(gpus: Sequence[GpuPlace]) -> str | None:
    """Names GPUs that are unequal, by number; None where all are alike."""
    if len({gpu.model for gpu in gpus}) < 2:
        return None
    return ", ".join(f"{number}: {gpu.model or 'unknown'}" for number, gpu in enumerate(gpus))
