"""Recorded machines: tests/fixtures/machines/*.yaml made into /proc and /sys trees and a driver that answers for them.

A file says what is on the machine; here it is written as Linux and NVML would tell it, so that the probe runs as on the
real thing. `at` of a device is its NUMA node, its host bridge and the chain of bridges down to it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from dsrun.launcher.cpu_topology import parse_cpu_list
from dsrun.launcher.probe import probe
from dsrun.launcher.probe_report import ProbeReport
from support.nvml import NVMLError
from support.topologies import write_cpu, write_tree

FOLDER = Path(__file__).parent.parent / "fixtures" / "machines"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
GIB = 1 << 30
MIB = 1 << 20
_SPEEDS = {1: "2.5", 2: "5.0", 3: "8.0", 4: "16.0", 5: "32.0"}


@dataclass(frozen=True)
class Machine:
    """A recorded machine: its tree, its driver, its interfaces' addresses, and its CPUs."""

    root: Path
    load_nvml: Callable[[], Any]
    addresses: Mapping[str, Sequence[str]]
    cpus: Sequence[int]

    def report(self, environ: Mapping[str, str] | None = None, **changes: Any) -> ProbeReport:
        """Probes the machine, in an empty environment if none is given."""
        arguments: dict[str, Any] = {"affinity": self.cpus, "import_path": [], "load_nvml": self.load_nvml, **changes}
        return probe(root=self.root, environ=environ or {}, ask_addresses=lambda: self.addresses, **arguments)


def recorded_machine(name: str, root: Path) -> Machine:
    """Writes the tree of a recorded machine below an empty folder.

    Args:
        name: of its file, without `.yaml`.
        root: where.
    """
    facts: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    gpus: list[dict[str, Any]] = [{**facts["gpu"], **gpu} for gpu in facts["gpus"]]
    cards: list[dict[str, Any]] = facts.get("nics", [])
    ports: list[dict[str, Any]] = [*cards, *facts.get("ethernet", ())]
    cpus = _write_processors(root, facts)
    _write_host(root, facts)
    for gpu in gpus:
        folder = _write_device(root, gpu["at"])
        if "iommu_type" in facts:
            write_tree(folder, {"iommu_group/type": f"{facts['iommu_type']}\n"})
        for pid, _ in gpu.get("processes", ()):
            write_tree(root, {f"proc/{pid}/stat": ""})
    for port in ports:
        _write_interface(root, port)
    for card in cards:
        _write_card(root, card)
    _write_drives(root, facts)
    return Machine(
        root=root,
        load_nvml=_driver(gpus, facts["driver"]),
        addresses={"lo": ["127.0.0.1"], **{port["net"]: [port["address"]] for port in ports if "address" in port}},
        cpus=cpus,
    )


def _write_processors(root: Path, facts: dict[str, Any]) -> range:
    cpu, nodes = facts["cpus"], facts["nodes"]
    cores = cpu["sockets"] * cpu["cores"]
    total = cores * cpu["threads"]
    one = "processor\t: {number}\nmodel name\t: {model}\nflags\t\t: fpu {flags}\n\n"
    system = "sys/devices/system"
    write_tree(
        root,
        {
            "proc/cpuinfo": "".join(one.format(number=number, **cpu) for number in range(total)),
            f"{system}/cpu/online": f"0-{total - 1}\n",
            f"{system}/cpu/cpufreq/policy0/scaling_governor": f"{cpu['governor']}\n",
            f"{system}/cpu/cpufreq/policy0/scaling_driver": f"{cpu['driver']}\n",
            f"{system}/node/online": f"0-{len(nodes) - 1}\n" if len(nodes) > 1 else "0\n",
        },
    )
    for number in range(total):
        core = number % cores
        write_cpu(root, number, siblings=range(core, total, cores), package=core // cpu["cores"])
    for number, node in enumerate(nodes):
        assert parse_cpu_list(node["cpus"]), "a node of a recorded machine has CPUs"
        memory = "".join(
            f"Node {number} {name}: {node[key] << 20:>12} kB\n"
            for name, key in (("MemTotal", "memory_gib"), ("MemFree", "free_gib"))
        )
        write_tree(
            root / system / f"node/node{number}",
            {
                "cpulist": f"{node['cpus']}\n",
                "meminfo": memory,
                "distance": " ".join(map(str, node["distances"])) + "\n",
            },
        )
    return range(total)


def _write_host(root: Path, facts: dict[str, Any]) -> None:
    total = sum(node["memory_gib"] for node in facts["nodes"])
    swap, swap_free = facts.get("swap_gib", (0, 0))
    limits = facts["limits"]
    rows = {
        "Max open files": (limits["nofile"], "files"),
        "Max processes": (limits["nproc"], "processes"),
        "Max locked memory": (limits["memlock"], "bytes"),
    }
    table = f"{'Limit':<26}{'Soft Limit':<21}{'Hard Limit':<21}Units\n"
    table += "".join(f"{name:<26}{value!s:<21}{value!s:<21}{unit}\n" for name, (value, unit) in rows.items())
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
            "proc/self/cgroup": "0::/user.slice\n",
            "sys/fs/cgroup/user.slice/memory.max": "max\n",
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


def _write_device(root: Path, at: str, link: Sequence[int] = ()) -> Path:
    """Writes a PCI device and what leads to it; returns its folder."""
    node, bridge, *chain = at.split()
    chain = [f"0000:{address}" for address in chain]
    folder = root / "sys/devices" / f"pci0000:{bridge}" / "/".join(chain)
    write_tree(folder, {"numa_node": f"{node}\n"})
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
    device = _write_device(root, port["at"])
    folder = device / "net" / port["net"]
    works = "ACTIVE" in port.get("state", "4: ACTIVE")
    infiniband = port.get("layer") == "InfiniBand"
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
    driver = root / "sys/bus/pci/drivers" / port.get("driver", "mlx5_core")
    driver.mkdir(parents=True, exist_ok=True)
    _link(device / "driver", driver)
    _link(folder / "device", device)
    _link(root / "sys/class/net" / port["net"], folder)
    if port.get("default"):
        head = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
        write_tree(
            root, {"proc/net/route": f"{head}{port['net']}\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"}
        )


def _write_card(root: Path, card: dict[str, Any]) -> None:
    device = _write_device(root, card["at"])
    folder = device / "infiniband" / card["name"]
    write_tree(
        folder,
        {
            "fw_ver": f"{card.get('firmware', '28.39.1002')}\n",
            "ports/1/link_layer": f"{card['layer']}\n",
            "ports/1/state": f"{card.get('state', '4: ACTIVE')}\n",
            "ports/1/phys_state": f"{card.get('physical', '5: LinkUp')}\n",
            "ports/1/rate": f"{card['rate']} Gb/sec (4X NDR)\n",
            "ports/1/counters/link_downed": "0\n",
            "ports/1/counters/symbol_error": "0\n",
            **_gids(card),
        },
    )
    _link(folder / "device", device)
    _link(root / "sys/class/infiniband" / card["name"], folder)


def _gids(card: dict[str, Any]) -> dict[str, str]:
    """An InfiniBand port has one address; one of RoCE has link-local ones first, of both versions, then its IPv4."""
    local = f"fe80:0000:0000:0000:0000:0000:0000:{int(card['name'].rpartition('_')[2]) + 1:04x}\n"
    if card["layer"] == "InfiniBand":
        return {"ports/1/gids/0": local}
    found = {"ports/1/gids/0": local, "ports/1/gids/1": local}
    if "address" in card:
        high, low = (bytes(map(int, card["address"].split("."))).hex()[part : part + 4] for part in (0, 4))
        found |= dict.fromkeys(("ports/1/gids/2", "ports/1/gids/3"), f"{'0000:' * 5}ffff:{high}:{low}\n")
    kinds = ("IB/RoCE v1\n", "RoCE v2\n")
    return found | {f"ports/1/gid_attrs/types/{index}": kinds[index % 2] for index in range(len(found))}


def _write_drives(root: Path, facts: dict[str, Any]) -> None:
    lines = ["30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"]

    def mount(number: str, name: str, point: str) -> None:
        lines.append(f"{len(lines) + 40} 1 {number} / {point} rw,relatime shared:1 - ext4 /dev/{name} rw")

    for name, array in facts.get("raid", {}).items():
        write_tree(root / "sys/devices/virtual/block" / name, {"dev": f"{array['number']}\n"})
        mount(array["number"], name, array["mount"])
    for drive in facts["nvme"]:
        device = _write_device(root, drive["at"], drive["link"])
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


class _FabricInfo(ctypes.Structure):
    _fields_ = (
        ("clusterUuid", ctypes.c_uint8 * 16),
        ("status", ctypes.c_uint),
        ("cliqueId", ctypes.c_uint32),
        ("state", ctypes.c_uint8),
    )


def _driver(gpus: list[dict[str, Any]], driver: dict[str, Any]) -> Callable[[], Any]:
    """Returns what loads a `pynvml` that answers for these GPUs; what a file does not tell is not supported."""

    def told(gpu: dict[str, Any], key: str) -> Any:
        if key not in gpu:
            raise NVMLError("Not Supported")
        return gpu[key]

    def bus(at: str) -> SimpleNamespace:
        # NVML writes eight digits of domain and upper case.
        return SimpleNamespace(busId=f"00000000:{at.split()[-1].upper()}")

    def links(gpu: dict[str, Any]) -> list[str | None]:
        """Where each link ends: the address of a GPU, or None for a switch."""
        nvlink = told(gpu, "nvlink")
        peers = [address for address, count in nvlink.get("peers", {}).items() for _ in range(count)]
        return [*peers, *[None] * nvlink.get("switches", 0)]

    def link_state(gpu: dict[str, Any], link: int) -> int:
        up, down = len(links(gpu)), gpu["nvlink"].get("down", 0)
        if link >= up + down:
            raise NVMLError("Invalid Argument")
        return int(link < up)

    def fabric(gpu: dict[str, Any], info: Any) -> int:
        info._obj.state = told(told(gpu, "nvlink"), "fabric")
        return 0

    def fields(gpu: dict[str, Any], ids: Sequence[int]) -> list[SimpleNamespace]:
        known = {90: told(gpu, "nvlink").get("mbyte_s"), 52: gpu["nvlink"].get("replays")}
        return [
            SimpleNamespace(
                fieldId=field,
                nvmlReturn=3 if known.get(field) is None else 0,
                value=SimpleNamespace(ullVal=known.get(field)),
            )
            for field in ids
        ]

    def memory(gpu: dict[str, Any]) -> SimpleNamespace:
        return SimpleNamespace(total=gpu["memory_mib"] * MIB, free=gpu["free_mib"] * MIB)

    def processes(gpu: dict[str, Any]) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=mib * MIB) for pid, mib in gpu.get("processes", ())]

    def value(key: str, index: int | None = None, scale: int = 1) -> Callable[..., Any]:
        def answer(gpu: dict[str, Any], *_: Any) -> Any:
            found = told(gpu, key) if index is None else told(gpu, key)[index]
            return found * scale

        return answer

    answers: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: driver["version"],
        "nvmlSystemGetCudaDriverVersion_v2": lambda: driver["cuda"],
        "nvmlDeviceGetCount": lambda: len(gpus),
        "nvmlDeviceGetHandleByIndex": lambda index: gpus[index],
        "nvmlDeviceGetUUID": lambda gpu: f"GPU-{gpus.index(gpu):08x}-1111-2222-3333-444444444444",
        "nvmlDeviceGetName": value("name"),
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetCudaComputeCapability": value("sm"),
        "nvmlDeviceGetPciInfo": lambda gpu: bus(gpu["at"]),
        "nvmlDeviceGetEccMode": lambda gpu: [int(gpu["ecc"])] * 2,
        "nvmlDeviceGetTotalEccErrors": lambda gpu, kind, counter: gpu.get("ecc_uncorrected", 0),
        "nvmlDeviceGetRemappedRows": value("remapped"),
        "nvmlDeviceGetRetiredPages": value("retired"),
        "nvmlDeviceGetPowerUsage": value("power_w", 0, 1000),
        "nvmlDeviceGetEnforcedPowerLimit": value("power_w", 1, 1000),
        "nvmlDeviceGetPowerManagementDefaultLimit": value("power_w", 2, 1000),
        "nvmlDeviceGetClockInfo": lambda gpu, kind: gpu["clocks_mhz"][0 if kind == 1 else 2],
        "nvmlDeviceGetMaxClockInfo": value("clocks_mhz", 1),
        "nvmlDeviceGetCurrentClocksThrottleReasons": value("throttle"),
        "nvmlDeviceGetTemperature": value("temperature"),
        "nvmlDeviceGetPersistenceMode": value("persistence"),
        "nvmlDeviceGetComputeMode": lambda gpu: gpu.get("compute_mode", 0),
        "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=0, memory=0),
        "nvmlDeviceGetBAR1MemoryInfo": lambda gpu: SimpleNamespace(bar1Total=gpu["bar1_mib"] * MIB),
        "nvmlDeviceGetMigMode": value("mig"),
        "nvmlDeviceGetFieldValues": fields,
        "nvmlDeviceGetP2PStatus": lambda gpu, other, kind: gpu.get("p2p", 0),
        "nvmlDeviceGetComputeRunningProcesses": processes,
        "nvmlDeviceGetCurrPcieLinkGeneration": value("link", 0),
        "nvmlDeviceGetCurrPcieLinkWidth": value("link", 1),
        "nvmlDeviceGetMaxPcieLinkGeneration": value("link", 2),
        "nvmlDeviceGetMaxPcieLinkWidth": value("link", 3),
        "nvmlDeviceGetNvLinkState": link_state,
        "nvmlDeviceGetNvLinkVersion": lambda gpu, link: gpu["nvlink"]["version"],
        "nvmlDeviceGetNvLinkRemoteDeviceType": lambda gpu, link: 2 if links(gpu)[link] is None else 0,
        "nvmlDeviceGetNvLinkRemotePciInfo": lambda gpu, link: bus(links(gpu)[link] or ""),
        "c_nvmlGpuFabricInfo_t": _FabricInfo,
        "nvmlDeviceGetGpuFabricInfo": fabric,
    }
    return lambda: SimpleNamespace(NVMLError=NVMLError, **answers)
