"""One host's report -> rows of a table, in reading order. Takes the JSON form, which other hosts send; prints nothing.

What is seen every day comes first and fits a screen; `everything` adds what is looked up when something is wrong. GPUs'
rows are in `gpu_rows.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dsrun.units import format_bytes

from ..machine.provenance import WHY
from ..table_rows import Row, RowKind, fold_names, in_brackets, size_text
from .gpu_rows import gpu_rows

Report = Mapping[str, Any]


def rows_of(report: Report, *, everything: bool = False) -> list[Row]:
    """Returns the table's rows.

    Args:
        report: report as `ProbeReport.to_json` returns it.
        everything: whether rows that are not needed every day are there too.
    """
    return [
        *_host(report, everything),
        *_cpu(report, everything),
        *_memory(report, everything),
        *(_limits(report) if everything else ()),
        *(_numa(report) if everything else ()),
        *gpu_rows(report, everything=everything),
        *_disk(report, everything),
        *_network(report, everything),
        *_versions(report, everything),
    ]


def _host(report: Report, everything: bool) -> Iterator[Row]:
    host = report["host"]
    yield Row("host", "name", host["fqdn"] if everything and host["fqdn"] else host["name"], RowKind.OWN)
    yield Row(
        "host", "system", ", ".join(part for part in (host["os"], f"kernel {host['kernel']}", host["arch"]) if part)
    )
    places = [f"{host['container']} container" if host["container"] else None]
    places += ["virtual machine" if host["virtual"] else None, host["machine"]]
    if any(places):
        yield Row("host", "runs on", ", ".join(place for place in places if place))
    if everything:
        if host["uptime_s"] is not None:
            days = host["uptime_s"] / 86400
            yield Row("host", "up for", f"{days:.1f} days", RowKind.NOW, order=days)
        yield Row("host", "user", f"{host['user']}, umask {host['umask']}")
        yield Row("host", "core files", _or_none(report, "host.core_pattern"))


def _cpu(report: Report, everything: bool) -> Iterator[Row]:
    cpu = report["cpu"]
    yield Row("cpu", "model", _or_none(report, "cpu.model"))
    causes: list[str] = []
    if cpu["cores_in_affinity"] < cpu["cores_present"]:
        causes.append(f"affinity leaves {cpu['cores_in_affinity']}")
    if cpu["quota_cores"] is not None:
        causes.append(f"cgroup quota of {cpu['quota_cores']:g}")
    # "Cores" as the kernel counts them: hyper-threads are two.
    usable = f"{cpu['cores_usable']} usable of {cpu['cores_present']}"
    yield Row("cpu", "cores", usable + in_brackets(causes))
    if everything or (cpu["sockets"] or 1) > 1 or (cpu["threads_per_core"] or 1) > 1:
        sockets, threads = cpu["sockets"], cpu["threads_per_core"]
        yield Row(
            "cpu", "layout", f"{sockets or '?'} sockets, {cpu['cores'] or '?'} cores, {threads or '?'} threads each"
        )
    yield Row("cpu", "isa", " ".join(cpu["isa"]) or "none of note")
    if everything:
        first = {"data": "d", "instruction": "i"}
        caches = [
            f"L{cache['level']}{first.get((cache['kind'] or '').lower(), '')} {size_text(cache['size_bytes'])}"
            for cache in cpu["caches"]
        ]
        yield Row("cpu", "caches", ", ".join(caches) or "unknown")
        yield Row("cpu", "governor", _or_none(report, "cpu.governor"))


def _memory(report: Report, everything: bool) -> Iterator[Row]:
    memory, limit = report["memory"], report["memory"]["cgroup_limit_bytes"]
    causes = [] if limit is None else [f"cgroup limit of {format_bytes(limit)}"]
    yield Row("memory", "total", size_text(memory["total_bytes"]) + in_brackets(causes))
    usable = memory["usable_bytes"]
    yield Row("memory", "usable", size_text(usable), RowKind.NOW, order=usable or 0)
    shm = memory["shm_total_bytes"]
    yield Row("memory", "/dev/shm", "none" if shm is None else size_text(shm))
    swap = memory["swap_total_bytes"]
    yield Row("memory", "swap", size_text(swap) if swap else "none")
    if everything:
        pages = [f"{page['total']} of {format_bytes(page['size_bytes'])}" for page in memory["huge_pages"]]
        yield Row("memory", "huge pages", ", ".join(pages) or "none set aside")
        yield Row("memory", "transparent", _or_none(report, "memory.transparent_huge_pages"))
        group = report["cgroup"]
        yield Row("cgroup", "path", f"{group['path'] or 'unknown'} ({group['version'] or 'none'})", RowKind.OWN)
        yield Row("cgroup", "cpus", _or_none(report, "cgroup.cpuset"))
        yield Row(
            "cgroup", "processes", "no limit" if group["pids_limit"] is None else f"at most {group['pids_limit']}"
        )
        yield Row("cgroup", "OOM kills", str(group["oom_kills"] or 0), RowKind.NOW, order=group["oom_kills"] or 0)


def _limits(report: Report) -> Iterator[Row]:
    limits = report["host"]["limits"]
    if limits is None:
        return
    for name in ("nofile", "nproc"):
        yield Row("limits", name, "none" if limits[name] is None else str(limits[name]))
    for name in ("memlock", "stack", "core"):
        value = limits[f"{name}_bytes"]
        yield Row("limits", name, "none" if value is None else format_bytes(value))


def _numa(report: Report) -> Iterator[Row]:
    for node in report["numa"]:
        parts = [f"cpus {node['cpus']}" if node["cpus"] else "no cpus", size_text(node["memory_total_bytes"])]
        parts += [f"GPUs {','.join(map(str, node['gpus']))}"] if node["gpus"] else []
        parts += [" ".join([*node["nics"], *node["nvme"]])] if node["nics"] or node["nvme"] else []
        yield Row("numa", str(node["node"]), ", ".join(parts))


def _disk(report: Report, everything: bool) -> Iterator[Row]:
    disk, places = report["disk"], report["storage"]["paths"]
    kind = in_brackets([disk["filesystem"]] if disk["filesystem"] else [])
    free, total = disk["free_bytes"], size_text(disk["total_bytes"])
    yield Row(
        "disk", "free", f"{size_text(free)} of {total}{kind}", RowKind.NOW, order=free or 0, brief=size_text(free)
    )
    yield Row("disk", "at", _or_none(report, "disk.path"))
    for place in places if everything else [place for place in places if place["path"] != disk["path"]]:
        parts = [f"{size_text(place['free_bytes'])} free", place["filesystem"], place["source"]]
        parts += ["on the network"] if place["network"] else []
        parts += ["no O_DIRECT"] if place["direct_io"] is False else []
        yield Row("disk", place["path"], ", ".join(part for part in parts if part), RowKind.OWN)
    yield from _alike(
        "disk", "nvme", [(drive["name"], _drive_text(drive, everything)) for drive in report["storage"]["nvme"]]
    )


def _drive_text(drive: Mapping[str, Any], everything: bool) -> str:
    parts = [drive["model"] or "unnamed", size_text(drive["size_bytes"]), _link_text(drive["pcie"])]
    parts += [f"at {' '.join(drive['mounts'])}"] if drive["mounts"] else ["not mounted"]
    if everything:
        parts += [f"firmware {drive['firmware']}", f"NUMA {drive['numa_node']}", f"queue {drive['queue_depth']}"]
    return ", ".join(part for part in parts if part)


def _alike(section: str, label: str, parts: Sequence[tuple[str, str]]) -> Iterator[Row]:
    """Yields a row for parts of one text: `2 x TEXT (NAMES)`; names are the host's own."""
    names: dict[str, list[str]] = {}
    for name, text in parts:
        names.setdefault(text, []).append(name)
    for text, found in names.items():
        counted = f"{len(found)} x {text}" if len(found) > 1 else text
        yield Row(section, label, f"{counted} ({fold_names(found)})", brief=counted)


def _link_text(link: Mapping[str, Any]) -> str:
    if link["generation"] is None or link["width"] is None:
        return ""
    most = f"gen{link['generation_max']} x{link['width_max']}"
    now = f"gen{link['generation']} x{link['width']}"
    return f"PCIe {now}" if now == most else f"PCIe {now} of {most}"


def _network(report: Report, everything: bool) -> Iterator[Row]:
    shown = [link for link in report["network"] if everything or link["addresses"]]
    if not shown:
        reasons: Mapping[str, str] = report["null_reasons"]
        yield Row("network", "none", reasons.get("network", "no interface is up but loopback"))
    for link in shown:
        speed = f"{link['speed_mbit'] / 1000:g} Gbit/s" if (link["speed_mbit"] or 0) > 0 else None
        state = "down" if link["state"] == "down" else None
        more = [link["kind"], f"MTU {link['mtu']}", link["driver"]] if everything else []
        known = [part for part in (speed, state, *more) if part]
        text = ", ".join(link["addresses"]) or "no address"
        yield Row("network", link["interface"], text + in_brackets(known), brief=", ".join(known) or "up")
    ports = [(card, port) for card in report["rdma"] for port in card["ports"]]
    yield from _alike(
        *("network", "rdma"),
        [(card["name"], _port_text(card, port, everything)) for card, port in ports],
    )
    if everything:
        text = f"NCCL {report['nccl_interface'] or 'none'}, Gloo {report['gloo_interface'] or 'unknown'}"
        yield Row("network", "taken by", text)


def _port_text(card: Mapping[str, Any], port: Mapping[str, Any], everything: bool) -> str:
    # Of EFA the kernel says `Unknown`.
    parts = [
        "EFA" if card["kind"] == "EFA" else port["layer"],
        f"{port['rate_gbit']:g} Gbit/s" if port["rate_gbit"] else None,
        port["state"],
    ]
    parts += [f"port {port['number']}"] if len(card["ports"]) > 1 else []
    if everything:
        parts += [f"firmware {card['firmware']}", f"lost {port['link_downed']} times"]
    return ", ".join(part for part in parts if part)


def _versions(report: Report, everything: bool) -> Iterator[Row]:
    versions = report["versions"]
    yield Row("versions", "dsrun", _or_none(report, "versions.dsrun"))
    yield Row("versions", "Python", versions["python"])
    yield Row("versions", "  at", versions["python_path"])
    for label in ("torch", "CUDA", "NCCL"):
        yield Row("versions", label, _or_none(report, f"versions.{label.lower()}"))
    newest = in_brackets([f"runs CUDA up to {report['driver_cuda']}"] if report["driver_cuda"] else [])
    yield Row("versions", "driver", _or_none(report, "driver") + newest)
    if everything:
        software = report["software"]
        yield Row("versions", "environment", f"{software['environment']} at {software['prefix']}")
        for name in ("cudnn", "triton", "compiler", "nvcc", "mpi", "torch_git"):
            yield Row("versions", name.replace("_", " "), software[name] or "none")
        for name, value in software["variables"].items():
            yield Row("variables", name, value)
    if report["loaded"] is not None:
        yield from _loaded(report["loaded"])
    elif report["null_reasons"].get("loaded") != WHY["loaded"]:
        # Asked for, and failed.
        yield Row("loaded", "torch", _or_none(report, "loaded"))


def _loaded(loaded: Mapping[str, Any]) -> Iterator[Row]:
    yield Row("loaded", "torch", loaded["torch"])
    cuda = f"{loaded['devices']} devices" if loaded["cuda_available"] else "does not start"
    yield Row("loaded", "CUDA", f"built for {loaded['cuda_built']}, {cuda}" if loaded["cuda_built"] else "none")
    if loaded.get("driver_cuda"):
        yield Row("loaded", "libcuda", f"runs CUDA up to {loaded['driver_cuda']}")
    if loaded.get("architectures"):
        yield Row("loaded", "kernels for", " ".join(_sequence(loaded["architectures"])))
    for label in ("NCCL", "cuDNN"):
        yield Row("loaded", label, str(loaded[label.lower()] or "none"))
    backends = [name for name in ("nccl", "gloo", "mpi") if loaded[name]]
    yield Row("loaded", "backends", " ".join(backends) or "none")
    for library in _sequence(loaded["libraries"]):
        yield Row("loaded", "library", library)


def _sequence(value: Any) -> Sequence[str]:
    return value or ()


def _or_none(report: Report, path: str) -> str:
    """Returns the value at a dotted path, or why there is none."""
    value: Any = report
    for name in path.split("."):
        value = value[name]
    if value is not None:
        return str(value)
    reason = report["null_reasons"].get(path)
    return "none" + in_brackets([reason] if reason else [])
