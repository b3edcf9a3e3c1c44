"""Which GPUs and other accelerators the kernel shows, found without a driver: what a driver that fails is held to.

Reads /proc, /sys and /dev; opens no device, which would wake it, and judges nothing. Both halves use it: the launcher
beside NVML, the runtime beside torch.

[Note: given] A device that is there need not be this process's. /proc and /sys show a container all devices of its
host; what it was given has a file in its /dev. A scheduler leaves the files and forbids them by the device cgroup. So
a device is *given* where its file is there and may be opened: access(2) asks the cgroup too, and wakes no device.
"""

from __future__ import annotations

import os
import platform
import re
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_NVIDIA, _AMD, _INTEL = "0x10de", "0x1002", "0x8086"
_NVIDIA_FILE = r"nvidia[0-9]+"
#: Classes of PCI devices: displays, which GPUs are, and processing accelerators.
_DISPLAY, _ACCELERATOR = "0x03", "0x12"
#: By vendor of a processing accelerator: what it is called, and how the files of its devices are.
_ACCELERATORS: Mapping[str, tuple[str, str]] = {
    "0x1da3": ("Intel Gaudi", r"(accel/accel|hl)[0-9]+"),
    "0x1ae0": ("Google TPU", r"accel[0-9]+|vfio/[0-9]+"),
    "0x1d0f": ("AWS Neuron", r"neuron[0-9]+"),
    "0x19e5": ("Huawei Ascend", r"davinci[0-9]+"),
}
#: gfx908, gfx90a, gfx940 to gfx942 and gfx950, as the kernel's KFD writes them: Instinct MI100 to MI355X. All others
#: sit on desktops too, or in the processor, and are nobody's accelerator until a torch is built for them.
_INSTINCT = frozenset({90008, 90010, 90400, 90401, 90402, 90500})
#: Kernel drivers that keep a card for a virtual machine.
_PASSED_ON = frozenset({"vfio-pci", "pci-stub", "xen-pciback"})
#: HTCondor shows this GPU to a job that asked for none (ENVIRONMENT_VALUE_FOR_UnAssignedGPUs).
_UNASSIGNED = "10000"
#: PCI ids of Intel's Data Center GPUs Max and Flex; all others are in processors and desktops.
_INTEL_DATA_CENTRE = re.compile(r"0x(0b6[9e]|0bd[0-9a-f]|56c[0-2])")


@dataclass(frozen=True, slots=True, kw_only=True)
class NvidiaPresence:
    """What of NVIDIA is on this machine.

    Attributes:
        cards: kernel driver of each GPU on the PCI bus by its address: `nvidia`, `nouveau`, `vfio-pci`; None without.
        files: files of GPUs in /dev, `/dev/nvidia0` first.
        open_files: those of them that this process may open; see [Note: given].
        closed_by_rights: one of the others is closed to this user; else the device cgroup of a container or a job is
            what forbids them.
        kernel_module: version of NVIDIA's loaded kernel module; None where it is not loaded.
        in_wsl: Windows lends its GPU: WSL has the device and Windows' driver.
        has_own_dev: /dev is a container's own: what is not in it was not given.
    """

    cards: Mapping[str, str | None]
    files: tuple[str, ...]
    open_files: tuple[str, ...]
    closed_by_rights: bool
    kernel_module: str | None
    in_wsl: bool
    has_own_dev: bool

    @property
    def is_given(self) -> bool:
        """Whether this process was given a GPU; see [Note: given].

        Files outlive the driver that made them, as where all cards went to virtual machines.
        """
        return (bool(self.open_files) and not self.is_passed_on) or self.in_wsl

    @property
    def is_passed_on(self) -> bool:
        """Whether all cards are kept for virtual machines."""
        return bool(self.cards) and set(self.cards.values()) <= _PASSED_ON

    @property
    def count(self) -> int:
        """GPUs that there are, given or not."""
        return max(len(self.cards), len(self.files), int(self.in_wsl))


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerators:
    """Devices of one kind for which dsrun has no backend, and which this process was given.

    Attributes:
        name: their maker, as people say it: `AMD`.
        count: number of devices.
        for_computing: whether the devices have no other use than computing, so that a job is meant to use them; false
            for a card that draws the desktop or sits in the processor.
    """

    name: str
    count: int
    for_computing: bool


def nvidia_presence(root: Path = Path("/"), *, may_open: Callable[[Path], bool] | None = None) -> NvidiaPresence:
    """Looks for NVIDIA GPUs.

    Args:
        root: root of the file tree to read; tests pass a made-up one.
        may_open: whether this process may open a device file.
    """
    may_open = may_open or may_open_device
    files = _files(root, _NVIDIA_FILE)
    open_files = [name for name in files if may_open(root / "dev" / name)]
    wsl = root / "usr/lib/wsl/lib"
    return NvidiaPresence(
        cards={
            address.name: _kernel_driver(address)
            for address, vendor, kind in _pci_devices(root)
            if vendor == _NVIDIA and kind.startswith(_DISPLAY)
        },
        files=tuple(f"/dev/{name}" for name in files),
        open_files=tuple(f"/dev/{name}" for name in open_files),
        closed_by_rights=any(_rights_forbid(root / "dev" / name) for name in files if name not in open_files),
        kernel_module=_module_version(_text(root / "proc/driver/nvidia/version")),
        # The device is there for GPUs of all makers; NVIDIA's libraries are lent with a driver of NVIDIA only.
        in_wsl=(root / "dev/dxg").exists()
        and any((wsl / name).exists() for name in ("libcuda.so.1", "libnvidia-ml.so.1")),
        has_own_dev=_has_own_dev(_text(root / "proc/self/mountinfo")),
    )


def nvidia_open_files(root: Path = Path("/"), *, may_open: Callable[[Path], bool] | None = None) -> int:
    """Counts the GPUs of NVIDIA that this process may open, and looks at nothing else, which takes microseconds.

    Args:
        root: root of the file tree to read; tests pass a made-up one.
        may_open: whether this process may open a device file.
    """
    return sum((may_open or may_open_device)(root / "dev" / name) for name in _files(root, _NVIDIA_FILE))


def other_accelerators(
    root: Path = Path("/"),
    *,
    system: tuple[str, str] | None = None,
    may_open: Callable[[Path], bool] | None = None,
) -> tuple[Accelerators, ...]:
    """Looks for accelerators of other makers that this process was given.

    Args:
        root: root of the file tree to read; tests pass a made-up one.
        system: names of the system and its processor, as `sys.platform` and `platform.machine` give them; None to ask
            these.
        may_open: whether this process may open a device file.
    """
    may_open = may_open or may_open_device
    found: list[Accelerators] = []
    devices = _pci_devices(root)
    amd = _amd(root, devices)
    if amd is not None and may_open(root / "dev/kfd"):
        found.append(amd)
    intel = [
        _text(address / "device").strip()
        for address, vendor, kind in devices
        if vendor == _INTEL and kind.startswith(_DISPLAY)
    ]
    if intel and any(may_open(root / "dev" / name) for name in _files(root, r"dri/renderD[0-9]+")):
        large = sum(bool(_INTEL_DATA_CENTRE.fullmatch(device)) for device in intel)
        found.append(Accelerators(name="Intel", count=large or len(intel), for_computing=large > 0))
    for vendor, (name, pattern) in _ACCELERATORS.items():
        count = sum(its == vendor and kind.startswith(_ACCELERATOR) for _, its, kind in devices)
        if count and any(may_open(root / "dev" / file) for file in _files(root, pattern)):
            found.append(Accelerators(name=name, count=count, for_computing=True))
    if (system or (sys.platform, platform.machine())) == ("darwin", "arm64"):
        found.append(Accelerators(name="Apple", count=1, for_computing=True))
    return tuple(found)


def may_open_device(path: Path) -> bool:
    """Whether this process may open a device file; opens nothing, see [Note: given].

    A folder in its place, which a container's runtime made, is no device.

    Args:
        path: path of the device file.
    """
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return (stat.S_ISCHR(mode) or stat.S_ISREG(mode)) and os.access(path, os.R_OK | os.W_OK)


def hides_all_gpus(environ: Mapping[str, str]) -> bool:
    """Whether CUDA_VISIBLE_DEVICES says that no GPU is to be used: CUDA reads it up to the first entry that names none.

    Schedulers write an empty list, `-1`, `NoDevFiles` or `none`. An entry that was to name a GPU, as `all` or
    `cuda:0`, gives CUDA none too, and does not say that none is meant.

    Args:
        environ: environment variables of the process that would use the GPUs.
    """
    value = environ.get("CUDA_VISIBLE_DEVICES")
    first = "0" if value is None else value.split(",")[0].strip()
    if first.startswith("-") or first == _UNASSIGNED:
        return True
    names_some = first == "all" or first.startswith(("GPU-", "MIG-")) or any(letter.isdecimal() for letter in first)
    return not names_some


def _amd(root: Path, devices: list[tuple[Path, str, str]]) -> Accelerators | None:
    """Counts what AMD's compute driver has: its node 0 and others without vector units are processors."""
    if not (root / "dev/kfd").exists():
        return None
    nodes = [_numbers(_text(path)) for path in (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")]
    gpus = [node for node in nodes if node.get("simd_count", 0) > 0]
    large = sum(node.get("gfx_target_version") in _INSTINCT for node in gpus)
    # A processing accelerator is an Instinct even where the topology may not be read.
    large = large or sum(vendor == _AMD and kind.startswith(_ACCELERATOR) for _, vendor, kind in devices)
    displays = sum(vendor == _AMD and kind.startswith(_DISPLAY) for _, vendor, kind in devices)
    return Accelerators(name="AMD", count=large or len(gpus) or displays or 1, for_computing=large > 0)


def _pci_devices(root: Path) -> list[tuple[Path, str, str]]:
    """Returns displays and processing accelerators: folder, vendor, class."""
    found: list[tuple[Path, str, str]] = []
    for folder in sorted(_listed(root / "sys/bus/pci/devices")):
        kind = _text(folder / "class").strip()
        if kind.startswith((_DISPLAY, _ACCELERATOR)):
            found.append((folder, _text(folder / "vendor").strip(), kind))
    return found


def _kernel_driver(device: Path) -> str | None:
    try:
        return os.path.basename(os.readlink(device / "driver"))
    except OSError:
        return None


def _files(root: Path, pattern: str) -> tuple[str, ...]:
    """Returns names below /dev that match, `nvidia2` before `nvidia10`."""
    folders = ["", *("dri", "accel", "vfio")]
    names = [os.path.join(folder, path.name) for folder in folders for path in _listed(root / "dev" / folder)]
    found = [name for name in names if re.fullmatch(pattern, name)]
    return tuple(sorted(found, key=lambda name: int(re.findall("[0-9]+", name)[-1])))


def _rights_forbid(path: Path) -> bool:
    """Whether a file's owner, group and mode are what closes it to this user."""
    try:
        found = path.stat()
    except OSError:
        return True
    user = os.geteuid()
    if user == 0:
        return False
    digit = 6 if user == found.st_uid else 3 if found.st_gid in (os.getegid(), *os.getgroups()) else 0
    return (found.st_mode >> digit) & 0o6 != 0o6


def _module_version(text: str) -> str | None:
    """Reads /proc/driver/nvidia/version: `... Kernel Module  535.216.03 ...`, `... Kernel Module for x86_64  5...`."""
    match = re.search(r"Kernel Module.*?\s([0-9]+(?:\.[0-9]+)+)\s", text)
    return match and match[1]


def _has_own_dev(mounts: str) -> bool:
    """Whether /dev is a container's, which is a tmpfs, or a sandbox's of single files: the kernel's is a devtmpfs."""
    kinds = [line.partition(" - ")[2].split()[0] for line in mounts.splitlines() if line.split()[4:5] == ["/dev"]]
    return bool(mounts) and kinds[-1:] != ["devtmpfs"]


def _numbers(text: str) -> dict[str, int]:
    words = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].isdecimal()}


def _listed(folder: Path) -> Iterator[Path]:
    try:
        yield from folder.iterdir()
    except OSError:
        return


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
