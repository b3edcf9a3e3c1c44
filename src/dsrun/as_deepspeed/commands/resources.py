"""Hosts and slots as DeepSpeed's scripts hold them, in dicts. Reading and choosing is the launcher's.

resource pool   host -> number of slots
resources       host -> ids of slots
"""

from __future__ import annotations

import base64
import json
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path

from dsrun.launcher.hosts.hostfile import read_hostfile
from dsrun.launcher.hosts.spec import HostSpec
from dsrun.launcher.plan.selection import select
from dsrun.log_on_ranks import logger


def fetch_hostfile(hostfile_path: str | os.PathLike[str]) -> OrderedDict[str, int] | None:
    """Reads a hostfile.

    Args:
        hostfile_path: Path of the file.

    Returns:
        the resource pool; None where there is no such file, and so this machine alone is meant.

    Raises:
        HostfileError: The file cannot be read, or lines are wrong.
    """
    if not os.path.isfile(hostfile_path):
        logger.warning("there is no hostfile %s: this machine alone is meant", hostfile_path)
        return None
    return OrderedDict((host.name, host.slots) for host in read_hostfile(Path(hostfile_path)))


def parse_inclusion_exclusion(
    resource_pool: Mapping[str, int], inclusion: str, exclusion: str
) -> OrderedDict[str, list[int]]:
    """Chooses among all slots of a resource pool.

    Args:
        resource_pool: Resource pool.
        inclusion: Filter of what to take, as `--include` has it; empty for all.
        exclusion: Filter of what to leave; empty for nothing.

    Raises:
        HostfileError: Both are given, or one names what is not there or leaves nothing.
    """
    slots = {host: range(count) for host, count in resource_pool.items()}
    chosen = parse_resource_filter(slots, inclusion, exclusion)
    return OrderedDict((host, list(ids)) for host, ids in chosen.items())


def parse_resource_filter(
    host_info: Mapping[str, Sequence[int]], include_str: str = "", exclude_str: str = ""
) -> Mapping[str, Sequence[int]]:
    """Chooses among resources.

    Args:
        host_info: Resources.
        include_str: Filter of what to take, as `--include` has it; empty for all.
        exclude_str: Filter of what to leave; empty for nothing.

    Returns:
        the resources that are left, in the same order.

    Raises:
        HostfileError: Both are given, or one names what is not there or leaves nothing.
    """
    if not include_str and not exclude_str:
        return host_info
    hosts = [
        HostSpec(name=name, slots=len(slots), gpus=tuple(slots), source="resources")
        for name, slots in host_info.items()
    ]
    chosen = select(hosts, include=include_str or None, exclude=exclude_str or None)
    return OrderedDict((host.name, list(host.slot_ids)) for host in chosen.hosts)


def encode_world_info(world_info: Mapping[str, Sequence[int]]) -> str:
    """Returns resources as base64 of JSON.

    Args:
        world_info: Resources.
    """
    return base64.urlsafe_b64encode(json.dumps(world_info).encode()).decode()
