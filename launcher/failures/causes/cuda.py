"""What CUDA, its libraries and NVIDIA's driver say when a rank fails, and what it means. Data.

Words of CUDA 12 and 13 and of torch 2.10 to 2.15; an error's own sentence is the same since CUDA 11.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from .rules import Cause, Rule

_OUT_OF_MEMORY = Cause(
    "CUDA out of memory",
    "lower the micro batch, recompute activations, raise the ZeRO stage or offload: see `dsrun plan`",
)
_LIBRARY_WITHOUT_MEMORY = Cause(
    "a CUDA library could not start on the GPU",
    "nearly always no GPU memory is left for it: lower the micro batch, or see `nvidia-smi` for other processes on it",
)
_BLOCKING = "CUDA_LAUNCH_BLOCKING=1 shows the kernel that does it"
_MEMORY_FAULT = Cause(
    "GPU memory error (ECC)", "hardware: `nvidia-smi -q -d ECC,ROW_REMAPPER`, then reset or drain this GPU"
)
_OFF_THE_BUS = Cause(
    "GPU fault: it fell off the bus",
    "hardware: the GPU needs a reset or the host a reboot; if it happens again, power, cooling or the card",
)
_NVLINK = Cause(
    "GPU fault: NVLink error",
    "hardware: `nvidia-smi nvlink -e` counts each link's errors; reset the GPUs or drain this host",
)
_FABRIC = Cause(
    "the GPUs' fabric is not ready (CUDA error 802)",
    "the fabric manager does not run, or is of another version than the driver: `systemctl status "
    "nvidia-fabricmanager`, and `nvidia-smi -q` must say `State: Completed` under Fabric",
)
_DRIVER_CHANGED = Cause(
    "the GPU driver's parts do not fit together",
    "the driver was updated, and the kernel runs the old one: reboot this host, or reload its modules; in a container "
    "its own libcuda may hide the host's",
)
_NO_GPU = Cause(
    "this rank sees no GPU",
    "see CUDA_VISIBLE_DEVICES and `dsrun probe`; a container needs `--gpus all`, a Slurm step needs `--gres`; a script "
    "for machines without GPUs too asks `torch.cuda.is_available()` first",
)
_MPS = Cause(
    "CUDA's multi-process service (MPS) failed",
    "restart it: `echo quit | nvidia-cuda-mps-control`, then `nvidia-cuda-mps-control -d`; one client's fault ends all",
)

#: What the driver's error numbers mean that end a rank. Source: docs.nvidia.com/deploy/xid-errors.
_XIDS: Mapping[int, Cause] = {
    **dict.fromkeys((48, 63, 64, 92, 94, 95, 140, 171, 172), _MEMORY_FAULT),
    **dict.fromkeys((74, *range(144, 151)), _NVLINK),
    79: _OFF_THE_BUS,
    31: Cause("illegal memory access on the GPU", _BLOCKING),
    13: Cause("a kernel on the GPU crashed", _BLOCKING),
    **dict.fromkeys(
        (119, 120),
        Cause(
            "GPU fault: its own processor (GSP) does not answer",
            "reset the GPU or reboot the host; a newer driver often mends it",
        ),
    ),
}


def _of_xid(found: re.Match[str]) -> Cause:
    number = int(found["xid"])
    other = Cause("GPU fault", f"Xid {number}: see docs.nvidia.com/deploy/xid-errors, and `dmesg` for what came before")
    known = _XIDS.get(number, other)
    return Cause(f"{known.words} (Xid {number} of {found['address']})", known.hint)


#: What the driver says of a GPU.
HARDWARE: tuple[Rule, ...] = (
    # The number stands behind the address, which may hold any number, and behind a slice's; 43 and 45 are what other
    # errors lead to, and 154 says also that all is well again.
    (
        r"\bXid \(PCI:(?P<address>[0-9A-Fa-f:.]+)[^)\n]*\): (?!154\b[^\n]*\(None\)$)(?P<xid>(?!4[35]\b)\d+)",
        _of_xid,
    ),
    (
        r"SXid \(PCI:(?P<address>[0-9A-Fa-f:.]+)\): (?P<sxid>\d+), Fatal",
        lambda found: Cause(
            f"NVSwitch fault (SXid {found['sxid']} of {found['address']})",
            "it ends jobs on all GPUs of this host: reset them together, or reboot; see `dmesg` and `journalctl -u "
            "nvidia-fabricmanager`",
        ),
    ),
)

#: What names the root.
ROOTS: tuple[Rule, ...] = (
    (
        r"CUDA out of memory|CUDA (driver )?error: out of memory|OutOfMemoryError: CUDA|HIP out of memory"
        r"|Cuda failure (2 )?'out of memory'|Failed to CUDA (calloc|malloc)",
        _OUT_OF_MEMORY,
    ),
    (
        r"device-side assert triggered|Assertion `[^`]*` failed",
        Cause(
            "device-side assert",
            "an index or label is out of range on the GPU; CUDA_LAUNCH_BLOCKING=1 shows the line that does it",
        ),
    ),
    (r"uncorrectable ECC error|double bit ECC", _MEMORY_FAULT),
    (r"uncorrectable NVLink error|Invalid access of peer GPU memory over nvlink", _NVLINK),
    (r"fallen off the bus|GPU is lost", _OFF_THE_BUS),
    (r"hardware stack error", Cause("GPU fault", "see `dmesg | grep -i xid` on this host")),
    (r"an illegal memory access was encountered", Cause("illegal memory access on the GPU", _BLOCKING)),
    (r"misaligned address", Cause("a kernel used a misaligned address on the GPU", _BLOCKING)),
    (
        r"an illegal instruction was encountered",
        Cause("a kernel had an illegal instruction", f"{_BLOCKING}; if it is none of yours, the GPU may be faulty"),
    ),
    (
        r"the launch timed out and was terminated",
        Cause(
            "a kernel ran longer than this GPU's time limit",
            "GPUs that drive a screen end kernels after seconds: make it smaller, or take the screen off this GPU",
        ),
    ),
    (
        r"unspecified launch failure",
        Cause(
            "a kernel on the GPU crashed",
            f"{_BLOCKING}; `dmesg | grep -i xid` tells hardware from a wrong address",
        ),
    ),
    (r"system not yet initialized|CUDA_ERROR_SYSTEM_NOT_READY", _FABRIC),
    (
        r"unsupported display driver / cuda driver combination|[Dd]river/library version mismatch"
        r"|nvmlInit_v2_\(\) INTERNAL ASSERT FAILED",
        _DRIVER_CHANGED,
    ),
    (
        r"forward compatibility was attempted",
        Cause(
            "the container's newer CUDA does not run on this GPU",
            "only data-centre GPUs take it (cuda-compat): take it out of LD_LIBRARY_PATH, or update the host's driver",
        ),
    ),
    (
        r"NVIDIA driver on your system is too old|CUDA driver version is insufficient",
        Cause(
            "the GPU driver is too old for this torch",
            "`dsrun probe` shows both: update the driver, or install a torch for it",
        ),
    ),
    (
        r"no kernel image is available",
        Cause(
            "this torch has no code for this GPU",
            "`torch.cuda.get_arch_list()` names what it is built for: install a torch for this GPU, or rebuild the "
            "extension",
        ),
    ),
    (
        r"provided PTX was compiled with an unsupported toolchain",
        Cause(
            "a kernel was compiled by a newer CUDA than the driver knows",
            "update the driver, or build the extension with the CUDA that `dsrun probe` shows for it",
        ),
    ),
    (r"Found no NVIDIA driver|No CUDA GPUs are available|no CUDA-capable device is detected", _NO_GPU),
    (
        r"Torch not compiled with CUDA enabled",
        Cause(
            "this torch is built for the CPU",
            "install a torch with CUDA for the interpreter that runs the ranks; a script for machines without GPUs too "
            "asks `torch.cuda.is_available()` first",
        ),
    ),
    (
        r"CUDA error: invalid device ordinal|cudaErrorInvalidDevice\b|Cuda failure (\d+ )?'invalid device ordinal'",
        Cause(
            "the script asked for a GPU that this rank does not see",
            "use LOCAL_RANK for the device, and no more ranks than GPUs: `dsrun probe`, CUDA_VISIBLE_DEVICES",
        ),
    ),
    (
        r"CUDA-capable device\(s\) is/are busy or unavailable",
        Cause(
            "the GPU takes no further process",
            "it is in exclusive mode (`nvidia-smi -q -d COMPUTE`), in MIG mode without a slice, or needs a reset",
        ),
    ),
    (
        r"\b(CUBLAS|CUDNN|CUSPARSE|CUSOLVER)_STATUS_(NOT_INITIALIZED|ALLOC_FAILED)\b"
        r"|_STATUS_INTERNAL_ERROR,? when calling `cu\w+Create\(",
        _LIBRARY_WITHOUT_MEMORY,
    ),
    (
        r"\b(CUBLAS|CUDNN|CUSPARSE|CUSOLVER)_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR)\b",
        Cause("a kernel of a CUDA library failed", f"often an earlier kernel is the reason: {_BLOCKING}"),
    ),
    (r"\bMPS (client failed|client has been terminated|server is not ready)|create MPS client", _MPS),
    (
        r"peer access is not supported between these two devices",
        Cause(
            "a GPU cannot read the memory of another one",
            "cards or a machine without peer access: NCCL_P2P_DISABLE=1, and switch off what maps memory of other GPUs "
            "by itself (an all-reduce of its own, CUDA IPC)",
        ),
    ),
    (
        r"peer mapping resources exhausted",
        Cause(
            "a GPU cannot be connected to so many others",
            "without NVSwitch a GPU has eight peers: fewer ranks a host, or NCCL_P2P_LEVEL=PXB",
        ),
    ),
    (
        r"Cannot re-initialize CUDA in forked subprocess",
        Cause("CUDA was used before the fork", "start with `--start exec`, or touch CUDA inside the rank only"),
    ),
    (
        r"CUDA error: initialization error",
        Cause("CUDA could not start in this process", "often it was used before a fork: start with `--start exec`"),
    ),
    (
        r"CUDA unknown error|CUDA error: unknown error|Error 999: |Cuda failure (\d+ )?'unknown error'",
        Cause(
            "CUDA failed without a reason",
            "often the driver: `nvidia-smi`, `dmesg | grep -i -e nvrm -e xid`; after a suspend reload nvidia_uvm",
        ),
    ),
)

#: What is left where nothing else is named.
CLASSES: tuple[Rule, ...] = (
    (r"\bCUDA (driver )?error: \w", Cause("a call of CUDA failed", f"the error names it; {_BLOCKING}")),
)
