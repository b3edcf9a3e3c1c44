"""What torch's process groups say when a rank fails, NCCL, Gloo and the network below them, and what it means. Data.

Words of torch 2.10 to 2.15 and NCCL 2.14 to 2.30, with its plugins for InfiniBand and libfabric.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from dsrun.units import format_duration

from .host import SHM_FULL
from .rules import Cause, Rule

#: What stands in the line with which NCCL's watchdog ends a rank, wherever the line is in the rank's output.
WATCHDOG_WORDS = "Watchdog caught collective operation timeout"
#: Likewise of lines by which torch says why it ends a rank, before it writes the stacks of all its threads.
LAST_WORDS = (
    WATCHDOG_WORDS,
    "Process group watchdog thread terminated with exception",
    "ncclRemoteError: ",
    "Got completion from peer",
    "Received a dump signal",
    "watchdog got stuck",
)
_GLOO = '`init_process_group("gloo")`, or leave the backend out'
_WATCHDOG = (
    r"(?:PG GUID [^(\s]*\((?P<group>[^)]*)\)[^\n]*?)?"
    + WATCHDOG_WORDS
    + r": WorkNCCL\(SeqNum=(?P<number>\d+), OpType=(?P<operation>\w+),[^)]*(?:\(ms\)[^)]*)?\)"
    + r" ran for (?P<milliseconds>\d+) milliseconds"
)
#: c10d's names of operations, and what one calls them; others are written small.
_OPERATIONS = {
    "ALLREDUCE": "all_reduce",
    "ALLGATHER": "all_gather",
    "_ALLGATHER_BASE": "all_gather",
    "REDUCE_SCATTER": "reduce_scatter",
    "_REDUCE_SCATTER_BASE": "reduce_scatter",
    "ALLTOALL": "all_to_all",
    "ALLTOALL_BASE": "all_to_all",
}
_TIMED_OUT = Cause(
    "a collective timed out",
    "another rank never joined it: `--hang-timeout 5m` shows where each rank is before this time is over",
    timed_out=True,
)
_LOST = Cause("lost the connection to another rank", "look for the rank that ended first", follows=True)


def _of_watchdog(found: re.Match[str]) -> Cause:
    name = _OPERATIONS.get(found["operation"], found["operation"].lower().strip("_"))
    group = f" of {found['group']}" if found["group"] not in (None, "", "undefined") else ""
    waited = format_duration(int(found["milliseconds"]) / 1000)
    return replace(_TIMED_OUT, words=f"{_TIMED_OUT.words}: {name} {found['number']}{group} was not done after {waited}")


def _of_dump_signal(found: re.Match[str]) -> Cause:
    return Cause(f"a collective failed on rank {found['rank']}", f"look at rank {found['rank']} first", follows=True)


#: What a completion's status says of the path to a peer. Source: libibverbs, `enum ibv_wc_status`.
_STATUSES: Mapping[int, tuple[str, str]] = {
    4: (
        "the card may not read the memory that is sent (local protection)",
        "often GPUDirect: `modprobe nvidia_peermem` fits the driver, or NCCL_NET_GDR_LEVEL=LOC to try without",
    ),
    5: (
        "requests were dropped after an earlier error of the path",
        "the first error stands further up in the log, or in that of another rank: NCCL_DEBUG=WARN",
    ),
    10: (
        "the peer's card may not write where it is sent to (remote access)",
        "often one host runs another NCCL, plugin or nvidia_peermem than the others, or NCCL_IB_HCA names other cards",
    ),
    12: (
        "no answer after all retries",
        "a cable, a switch port or a routing that changed: `ibstat` and `perfquery` on both hosts; on RoCE also "
        "NCCL_IB_GID_INDEX and the switches' PFC and ECN. A host that lost power looks the same",
    ),
    13: ("the peer had no room to receive", "its process hangs, or its card is overloaded: `perfquery` on that host"),
}
_OTHER_STATUS = ("an error of the card", "`ibstat`, `perfquery` and `dmesg | grep mlx` on both hosts")


def _of_completion(found: re.Match[str]) -> Cause:
    status = int(found["status"])
    words, hint = _STATUSES.get(status, _OTHER_STATUS)
    return Cause(f"the InfiniBand or RoCE path to {found['peer']} failed: {words} (status {status})", hint)


def _of_modify_qp(found: re.Match[str]) -> Cause:
    remote = re.search(r"remote GID (\S+)", found.string[found.end() :].partition("\n")[0])
    # A card without an address shows `::` for both ends.
    peer = "another host" if remote is None or remote[1] == "::" else remote[1]
    return Cause(
        f"InfiniBand or RoCE could not connect to {peer}: {found['reason'].strip().lower()}",
        "cards that cannot reach each other: NCCL_IB_GID_INDEX (on RoCE that of RoCE v2, `show_gids`), NCCL_IB_HCA for "
        "cards of one network, NCCL_CROSS_NIC=0 where each rail is its own; `ibstat` must say Active",
    )


def _of_no_address(found: re.Match[str]) -> Cause:
    return Cause(
        f"Gloo finds no address for {found['name']} on this host",
        "GLOO_SOCKET_IFNAME must name an interface of this host that has an address (`ip -br addr`); without it the "
        "host's own name must be known here (`getent hosts $(hostname)`)",
    )


def _of_cuda_failure(found: re.Match[str]) -> Cause:
    return Cause(
        f"NCCL met a CUDA error: {found['name']}",
        "NCCL_DEBUG=INFO shows what it called; often the driver is older than this NCCL needs, or cannot do it here",
    )


def _of_unreached(found: re.Match[str]) -> Cause:
    reason = found["reason"].lower()
    if "refused" in reason:
        return Cause(f"no rank listens at {found['peer']} any more", "look for the rank that ended first", follows=True)
    return Cause(
        f"NCCL cannot reach {found['peer']}: {reason}",
        "a firewall, or an interface that the hosts do not share: NCCL_SOCKET_IFNAME names the right one",
    )


_MISMATCH = Cause(
    "ranks called different collectives, or with different sizes",
    "a branch, a loop or a batch that is not the same on all ranks; TORCH_DISTRIBUTED_DEBUG=DETAIL names the first",
)
_COMPLETION = (
    r"NET/IB[^\n]*?: Got completion from peer (?P<peer>[^\s<]+)\S* with (?:status=|error )(?:\w+\()?"
    r"(?P<status>{status})\b"
)

#: What a card says of itself.
HARDWARE: tuple[Rule, ...] = (
    (
        # A link that flaps comes back within seconds, and NCCL goes on.
        r"NET/IB : (?P<port>\S+?:\d+) [^\n]*async[^\n]*: (?:port error|device fatal|local catastrophic error)"
        r"(?![\s\S]*NET/IB : (?P=port) [^\n]*: port active)",
        lambda found: Cause(
            f"the InfiniBand or RoCE port {found['port']} of this host went down",
            "its cable, its switch port or the card: `ibstat`, `dmesg | grep mlx`",
        ),
    ),
)

#: What names the root.
ROOTS: tuple[Rule, ...] = (
    (_COMPLETION.format(status=r"(?!5\b)\d+"), _of_completion),
    (
        r"NET/OFI [^\n]*(?:UNDELIVERABLE|completed with error|[Uu]nreachable)",
        Cause(
            "the path over libfabric (EFA or Slingshot) to another host failed",
            "on AWS the security group must allow all traffic from and to itself, and `fi_info -p efa` list the cards "
            "on both hosts; a host that was lost looks the same",
        ),
    ),
    (
        r"Call to ibv_(?:reg_|create_|alloc_)\w+ failed with error Cannot allocate memory",
        Cause(
            "InfiniBand may not lock memory",
            "raise `ulimit -l` to unlimited on every host (a container needs `--ulimit memlock=-1`, a pod IPC_LOCK)",
        ),
    ),
    (
        r"Call to ibv_reg_(?:mr|dmabuf_mr)\w* failed with error (?:Bad address|Invalid argument)",
        Cause(
            "the card cannot use GPU memory",
            "`modprobe nvidia_peermem`, of the driver's version; NCCL_NET_GDR_LEVEL=LOC does without",
        ),
    ),
    (
        r"Call to ibv_modify_qp failed with (?![^\n]*, retrying )(?:error )?(?:\d+ )?"
        r"(?P<reason>[A-Z][a-zA-Z ]+?)(?= errno|,|$)",
        _of_modify_qp,
    ),
    (
        r"shared memory segment[^\n]*No space left|/dev/shm/nccl-[^\n]*No space left|failed to extend /dev/shm/nccl-",
        SHM_FULL,
    ),
    (
        # NCCL before 2.25 does not say why.
        r"Error while creating shared memory segment [^\n]*\(size \d+\)$",
        Cause("NCCL could not make a file in /dev/shm", f"nearly always it is full: {SHM_FULL.hint}"),
    ),
    (
        r"no socket interface found|is neither AF_INET\(\d+\) nor AF_INET6",
        Cause(
            "NCCL finds no network interface",
            "NCCL_SOCKET_IFNAME names one that is not on this host, or has no address: see `ip -br addr`",
        ),
    ),
    (
        r"[sS]ocket(?:Poll|Start|Finalize)Connect: [Cc]onnect to (?P<peer>[^\s<]+)\S* (?:returned|failed :) "
        r"(?![^\n]*, retrying )(?P<reason>[A-Z][a-z]+(?: [a-z]+)*)",
        _of_unreached,
    ),
    (
        r"Call to (?:recv from|send to) (?P<peer>[^\s<]+)\S* failed : "
        r"(?P<reason>Connection timed out|No route to host|(?:Network|Host) is (?:unreachable|down))",
        _of_unreached,
    ),
    (
        r"Message truncated : received|Detected mismatch between collectives|op\.preamble\.length <= op\.nbytes",
        _MISMATCH,
    ),
    (r"Duplicate GPU detected", Cause("two ranks use one GPU", "use LOCAL_RANK for the device, and one rank a GPU")),
    (
        r"NCCL version mismatch|Mismatched NCCL version",
        Cause(
            "hosts have different versions of NCCL", "install one torch on all hosts; `dsrun probe -H` compares them"
        ),
    ),
    (
        r"Failed to bind NVLink SHARP",
        Cause(
            "NVLink SHARP cannot be used here",
            "NCCL_NVLS_ENABLE=0 does without; the fabric manager must run, of the driver's version",
        ),
    ),
    (
        # From 2.15 on, torch's NCCL is its second one, with words of its own.
        r"ProcessGroupNCCL is only supported with GPUs|nccl2 requires at least one CUDA device",
        Cause(
            "NCCL needs a GPU, and this rank sees none",
            f"on a machine without GPUs {_GLOO}; else see CUDA_VISIBLE_DEVICES and `dsrun probe`",
        ),
    ),
    (
        r"Distributed package doesn't have NCCL built in",
        Cause("this torch is built without NCCL", f"on a machine without GPUs {_GLOO}; else install a torch with CUDA"),
    ),
    (r"Unable to find address for: (?P<name>[^\s]+)", _of_no_address),
    (
        r"Gloo connectFullMesh failed",
        Cause(
            "Gloo could not connect the ranks",
            "GLOO_SOCKET_IFNAME names the interface that all hosts share; a host name that /etc/hosts puts at "
            "127.0.1.1, or a firewall, does it too",
        ),
    ),
    (_WATCHDOG, _of_watchdog),
    (
        WATCHDOG_WORDS + r"|ncclTimeout|NCCL timeout|Timed out waiting \d+ms for (recv|send) operation"
        r"|failed to pass monitoredBarrier",
        _TIMED_OUT,
    ),
    # torch says so of errors as well as of time-outs.
    (r"Received a dump signal due to a collective timeout from +rank +(?P<rank>\d+)", _of_dump_signal),
    (
        r"ProcessGroupNCCL's watchdog got stuck|[Ww]atchdog hang",
        Cause(
            "a call of CUDA or NCCL never returned, and torch ended the rank for it",
            "look at the other ranks first; else often a GPU or its driver: `dmesg | grep -i xid` here; a thread that "
            "holds Python's lock for minutes does it too, and TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC gives it more time",
        ),
    ),
    # What has a name of its own stands in `cuda.py`.
    (r"Cuda failure (?:\d+ )?'(?P<name>[^'\n]+)'", _of_cuda_failure),
)

#: What is left where nothing else is named.
CLASSES: tuple[Rule, ...] = (
    # After the first error of a path all that is under way there is dropped with 5, and often said last.
    (_COMPLETION.format(status="5"), _of_completion),
    (
        r"ncclRemoteError|remote process exited or there was a network error|Connection closed by remote peer"
        r"|NCCL communicator was aborted|Connection closed by peer|Connection reset by peer|Broken pipe"
        r"|recvValue failed|failed to recv, got 0 bytes",
        _LOST,
    ),
    (
        r"unhandled cuda error|ncclUnhandledCudaError",
        Cause(
            "NCCL met a CUDA error", "NCCL_DEBUG=WARN names it; often no GPU memory is left, or the driver is too old"
        ),
    ),
    (
        r"unhandled system error|ncclSystemError",
        Cause("NCCL met a system error", "NCCL_DEBUG=WARN names it; often /dev/shm is full, or the network refuses"),
    ),
    (
        r"ncclInvalidUsage|NCCL error: invalid usage",
        Cause("NCCL refused a call", "NCCL_DEBUG=WARN names what was wrong with it"),
    ),
    (
        r"ncclInternalError|NCCL error: internal error",
        Cause("NCCL failed inside", "NCCL_DEBUG=WARN names it; often hosts or ranks that differ"),
    ),
    (
        # Of each address that does not answer yet torch warns, and tries again.
        r"wait timeout after \d+ms, keys|client socket has timed out|failed to connect to any network address"
        r"|store->get\('[^']*'\) got error: (Socket Timeout|wait timeout)|DistStoreError|waiting for clients",
        Cause("the other ranks were not met in time", "a rank never got that far: its own lines say why"),
    ),
)
