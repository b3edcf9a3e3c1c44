"""Whether NCCL talks over plain sockets on a host, or over RDMA or a plugin. Looks at files; loads nothing.

[Note: what NCCL takes] NCCL asks its plugin, then InfiniBand (RoCE is the same to it), then sockets, unless NCCL_NET
names one. A plugin in a container is no sign: NGC's bring one for InfiniBand that steps back where there is none.
Source: NCCL's user guide (NCCL_NET, NCCL_NET_PLUGIN, NCCL_IB_DISABLE).
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from .probe_network import RdmaDevice

#: Where AWS's installer, its containers and distributions put the library, beside LD_LIBRARY_PATH.
_PLUGIN_FOLDERS = (
    *("opt/amazon/ofi-nccl/lib*", "opt/amazon/ofi-nccl/lib/*-linux-gnu", "opt/amazon/aws-ofi-nccl/lib*"),
    *("opt/aws-ofi-nccl/lib*", "usr/local/lib*", "usr/lib*", "usr/lib/*-linux-gnu"),
)
_PLUGIN = "libnccl-net*.so*"
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
    """Returns the path of a network plugin that NCCL would load; None where there is none in the usual places.

    Args:
        root: `/`, or a made-up tree.
        environ: where LD_LIBRARY_PATH is read.
    """
    searched = [folder.lstrip("/") for folder in environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    for folder in (*(glob.escape(folder) for folder in searched), *_PLUGIN_FOLDERS):
        found = sorted(glob.glob(os.path.join(glob.escape(str(root)), folder, _PLUGIN)))
        if found:
            return f"/{os.path.relpath(found[0], root)}"
    return None
