"""Made-up machines as small /sys and /proc trees, numbered as Linux numbers them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def write_tree(root: Path, files: Mapping[str, str]) -> Path:
    """Writes files below `root`; returns it."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def write_machine(root: Path, *, packages: int = 1, nodes: int = 1, cores: int, threads: int = 1) -> range:
    """Writes the CPUs of a regular machine: first one CPU of every core, socket by socket, then their siblings.

    Args:
        root: folder in which the tree is written.
        packages: sockets.
        nodes: NUMA nodes of a socket.
        cores: cores of a node.
        threads: CPUs of a core.

    Returns:
        the CPUs there are.
    """
    total = packages * nodes * cores
    for cpu in range(total * threads):
        core = cpu % total
        write_cpu(root, cpu, siblings=range(core, total * threads, total), package=core // (nodes * cores))
    for node in range(packages * nodes):
        mine = [cpu for cpu in range(total * threads) if cpu % total // cores == node]
        write_node(root, node, mine)
    write_tree(root, {"sys/devices/system/node/online": f"0-{packages * nodes - 1}\n"})
    return range(total * threads)


def write_cpu(root: Path, cpu: int, *, siblings: Sequence[int], package: int = 0) -> None:
    """Writes the topology of one CPU that is online."""
    folder = f"sys/devices/system/cpu/cpu{cpu}/topology"
    listed = ",".join(map(str, siblings)) + "\n"
    write_tree(root, {f"{folder}/core_cpus_list": listed, f"{folder}/physical_package_id": f"{package}\n"})


def write_node(root: Path, node: int, cpus: Sequence[int]) -> None:
    """Writes a NUMA node; one without CPUs has memory alone."""
    write_tree(root, {f"sys/devices/system/node/node{node}/cpulist": ",".join(map(str, cpus)) + "\n"})


def write_gpus(root: Path, nodes: Sequence[int]) -> list[str]:
    """Writes GPUs as the NVIDIA driver shows them in /proc, with their NUMA nodes (-1 unknown); returns their UUIDs."""
    uuids = [f"GPU-{index:08x}-1111-2222-3333-444444444444" for index in range(len(nodes))]
    for index, (uuid, node) in enumerate(zip(uuids, nodes, strict=True)):
        address = f"0000:{16 * index + 1:02x}:00.0"
        information = (
            f"Model: \t\t NVIDIA H200\nIRQ:   \t\t {index}\nGPU UUID: \t {uuid}\nBus Location: \t {address}\n"
            f"Device Minor: \t {index}\n"
        )
        write_tree(
            root,
            {
                f"proc/driver/nvidia/gpus/{address}/information": information,
                f"sys/bus/pci/devices/{address}/numa_node": f"{node}\n",
                f"dev/nvidia{index}": "",
            },
        )
    return uuids
