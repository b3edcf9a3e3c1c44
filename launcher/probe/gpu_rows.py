"""The GPUs of a report -> rows of a table: those that are alike stand in one row. Prints nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..machine.gpus.users import GpuProcess
from ..machine.known_fields import known_fields
from ..table_rows import Row, RowKind, number_ranges, size_text

Gpu = Mapping[str, Any]


def gpu_rows(report: Mapping[str, Any], *, everything: bool) -> Iterator[Row]:
    """Yields the rows.

    Args:
        report: report as `ProbeReport.to_json` returns it.
        everything: whether there is also a row for each single GPU.
    """
    gpus: Sequence[Gpu] = report["gpus"]
    if not gpus:
        yield Row("gpu", "none", report["null_reasons"].get("driver", "the driver finds no GPU"))
        return
    kinds = _alike(gpus, _text)
    for text, indices in kinds:
        which = f"{number_ranges(indices)}: " if len(kinds) > 1 else ""
        times = f"{len(indices)} x " if len(indices) > 1 else ""
        yield Row("gpu", "model", which + times + text)
    free = [gpu["memory_free_bytes"] for gpu in gpus]
    least = min((value for value in free if value is not None), default=0)
    yield Row(
        "gpu",
        "free",
        _each(gpus, lambda gpu: size_text(gpu["memory_free_bytes"])),
        RowKind.NOW,
        size_text(least),
        least,
    )
    yield _used_by(gpus)
    if any(gpu["state"] for gpu in gpus):
        yield _state(gpus)
    if len(gpus) > 1 and report["topology"]["paths"]:
        yield Row("gpu", "paths", _paths(report["topology"]))
    if everything:
        for gpu in gpus:
            yield Row("gpu", f"GPU {gpu['index']}", _details(gpu), RowKind.OWN)


def _text(gpu: Gpu) -> str:
    """Returns what a GPU is, without what changes."""
    state: Mapping[str, Any] = gpu["state"] or {}
    parts = [f"{gpu['name'] or 'unnamed'} {size_text(gpu['memory_total_bytes'])}"]
    parts += [f"sm {gpu['compute_capability']}"] if gpu["compute_capability"] else []
    pcie, nvlink = gpu["pcie"], gpu["nvlink"]
    if pcie and pcie["generation_max"] and pcie["width"]:
        # The generation falls while a GPU idles, the lanes do not.
        short = "" if pcie["width"] == pcie["width_max"] else f" of x{pcie['width_max']}"
        parts.append(f"PCIe gen{pcie['generation_max']} x{pcie['width']}{short}")
    if nvlink and nvlink["active"] + nvlink["inactive"]:
        down = f" ({nvlink['inactive']} down)" if nvlink["inactive"] else ""
        parts.append(f"{nvlink['active']} NVLinks{down}")
    if state.get("mig_enabled"):
        parts.append(f"MIG: {len(state['mig_slices']) or 'no'} slices")
    if gpu["lost"]:
        parts.append("out of reach")
    elif not gpu["usable"] and not (state.get("mig_enabled") and not state["mig_slices"]):
        parts.append("hidden by CUDA_VISIBLE_DEVICES")
    return ", ".join(parts)


def _used_by(gpus: Sequence[Gpu]) -> Row:
    known = [(gpu, gpu["state"]["processes"]) for gpu in gpus if gpu["state"] and gpu["state"]["processes"] is not None]
    busy = [
        gpu for gpu, processes in known if any(GpuProcess(**known_fields(GpuProcess, one)).counts for one in processes)
    ]
    parts = [
        f"{gpu['index']}: {one['user'] or 'someone'} (pid {one['pid']}, {size_text(one['memory_bytes'])})"
        for gpu, processes in known
        for one in processes
    ]
    text = "; ".join(parts) or ("nobody" if known else "the driver does not say")
    return Row("gpu", "used by", text, RowKind.NOW, f"{len(busy)} of {len(gpus)} busy", len(busy))


def _state(gpus: Sequence[Gpu]) -> Row:
    states: list[Mapping[str, Any]] = [gpu["state"] for gpu in gpus if gpu["state"]]
    heat = [state["temperature_c"] for state in states if state["temperature_c"] is not None]
    power = [state["power_draw_w"] for state in states if state["power_draw_w"] is not None]
    limits = sorted({round(state["power_limit_w"]) for state in states if state["power_limit_w"] is not None})
    parts = [f"{_span(heat)} °C"] if heat else []
    parts += [f"{_span([round(value) for value in power])} W of {_span(limits)} W"] if power and limits else []
    held = [(gpu["index"], ", ".join(gpu["state"]["throttle_reasons"] or ())) for gpu in gpus if gpu["state"]]
    parts += [f"GPU {index} is held back: {reason}" for index, reason in held if reason]
    hottest = max(heat, default=0)
    return Row("gpu", "now", ", ".join(parts) or "unknown", RowKind.NOW, f"{hottest} °C", hottest)


def _span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def _paths(topology: Mapping[str, Any]) -> str:
    """Returns how often each kind of way between two GPUs occurs; the whole matrix is drawn for one host alone."""
    members = [number for number, node in enumerate(topology["nodes"]) if node["label"].startswith("GPU")]
    pairs = [(one, other) for one in members for other in members if one < other]
    found = Counter(topology["paths"][one][other] for one, other in pairs)
    if len(found) == 1:
        return f"{next(iter(found))} between all"
    return ", ".join(f"{path} between {count} pairs" for path, count in sorted(found.items()))


def _details(gpu: Gpu) -> str:
    state: Mapping[str, Any] = gpu["state"] or {}
    errors = state.get("ecc_uncorrected")
    ecc = "off" if state.get("ecc_enabled") is False else "?" if errors is None else f"{errors} errors"
    parts = [gpu["uuid"], gpu["pci_address"], f"NUMA {gpu['numa_node']}", f"ECC {ecc}"]
    if state.get("sm_clock_mhz") is not None:
        parts.append(f"SM {state['sm_clock_mhz']} of {state.get('sm_clock_max_mhz')} MHz")
    parts.append(f"persistence {'on' if state.get('persistence') else 'off'}")
    parts += [f"compute mode {state['compute_mode']}"] if state.get("compute_mode") else []
    parts += [f"BAR1 {size_text(state['bar1_bytes'])}"] if state.get("bar1_bytes") else []
    parts += [f"Xid {', '.join(map(str, gpu['xids']))}"] if gpu["xids"] else []
    return ", ".join(part for part in parts if part)


def _each(gpus: Sequence[Gpu], text: Callable[[Gpu], str]) -> str:
    found = _alike(gpus, text)
    if len(found) == 1:
        return found[0][0] + (" each" if len(gpus) > 1 else "")
    return "; ".join(f"{number_ranges(indices)}: {value}" for value, indices in found)


def _alike(gpus: Sequence[Gpu], text: Callable[[Gpu], str]) -> list[tuple[str, list[int]]]:
    """Returns (text, indices of the GPUs that have it), in the order of the first of each."""
    found: dict[str, list[int]] = {}
    for gpu in gpus:
        found.setdefault(text(gpu), []).append(gpu["index"])
    return list(found.items())
