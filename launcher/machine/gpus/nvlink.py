"""How GPUs reach each other, as NVML tells: NVLinks, the fabric of NVSwitches, access to each other's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..pci import pci_address
from .nvml import ask, text_of

#: NVML_NVLINK_MAX_LINKS: no driver so far numbers more. Hopper and Blackwell have 18.
_MOST_LINKS = 36
_TO_GPU, _TO_SWITCH = 0, 2
_READ = 0
#: Fields of NVML: totals of CRC errors in flits and in data, of replays and of recoveries; speed of a link.
_ERROR_FIELDS = (38, 45, 52, 59)
_SPEED_FIELD = 90
#: NVML's status of peer access, in the words of `nvidia-smi topo -p2p r`.
_PEER_WORDS = ("OK", "CNS", "GNS", "TNS", "DR", "NS", "U")
_SUCCESS = 0
_FABRIC_STATES = ("not supported", "not started", "in progress", "completed")


@dataclass(frozen=True, slots=True, kw_only=True)
class NvLinkPeer:
    """Links to one GPU without a switch between; `address` is its PCI address."""

    address: str
    links: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NvLinks:
    """The links of one GPU; all zero where it has none.

    Attributes:
        version: generation of the links, as NVML counts it.
        active: links that are up.
        inactive: links that are there and down.
        to_switches: number of active links that end at an NVSwitch, and so reach every GPU on it.
        peers: the other GPUs the rest of them end at.
        link_mbyte_s: speed of one link, in one direction.
        errors: transfers that were wrong, repeated or had to be recovered since the driver was loaded, over all links.
        fabric: state of the registration with the NVSwitch fabric; CUDA starts nothing before it is `completed`. None
            where the GPU is in no fabric.
        fabric_error: error that kept the GPU out of the fabric, where registration is completed and has failed; else
            None.
    """

    version: int | None
    active: int
    inactive: int
    to_switches: int
    peers: tuple[NvLinkPeer, ...]
    link_mbyte_s: int | None
    errors: int | None
    fabric: str | None
    fabric_error: str | None = None


def read_nvlinks(nvml: Any, handle: Any) -> NvLinks:
    """Asks for the links of one GPU.

    Args:
        nvml: the open driver.
        handle: NVML handle of the GPU.
    """
    active: list[int] = []
    inactive = 0
    for link in range(_MOST_LINKS):
        up = ask(nvml, "nvmlDeviceGetNvLinkState", handle, link)
        if up is None:
            # Links are numbered without gaps: a GPU without any is asked one question, not all.
            break
        if up:
            active.append(link)
        else:
            inactive += 1
    kinds = {link: ask(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link) for link in active}
    peers: dict[str, int] = {}
    for link in (link for link, kind in kinds.items() if kind == _TO_GPU):
        info = ask(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
        address = None if info is None else pci_address(text_of(info.busId) or "")
        if address is not None:
            peers[address] = peers.get(address, 0) + 1
    values = _field_values(nvml, handle) if active or inactive else {}
    errors = [values[field] for field in _ERROR_FIELDS if field in values]
    fabric, fabric_error = _fabric(nvml, handle) if active or inactive else (None, None)
    return NvLinks(
        version=ask(nvml, "nvmlDeviceGetNvLinkVersion", handle, active[0]) if active else None,
        active=len(active),
        inactive=inactive,
        to_switches=sum(kind == _TO_SWITCH for kind in kinds.values()),
        peers=tuple(NvLinkPeer(address=address, links=links) for address, links in sorted(peers.items())),
        link_mbyte_s=values.get(_SPEED_FIELD),
        errors=sum(errors) if errors else None,
        fabric=fabric,
        fabric_error=fabric_error,
    )


def read_peer_access(nvml: Any, handle: Any, index: int, others: Sequence[Any]) -> tuple[str, ...]:
    """Asks which GPUs' memory a GPU may read without the host in between.

    Args:
        nvml: the open driver.
        handle: NVML handle of the GPU that would read the other GPUs' memory.
        index: its place among `others`.
        others: handles of all GPUs, in order; None for one that is lost.

    Returns:
        a word a GPU, in order: `X` for itself, `OK`, or why not: `CNS` chipset, `GNS` GPU, `TNS` topology, `DR`
        registry key, `NS` not supported, `U` unknown.
    """
    words: list[str] = []
    for place, other in enumerate(others):
        status = None if place == index or other is None else ask(nvml, "nvmlDeviceGetP2PStatus", handle, other, _READ)
        if place == index:
            words.append("X")
        else:
            words.append("U" if status is None or status >= len(_PEER_WORDS) else _PEER_WORDS[status])
    return tuple(words)


def links_between(one: NvLinks, one_address: str, other: NvLinks, other_address: str) -> int:
    """Returns over how many links two GPUs reach each other: those between them, or through the switches."""
    direct = [peer.links for peer in one.peers if peer.address == other_address]
    direct += [peer.links for peer in other.peers if peer.address == one_address]
    return max([*direct, min(one.to_switches, other.to_switches)])


def _field_values(nvml: Any, handle: Any) -> dict[int, int]:
    """Asks for several counters at once; those this kind of GPU has not are left out."""
    found: Sequence[Any] = ask(nvml, "nvmlDeviceGetFieldValues", handle, [*_ERROR_FIELDS, _SPEED_FIELD]) or ()
    return {value.fieldId: int(value.value.ullVal) for value in found if value.nvmlReturn == 0}


def _fabric(nvml: Any, handle: Any) -> tuple[str | None, str | None]:
    """Returns how far registration with the fabric got, and the error it ended with."""
    kind = getattr(nvml, "c_nvmlGpuFabricInfo_t", None)
    if kind is None:
        return None, None
    # The launch imports this module for its types alone, and ctypes costs it milliseconds.
    import ctypes

    info = kind()
    if ask(nvml, "nvmlDeviceGetGpuFabricInfo", handle, ctypes.byref(info)) is None:
        return None, None
    state = _FABRIC_STATES[info.state] if 0 < info.state < len(_FABRIC_STATES) else None
    # NVML: the status is to be looked at once the state is completed.
    if state != "completed" or info.status == _SUCCESS:
        return state, None
    said = text_of(ask(nvml, "nvmlErrorString", info.status))
    return state, said or f"NVML's error {info.status}"
