"""Host, processor, memory and disk as /proc and /sys tell them. Pure parsers first, readers of a tree below them."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from .cgroup import read_limits

#: Instruction sets that decide which processor kernels are fast, in the order they are shown.
NOTABLE_ISA = (
    *("avx2", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_bf16", "amx_int8", "asimd", "sve", "sve2", "bf16", "i8mm"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuInfo:
    """What /proc/cpuinfo says.

    Attributes:
        model: name of the processor; ARM kernels give none.
        cores: logical processors that are online.
        isa: those of `NOTABLE_ISA` it has.
        virtual: whether the processor runs under a hypervisor; None where /proc/cpuinfo does not say (ARM).
    """

    model: str | None
    cores: int
    isa: tuple[str, ...]
    virtual: bool | None


def parse_cpuinfo(text: str) -> CpuInfo:
    """Reads /proc/cpuinfo of x86 or ARM."""
    fields: dict[str, str] = {}
    cores = 0
    for line in text.splitlines():
        key, colon, value = (part.strip() for part in line.partition(":"))
        cores += key == "processor" and bool(colon)
        fields.setdefault(key, value)
    flags = fields.get("flags", fields.get("Features", "")).split()
    return CpuInfo(
        model=fields.get("model name") or None,
        cores=cores,
        isa=tuple(name for name in NOTABLE_ISA if name in flags),
        virtual="hypervisor" in flags if "flags" in fields else None,
    )


def parse_os_release(text: str) -> str | None:
    """Reads the name for people out of /etc/os-release."""
    fields = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    name = fields.get("PRETTY_NAME", fields.get("NAME", ""))
    return name.strip().strip("\"'") or None


def container_of(root: Path, environ: Mapping[str, str]) -> str | None:
    """Names the container this process runs in; None where there is no sign of one.

    Args:
        root: `/`, or a made-up tree.
        environ: environment variables of this process.
    """
    if "KUBERNETES_SERVICE_HOST" in environ:
        return "kubernetes"
    if "APPTAINER_CONTAINER" in environ or is_there(root / ".singularity.d"):
        return "apptainer" if "APPTAINER_CONTAINER" in environ else "singularity"
    mounts = [line.split() for line in (read_text(root / "proc/self/mountinfo") or "").splitlines()]
    tops = [words for words in mounts if len(words) > 4 and words[4] == "/"]
    # enroot, and pyxis by it, keeps a lock file in the folder that becomes the root. Images have none.
    if is_there(root / ".lock") and any(words[3] != "/" or "enroot" in " ".join(words) for words in tops):
        return "enroot"
    named = (read_text(root / "run/systemd/container") or "").strip() or environ.get("container")
    if named:
        return named
    signs = {"docker": ".dockerenv", "podman": "run/.containerenv", "lxc": "dev/lxd/sock", "incus": "dev/incus/sock"}
    found = next((name for name, sign in signs.items() if is_there(root / sign)), None)
    if found is not None:
        return found
    if any("containerd.snapshotter" in " ".join(words) for words in tops):
        return "containerd"
    return "lxc" if any("lxcfs" in words for words in mounts) else None


def machine_of(root: Path) -> str | None:
    """Names the machine, real or virtual, by its firmware (`Dell Inc. PowerEdge R760`)."""
    folder = root / "sys/class/dmi/id"
    words = [(read_text(folder / name) or "").strip() for name in ("sys_vendor", "product_name")]
    return " ".join(dict.fromkeys(word for word in words if word)) or None


def usable_cores(affinity: Collection[int], quota_cores: float | None) -> int:
    """Returns the cores a job can keep busy: those it may be scheduled on, less what a quota takes away; at least one.

    Args:
        affinity: logical processors this process may run on (cpusets included).
        quota_cores: processor time a second that its cgroups allow; None is no limit.
    """
    allowed = len(affinity) if quota_cores is None else min(len(affinity), int(quota_cores))
    return max(1, allowed)


def count_usable_cores() -> int:
    """Returns the cores this process can keep busy."""
    return usable_cores(os.sched_getaffinity(0), read_limits(Path("/")).quota_cores)


def host_names() -> frozenset[str]:
    """Returns what this machine calls itself, in lower case, with and without its domain; asks no name server."""
    name = socket.gethostname().lower()
    return frozenset({name, name.partition(".")[0]})


def resolved(path: Path) -> Path:
    """Returns a path without links; as it is, made absolute, where a link of it may not be read."""
    try:
        return Path(os.path.realpath(path))
    except OSError:
        return Path(os.path.abspath(path))


def is_there(path: Path) -> bool:
    """Whether a file or folder is there; False, where Path.exists raises, for what may not be looked at."""
    return os.path.exists(path)


def read_text(path: Path) -> str | None:
    """Returns the text of a file of /proc or /sys; None where it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None
