"""Whether NCCL talks over plain sockets on a host, or over RDMA or a plugin. Looks at files; loads nothing.

[Note: what NCCL takes] NCCL asks its plugin, then InfiniBand (RoCE is the same to it), then sockets, unless NCCL_NET
names one. A plugin in a container is no sign: NGC's bring one for InfiniBand that steps back where there is none.
InfiniBand is there for NCCL where it loads libibverbs and may open a card with a port that works: containers without
/dev/infiniband, and images without that library, have sockets beside the best cards.
Source: NCCL's user guide (NCCL_NET, NCCL_NET_PLUGIN, NCCL_IB_DISABLE); its src/misc/ibvsymbols.cc.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..software.libcuda import library_path
from .interfaces import RdmaDevice

#: Variables that name NCCL's network, whatever there is.
NET_VARIABLES = ("NCCL_NET", "NCCL_NET_PLUGIN")
#: As NCCL tries them.
_VERBS = ("libibverbs.so", "libibverbs.so.1")


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclLibraries:
    """Libraries that NCCL would load for a network: paths; None where the loader finds none.

    One that is installed where the loader does not look is none: images often have that.

    Attributes:
        net_plugin: plugin by which NCCL takes networks other than InfiniBand and sockets.
        verbs: library by which NCCL takes InfiniBand and RoCE.
    """

    net_plugin: str | None
    verbs: str | None


def why_no_sockets(environ: Mapping[str, str], cards: Sequence[RdmaDevice], *, libraries: NcclLibraries) -> str | None:
    """Says why NCCL takes no sockets here; None if it takes them. See [Note: what NCCL takes].

    Args:
        environ: environment variables of a rank.
        cards: RDMA devices of the host.
        libraries: libraries that NCCL would load; EFA is reached by a plugin alone.
    """
    net = environ.get("NCCL_NET", "")
    if net:
        return None if net.lower() == "socket" else f"NCCL_NET={net}"
    plugin = environ.get("NCCL_NET_PLUGIN", "")
    if plugin and plugin.lower() != "none":
        return f"NCCL_NET_PLUGIN={plugin}"
    works = [card for card in cards if card.works]
    if environ.get("NCCL_IB_DISABLE", "0") not in ("", "0") or libraries.verbs is None:
        # EFA is a plugin's, which does not ask that variable.
        works = [card for card in works if card.kind == "EFA"]
    if libraries.net_plugin is None:
        works = [card for card in works if card.kind != "EFA"]
    return f"{works[0].name} does RDMA" if works else None


def read_libraries(root: Path, environ: Mapping[str, str]) -> NcclLibraries:
    """Looks which libraries NCCL would load here.

    Args:
        root: `/`, or a made-up tree.
        environ: environment variables of a rank; LD_LIBRARY_PATH is read.
    """
    verbs = (library_path(root, environ, name) for name in _VERBS)
    return NcclLibraries(
        net_plugin=library_path(root, environ, "libnccl-net.so"), verbs=next((path for path in verbs if path), None)
    )


def read_no_sockets(root: Path, environ: Mapping[str, str], cards: Sequence[RdmaDevice]) -> str | None:
    """Looks which libraries NCCL would load here, and says what `why_no_sockets` does.

    Args:
        root: `/`, or a made-up tree.
        environ: environment variables of a rank, of which LD_LIBRARY_PATH and NCCL's own are read.
        cards: RDMA devices of the host.
    """
    return why_no_sockets(environ, cards, libraries=read_libraries(root, environ))
