"""Recorded machines: tests/fixtures/machines/*.yaml made into /proc, /sys and /dev trees and a driver that answers.

A file says what is on the machine; here it is written as Linux and NVML would tell it, so that the launcher runs as on
the real thing. `at` of a device is its NUMA node, its host bridge and the chain of bridges down to it, in PCI domain
0000 where it names none. `like` names a machine of which only the rest differs. `job` says what a job sees of it:
NVML lists its GPUs alone, while /proc shows all of them, as the kernel does. `faults` are the same machine broken, or
seen in another way.
"""

from __future__ import annotations

import atexit
import copy
import functools
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from dsrun.launcher.machine.processor.topology import parse_cpu_list
from dsrun.launcher.machine.read import probe
from dsrun.launcher.machine.report import ProbeReport
from dsrun.launcher.machine.verdicts.all import judge
from support.machine_driver import driver_of, full_address
from support.topologies import write_cpu, write_tree

FOLDER = Path(__file__).parent.parent / "fixtures" / "machines"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
GIB = 1 << 30
_SPEEDS = {1: "2.5", 2: "5.0", 3: "8.0", 4: "16.0", 5: "32.0"}
_NO_UUID = "GPU-????????-????-????-????-????????????"
#: Keys of which a machine that is `like` another changes parts.
_MERGED = ("cpus", "driver", "gpu", "job")
#: PCI classes, and the vendor of a network card by its driver.
_GPU_CLASS, _INFINIBAND_CLASS, _ETHERNET_CLASS, _DRIVE_CLASS = "0x030200", "0x020700", "0x020000", "0x010802"
_NO_VENDOR = "0x0000"
_VENDORS = {
    "mlx5_core": "0x15b3",
    "ixgbe": "0x8086",
    "igc": "0x8086",
    "efa": "0x1d0f",
    "ena": "0x1d0f",
}


@dataclass(frozen=True)
class Machine:
    """A recorded machine: its tree, its driver, its interfaces' addresses, and what a job there has.

    Attributes:
        root: its tree.
        load_nvml: its driver, as `read_gpus` and others take it.
        addresses: addresses of each network interface, by the name of the interface.
        cpus: those a job may be scheduled on.
        environ: variables of a job; empty on a machine without a scheduler.
    """

    root: Path
    load_nvml: Callable[[], Any]
    addresses: Mapping[str, Sequence[str]]
    cpus: Sequence[int]
    environ: Mapping[str, str] = field(default_factory=dict[str, str])

    def report(self, environ: Mapping[str, str] | None = None, **changes: Any) -> ProbeReport:
        """Probes the machine, in the environment of its job if none is given.

        The working folder is that of the tests, wherever they run: nothing is said of it.
        """
        arguments: dict[str, Any] = {"affinity": self.cpus, "import_path": [], "load_nvml": self.load_nvml, **changes}
        env = self.environ if environ is None else environ
        found = probe(root=self.root, environ=env, ask_addresses=lambda: self.addresses, **arguments)
        return replace(found, verdicts=judge(replace(found, storage=replace(found.storage, paths=()))))


def recorded_facts(name: str, *, fault: str | None = None) -> dict[str, Any]:
    """Reads a machine's file.

    Args:
        name: name of the machine's file, without `.yaml`.
        fault: one of its `faults`.
    """
    facts = copy.deepcopy(_file(name))
    if "like" in facts:
        base = recorded_facts(facts["like"])
        facts = _changed({key: base[key] for key in base.keys() - {"says", "faults"}}, facts)
    return facts if fault is None else _changed(facts, facts["faults"][fault])


@functools.cache
def _file(name: str) -> dict[str, Any]:
    return yaml.load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)


def recorded_machine(
    name: str,
    root: Path,
    *,
    fault: str | None = None,
    driver_fails: str | None = None,
    lost: Collection[int] = (),
    forbidden: Collection[int] = (),
) -> Machine:
    """Writes the tree of a recorded machine below an empty folder.

    Args:
        name: name of the machine's file, without `.yaml`.
        root: empty folder in which the tree is written.
        fault: one of its `faults`.
        driver_fails: the error with which the driver does not start: the end of its name in `pynvml`.
        lost: NVML's indices of GPUs that fell off the bus.
        forbidden: NVML's indices of GPUs that may not be opened.
    """
    facts = recorded_facts(name, fault=fault)
    driver: dict[str, Any] = facts["driver"] if driver_fails is None else {**facts["driver"], "fails": driver_fails}
    gpus = _gpus(facts)
    job: dict[str, Any] = facts.get("job", {})
    seen = [gpus[number] for number in job.get("gpus", range(len(gpus)))]
    cards: list[dict[str, Any]] = facts.get("nics", [])
    ports: list[dict[str, Any]] = [*(card for card in cards if "net" in card), *facts.get("ethernet", ())]
    cpus = _write_processors(root, facts)
    _write_host(root, facts, job)
    has_module = driver.get("fails") != "DriverNotLoaded" and not driver.get("absent")
    (root / "sys/bus/pci/drivers/nvidia").mkdir(parents=True)
    for gpu in gpus:
        folder = _write_device(
            root, gpu["at"], pci=(gpu.get("class", _GPU_CLASS), "0x10de", gpu.get("device", "0x2330"))
        )
        if has_module:
            _link(folder / "driver", root / "sys/bus/pci/drivers/nvidia")
        if "iommu_type" in facts:
            write_tree(folder, {"iommu_group/type": f"{facts['iommu_type']}\n"})
        for pid, _ in (*gpu.get("processes", ()), *gpu.get("graphics", ()), *gpu.get("mps", ())):
            write_tree(root, {f"proc/{pid}/stat": ""})
    for device in facts.get("others", ()):
        _write_device(root, device["at"], pci=(device["class"], device["vendor"], device.get("device", "0x0000")))
    write_tree(root, facts.get("files", {}))
    if has_module:
        _write_driver(root, driver, gpus)
        closed = range(len(gpus)) if driver.get("fails") == "Unknown" else ()
        _write_nodes(root, gpus, opened=[gpu["minor"] for gpu in seen], closed=closed, job=job)
    for gpu in (*(seen[index] for index in forbidden), *(gpu for gpu in seen if gpu.get("forbidden"))):
        _close(root / f"dev/nvidia{gpu['minor']}")
    for port in ports:
        _write_interface(root, port)
    for card in cards:
        _write_card(root, card)
    _write_drives(root, facts)
    return Machine(
        root=root,
        load_nvml=driver_of(seen, driver, lost=lost, forbidden=forbidden),
        addresses={"lo": ["127.0.0.1"], **{port["net"]: [port["address"]] for port in ports if "address" in port}},
        cpus=parse_cpu_list(job["cpus"]) if "cpus" in job else cpus,
        environ={name: str(value) for name, value in job.get("environ", {}).items()},
    )


@functools.cache
def probed(name: str) -> ProbeReport:
    """Probes a recorded machine once, for tests that ask the same of all of them."""
    with tempfile.TemporaryDirectory(prefix="dsrun-machine-") as folder:
        return recorded_machine(name, Path(folder)).report()


def _changed(facts: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Applies what differs; `gpus` of a fault are changes by number."""
    found = dict(facts) | {key: value for key, value in changes.items() if key not in (*_MERGED, "gpus")}
    for key in _MERGED:
        found[key] = {**facts.get(key, {}), **changes.get(key, {})}
    gpus: Any = changes.get("gpus", {})
    if isinstance(gpus, list):
        found["gpus"] = gpus
    else:
        found["gpus"] = [{**gpu, **gpus.get(number, {})} for number, gpu in enumerate(facts["gpus"])]
    return found


def _gpus(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns all GPUs of the machine with what a file may leave out: number, UUID and slices in full."""
    gpus: list[dict[str, Any]] = []
    for number, stated in enumerate(facts["gpus"]):
        gpu: dict[str, Any] = {"minor": number, "uuid": f"GPU-{number:08x}-1111-2222-3333-444444444444"}
        gpu |= {**facts["gpu"], **stated}
        if gpu.get("mig"):
            slices = gpu["mig"]["slices"]
            gpu["mig"] = {
                "slices": [
                    {
                        "part": part,
                        "uuid": f"MIG-{number:08x}-1111-2222-3333-{part:012x}",
                        "name": f"{gpu['name']} MIG {one['profile']}",
                        "sm": gpu["sm"],
                        "free_mib": one["memory_mib"] - 15,
                        **one,
                    }
                    for part, one in enumerate(slices)
                ]
            }
        gpus.append(gpu)
    return gpus


def _write_driver(root: Path, driver: Mapping[str, Any], gpus: Sequence[Mapping[str, Any]]) -> None:
    """Writes what the kernel module tells of itself and of every GPU, in control groups and out of them."""
    version = driver.get("module", driver["version"])
    write_tree(
        root,
        {
            "proc/driver/nvidia/version": (
                f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Thu May 30 12:00:00 UTC 2024\n"
                "GCC version:  gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04)\n"
            ),
            "sys/module/nvidia/version": f"{version}\n",
            "sys/module/nvidia/refcnt": "0\n",
        },
    )
    for gpu in gpus:
        address = full_address(gpu["at"].split()[-1])
        sleeps = gpu.get("uuid_hidden", False)
        rows = {
            "Model: \t": gpu["name"],
            "IRQ:   \t": 300 + gpu["minor"],
            "GPU UUID:": _NO_UUID if sleeps else gpu["uuid"],
            "Video BIOS:": "??.??.??.??.??" if sleeps else "96.00.89.00.01",
            "Bus Type: \t": "PCIe",
            "DMA Size: \t": "52 bits",
            "DMA Mask: \t": "0xfffffffffffff",
            "Bus Location:": address,
            "Device Minor:": gpu["minor"],
            "GPU Excluded:": "No",
        }
        text = "".join(f"{name} \t {value}\n" for name, value in rows.items())
        write_tree(root, {f"proc/driver/nvidia/gpus/{address}/information": text})


def _write_nodes(
    root: Path,
    gpus: Sequence[Mapping[str, Any]],
    *,
    opened: Collection[int],
    closed: Collection[int],
    job: Mapping[str, Any],
) -> None:
    """Writes /dev/nvidia*.

    Args:
        root: root of the machine's file tree.
        gpus: GPUs of the machine.
        opened: minors of those that a job may open.
        closed: minors of those that it may not open though they are its own.
        job: its `devices` are `absent` (a container's /dev has no others) or `denied` (a control group).
    """
    write_tree(root, {"dev/nvidiactl": "", "dev/nvidia-uvm": ""})
    for gpu in gpus:
        path = root / f"dev/nvidia{gpu['minor']}"
        if gpu["minor"] in closed or (gpu["minor"] not in opened and job.get("devices") == "denied"):
            _close(path)
        elif gpu["minor"] in opened:
            path.touch()


def _close(path: Path) -> None:
    """Makes a file that is there and does not open, for root neither, whom no rights stop: a socket."""
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mknod(path, stat.S_IFSOCK | 0o666)


_X86_PROCESSOR = "processor\t: {number}\nmodel name\t: {model}\nflags\t\t: fpu {flags}\n\n"
#: No name and no `flags`: whether it is virtual stands nowhere.
_ARM_PROCESSOR = (
    "processor\t: {number}\nBogoMIPS\t: 2000.00\nFeatures\t: fp {features}\nCPU implementer\t: 0x41\n"
    "CPU architecture: 8\nCPU variant\t: 0x0\nCPU part\t: 0xd4f\nCPU revision\t: 0\n\n"
)


def _write_processors(root: Path, facts: dict[str, Any]) -> range:
    cpu = facts["cpus"]
    nodes = [node for node in facts["nodes"] for _ in range(node.get("times", 1))]
    total = cpu["sockets"] * cpu["cores"] * cpu["threads"]
    one = _ARM_PROCESSOR if "features" in cpu else _X86_PROCESSOR
    system = "sys/devices/system"
    write_tree(
        root,
        {
            "proc/cpuinfo": "".join(one.format(number=number, **cpu) for number in range(total)),
            f"{system}/cpu/online": f"0-{total - 1}\n",
            **{
                f"{system}/cpu/cpufreq/policy0/scaling_{name}": f"{cpu[name]}\n"
                for name in ("governor", "driver")
                if name in cpu
            },
            f"{system}/node/online": f"0-{len(nodes) - 1}\n" if len(nodes) > 1 else "0\n",
        },
    )
    for folder in _cpu_folders(cpu["sockets"], cpu["cores"], cpu["threads"]).iterdir():
        (root / system / "cpu" / folder.name).symlink_to(folder)
    for number, node in enumerate(nodes):
        memory = "".join(
            f"Node {number} {name}: {node.get(key, 0) << 20:>12} kB\n"
            for name, key in (("MemTotal", "memory_gib"), ("MemFree", "free_gib"))
        )
        write_tree(
            root / system / f"node/node{number}",
            {
                "cpulist": f"{node.get('cpus', '')}\n",
                "meminfo": memory,
            },
        )
        if "distances" in node:
            distances = " ".join(map(str, node["distances"]))
            write_tree(root / system / f"node/node{number}", {"distance": f"{distances}\n"})
    return range(total)


@functools.cache
def _cpu_folders(sockets: int, cores: int, threads: int) -> Path:
    """Writes what /sys has of each CPU, once for all machines of so many: it is half the files of a tree."""
    root = Path(tempfile.mkdtemp(prefix="dsrun-cpus-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    total = sockets * cores
    for number in range(total * threads):
        core = number % total
        write_cpu(root, number, siblings=range(core, total * threads, total), package=core // cores)
    return root / "sys/devices/system/cpu"


def _write_host(root: Path, facts: dict[str, Any], job: Mapping[str, Any]) -> None:
    total = sum(node.get("memory_gib", 0) for node in facts["nodes"])
    swap, swap_free = facts.get("swap_gib", (0, 0))
    limits = facts["limits"]
    rows = {
        "Max open files": (limits["nofile"], "files"),
        "Max processes": (limits["nproc"], "processes"),
        "Max locked memory": (limits["memlock"], "bytes"),
    }
    table = f"{'Limit':<26}{'Soft Limit':<21}{'Hard Limit':<21}Units\n"
    table += "".join(f"{name:<26}{value!s:<21}{value!s:<21}{unit}\n" for name, (value, unit) in rows.items())
    group = job.get("cgroup", {"path": "user.slice"})
    limit = f"{group['memory_gib'] << 30}" if "memory_gib" in group else "max"
    words = " ".join(f"[{word}]" if word == facts["thp"] else word for word in ("always", "madvise", "never"))
    memory = {"MemTotal": total, "MemAvailable": facts["available_gib"], "SwapTotal": swap, "SwapFree": swap_free}
    write_tree(
        root,
        {
            "etc/os-release": f'PRETTY_NAME="{facts["os"]}"\n',
            "sys/class/dmi/id/sys_vendor": f"{facts['machine'][0]}\n",
            "sys/class/dmi/id/product_name": f"{facts['machine'][1]}\n",
            "proc/meminfo": "".join(f"{name}: {gib << 20} kB\n" for name, gib in memory.items()),
            "proc/self/limits": table,
            "proc/self/status": "Name:\tdsrun\nUmask:\t0022\n",
            "proc/uptime": "864000.25 1.0\n",
            "proc/self/cgroup": f"0::/{group['path']}\n",
            f"sys/fs/cgroup/{group['path']}/memory.max": f"{limit}\n",
            "sys/kernel/mm/transparent_hugepage/enabled": f"{words}\n",
            "dev/kmsg": facts.get("kmsg", ""),
            "dev/shm/.keep": "",
            **{f"sys/module/{name}/refcnt": "0\n" for name in facts["modules"]},
            **{f"proc/driver/nvidia-nvswitch/devices/{index}": "" for index in range(facts["nvswitches"])},
        },
    )
    (root / "sys/kernel/iommu_groups").mkdir(parents=True)
    for group in range(facts["iommu_groups"]):
        (root / "sys/kernel/iommu_groups" / str(group)).mkdir()


def _write_device(root: Path, at: str, link: Sequence[int] = (), *, pci: tuple[str, str, str] | None = None) -> Path:
    """Writes a PCI device and what leads to it, with its class, vendor and number if given; returns its folder."""
    node, bridge, *chain = at.split()
    chain = [full_address(address) for address in chain]
    root_bridge = bridge if ":" in bridge else f"0000:{bridge}"
    folder = root / "sys/devices" / f"pci{root_bridge}" / "/".join(chain)
    write_tree(folder, {"numa_node": f"{node}\n"})
    if pci is not None:
        write_tree(
            folder, {f"{name}": f"{value}\n" for name, value in zip(("class", "vendor", "device"), pci, strict=True)}
        )
    if link:
        write_tree(
            folder,
            {
                "current_link_speed": f"{_SPEEDS[link[0]]} GT/s PCIe\n",
                "current_link_width": f"{link[1]}\n",
                "max_link_speed": f"{_SPEEDS[link[2]]} GT/s PCIe\n",
                "max_link_width": f"{link[3]}\n",
            },
        )
    _link(root / "sys/bus/pci/devices" / chain[-1], folder)
    return folder


def _write_interface(root: Path, port: dict[str, Any]) -> None:
    driver_name = port.get("driver", "mlx5_core")
    infiniband = port.get("layer") == "InfiniBand"
    kind = _INFINIBAND_CLASS if infiniband else _ETHERNET_CLASS
    pci = (kind, _VENDORS.get(driver_name, _NO_VENDOR), "0x1021")
    # A virtual machine's own interface is no PCI device.
    device = _write_device(root, port["at"], pci=pci) if "at" in port else root / "sys/devices/vmbus" / port["net"]
    folder = device / "net" / port["net"]
    works = "ACTIVE" in port.get("state", "4: ACTIVE")
    speed = port.get("speed", port.get("rate", 0) * 1000)
    write_tree(
        folder,
        {
            "operstate": "up\n" if works else "down\n",
            "mtu": "4092\n" if infiniband else "1500\n",
            "speed": f"{speed if works else -1}\n",
            "type": "32\n" if infiniband else "1\n",
        },
    )
    _link_driver(root, device, driver_name)
    _link(folder / "device", device)
    _link(root / "sys/class/net" / port["net"], folder)
    if port.get("default"):
        head = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
        write_tree(
            root, {"proc/net/route": f"{head}{port['net']}\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"}
        )


def _link_driver(root: Path, device: Path, name: str) -> None:
    driver = root / "sys/bus/pci/drivers" / name
    driver.mkdir(parents=True, exist_ok=True)
    _link(device / "driver", driver)


def _write_card(root: Path, card: dict[str, Any]) -> None:
    driver_name = card.get("driver", "mlx5_core")
    kind = _INFINIBAND_CLASS if card["layer"] == "InfiniBand" else _ETHERNET_CLASS
    device = _write_device(root, card["at"], pci=(kind, _VENDORS.get(driver_name, _NO_VENDOR), "0x1021"))
    folder = device / "infiniband" / card["name"]
    write_tree(
        folder,
        {
            "fw_ver": f"{card.get('firmware', '28.39.1002')}\n",
            "ports/1/link_layer": f"{card['layer']}\n",
            "ports/1/state": f"{card.get('state', '4: ACTIVE')}\n",
            "ports/1/phys_state": f"{card.get('physical', '5: LinkUp')}\n",
            "ports/1/rate": f"{card['rate']} Gb/sec (4X {'EDR' if card['rate'] == 100 else 'NDR'})\n",
            "ports/1/counters/link_downed": "0\n",
            "ports/1/counters/symbol_error": "0\n",
            **_gids(card),
        },
    )
    _link_driver(root, device, driver_name)
    _link(folder / "device", device)
    _link(root / "sys/class/infiniband" / card["name"], folder)
    verbs = f"uverbs{len(list((root / 'sys/class/infiniband').iterdir())) - 1}"
    write_tree(
        root,
        {
            f"sys/class/infiniband_verbs/{verbs}/ibdev": f"{card['name']}\n",
            f"dev/infiniband/{verbs}": "",
            "usr/lib64/libibverbs.so.1": "",
        },
    )


def _gids(card: dict[str, Any]) -> dict[str, str]:
    """InfiniBand and EFA have one address; RoCE has link-local ones first, of both versions, then its IPv4."""
    number = int("".join(filter(str.isdecimal, card["name"].rpartition("_")[2])))
    local = f"fe80:0000:0000:0000:0000:0000:0000:{number + 1:04x}\n"
    if card["layer"] != "Ethernet":
        return {"ports/1/gids/0": local}
    found = {"ports/1/gids/0": local, "ports/1/gids/1": local}
    if "address" in card:
        high, low = (bytes(map(int, card["address"].split("."))).hex()[part : part + 4] for part in (0, 4))
        found |= dict.fromkeys(("ports/1/gids/2", "ports/1/gids/3"), f"{'0000:' * 5}ffff:{high}:{low}\n")
    kinds = ("IB/RoCE v1\n", "RoCE v2\n")
    return found | {f"ports/1/gid_attrs/types/{index}": kinds[index % 2] for index in range(len(found))}


def _write_drives(root: Path, facts: dict[str, Any]) -> None:
    # A container has a /dev of its own.
    dev = "tmpfs tmpfs" if facts.get("job", {}).get("devices") == "absent" else "devtmpfs udev"
    lines = ["30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw", f"24 1 0:5 / /dev rw,nosuid - {dev} rw"]

    def mount(number: str, name: str, point: str) -> None:
        lines.append(f"{len(lines) + 40} 1 {number} / {point} rw,relatime shared:1 - ext4 /dev/{name} rw")

    for name, array in facts.get("raid", {}).items():
        write_tree(root / "sys/devices/virtual/block" / name, {"dev": f"{array['number']}\n"})
        mount(array["number"], name, array["mount"])
    for drive in facts["nvme"]:
        device = _write_device(root, drive["at"], drive.get("link", ()), pci=(_DRIVE_CLASS, "0x144d", "0xa80a"))
        controller = device / "nvme" / drive["name"].removesuffix("n1")
        folder = controller / drive["name"]
        write_tree(controller, {"model": f"{drive['model']:<40}\n", "firmware_rev": "ECA7P4Q1\n"})
        write_tree(
            folder,
            {"dev": f"{drive['number']}\n", "size": f"{drive['gib'] << 21}\n", "queue/nr_requests": "1023\n"},
        )
        (folder / "holders").mkdir()
        if "holder" in drive:
            _link(folder / "holders" / drive["holder"], root / "sys/devices/virtual/block" / drive["holder"])
        if "partition" in drive:
            write_tree(folder / f"{drive['name']}p1", {"dev": f"{drive['partition']}\n", "partition": "1\n"})
        if "mount" in drive:
            mount(drive.get("partition", drive["number"]), drive["name"], drive["mount"])
        _link(controller / "device", device)
        _link(folder / "device", controller)
        _link(root / "sys/block" / drive["name"], folder)
    write_tree(root, {"proc/self/mountinfo": "\n".join(lines) + "\n"})


def _link(link: Path, target: Path) -> None:
    if not link.is_symlink():
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)
