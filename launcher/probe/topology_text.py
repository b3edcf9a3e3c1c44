"""Draws who reaches whom as `nvidia-smi topo -m` does: people read that matrix already. Pure; looks at nothing."""

from __future__ import annotations

from ..machine.topology import Topology

#: Nearest first; only those that occur are explained.
_LEGEND = {
    "X": "itself",
    "NV": "that many NVLinks",
    "PIX": "one PCIe switch at most",
    "PXB": "several PCIe switches, without the host",
    "PHB": "the host bridge of a CPU",
    "NODE": "two host bridges of one NUMA node",
    "SYS": "between NUMA nodes",
    "?": "a place that /sys does not tell",
}


def topology_lines(topology: Topology) -> list[str]:
    """Returns the matrix, a line a device, with CPU and NUMA affinity of GPUs as the last columns.

    Empty where fewer than two devices are there: nothing is between them.
    """
    if len(topology.nodes) < 2:
        return []
    labels = [node.label for node in topology.nodes]
    table = [["", *labels, "CPU Affinity", "NUMA Affinity"]]
    for node, paths in zip(topology.nodes, topology.paths, strict=True):
        # As in the original, only GPUs have an affinity: ranks are bound by their GPU.
        affinity = [node.cpus or "N/A", _or_na(node.numa_node)] if node.label.startswith("GPU") else ["", ""]
        table.append([node.label, *(f" {path} " if path == "X" else path for path in paths), *affinity])
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]


def legend_lines(topology: Topology) -> list[str]:
    """Returns what the matrix's words mean, and which card each NIC is."""
    if len(topology.nodes) < 2:
        return []
    used = {"NV" if path.startswith("NV") else path for row in topology.paths for path in row}
    lines = [f"{'NV#' if word == 'NV' else word:<4} {text}" for word, text in _LEGEND.items() if word in used]
    return lines + [f"{node.label} {node.name}" for node in topology.nodes if node.label.startswith("NIC")]


def _or_na(number: int | None) -> str:
    return "N/A" if number is None else str(number)
