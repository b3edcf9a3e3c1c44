"""Whether NCCL talks over plain sockets on a host, or over RDMA or a plugin. Looks at files; loads nothing.

[Note: what NCCL takes] NCCL asks its plugin, then InfiniBand (RoCE is the same to it), then sockets, unless NCCL_NET
names one. A plugin in a container is no sign: NGC's bring one for InfiniBand that steps back where there is none.
InfiniBand is there for NCCL where it loads libibverbs and may open a card with a port that works: containers without
/dev/infiniband, and images without that library, have sockets beside the best cards.
Source: NCCL's user guide (NCCL_NET, NCCL_NET_PLUGIN, NCCL_IB_DISABLE); its src/misc/ibvsymbols.cc.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..software.libcuda import library_path
from .interfaces import RdmaDevice

#: What to do where it is missing and there are EFA devices.
EFA_FIX = (
    "install AWS's EFA software (aws-ofi-nccl, /opt/amazon/efa), also in images; LD_LIBRARY_PATH leads to its plugin"
)


#: As NCCL tries them.
_VERBS = ("libibverbs.so", "libibverbs.so.1")


def why_no_sockets(
    environ: Mapping[str, str], cards: Sequence[RdmaDevice], *, has_plugin: bool, has_verbs: bool = True
) -> str | None:
    """Says why NCCL takes no sockets here; None if it takes them. See [Note: what NCCL takes].

    Args:
        environ: of a rank.
        cards: RDMA devices of the host.
        has_plugin: a network plugin is installed; EFA is reached by one alone.
        has_verbs: the loader finds libibverbs; InfiniBand and RoCE are reached by it.
    """
    net = environ.get("NCCL_NET", "")
    if net:
        return None if net.lower() == "socket" else f"NCCL_NET={net}"
    plugin = environ.get("NCCL_NET_PLUGIN", "")
    if plugin and plugin.lower() != "none":
        return f"NCCL_NET_PLUGIN={plugin}"
    works = [card for card in cards if card.may_open and any(port.state == "ACTIVE" for port in card.ports)]
    if environ.get("NCCL_IB_DISABLE", "0") not in ("", "0") or not has_verbs:
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


def read_no_sockets(root: Path, environ: Mapping[str, str], cards: Sequence[RdmaDevice]) -> str | None:
    """Looks which libraries NCCL would load here, and says what `why_no_sockets` does.

    Args:
        root: `/`, or a made-up tree.
        environ: of a rank: LD_LIBRARY_PATH is read.
        cards: RDMA devices of the host.
    """
    return why_no_sockets(
        environ,
        cards,
        has_plugin=find_net_plugin(root, environ) is not None,
        has_verbs=any(library_path(root, environ, name) is not None for name in _VERBS),
    )
