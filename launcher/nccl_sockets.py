"""Whether NCCL talks over plain sockets on a host, or over RDMA or a plugin. Looks at files; loads nothing.

[Note: what NCCL takes] NCCL asks its plugin, then InfiniBand (RoCE is the same to it), then sockets, unless NCCL_NET
names one. A plugin in a container is no sign: NGC's bring one for InfiniBand that steps back where there is none.
Source: NCCL's user guide (NCCL_NET, NCCL_NET_PLUGIN, NCCL_IB_DISABLE).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from .probe_libcuda import library_path
from .probe_network import RdmaDevice

#: What to do where it is missing and there are EFA devices.
EFA_FIX = (
    "install AWS's EFA software (aws-ofi-nccl, /opt/amazon/efa), also in images; LD_LIBRARY_PATH leads to its plugin"
)


def why_no_sockets(environ: Mapping[str, str], cards: Sequence[RdmaDevice], *, has_plugin: bool) -> str | None:
    """Says why NCCL takes no sockets here; None if it takes them. See [Note: what NCCL takes].

    Args:
        environ: of a rank.
        cards: RDMA devices of the host.
        has_plugin: a network plugin is installed; EFA is reached by one alone.
    """
    net = environ.get("NCCL_NET", "")
    if net:
        return None if net.lower() == "socket" else f"NCCL_NET={net}"
    plugin = environ.get("NCCL_NET_PLUGIN", "")
    if plugin and plugin.lower() != "none":
        return f"NCCL_NET_PLUGIN={plugin}"
    works = [card for card in cards if any(port.state == "ACTIVE" for port in card.ports)]
    if environ.get("NCCL_IB_DISABLE", "0") not in ("", "0"):
        # EFA is a plugin's, which does not ask that variable.
        works = [card for card in works if card.kind == "EFA"]
    if not has_plugin:
        works = [card for card in works if card.kind != "EFA"]
    return f"{works[0].name} does RDMA" if works else None


def find_net_plugin(root: Path, environ: Mapping[str, str]) -> str | None:
    """Returns the path of the network plugin that NCCL would load; None where the loader finds none.

    One that is installed where the loader does not look is none: images often have that.

    Args:
        root: `/`, or a made-up tree.
        environ: of a rank: LD_LIBRARY_PATH is read.
    """
    return library_path(root, environ, "libnccl-net.so")
