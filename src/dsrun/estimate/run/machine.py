"""What a run may use: ranks, memory of each kind, and speeds of the paths between them. A value; nothing is probed."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from dsrun.estimate.run.catalogue import ACHIEVABLE, CAUTIOUS, CAUTIOUS_CORE_FLOPS, GpuSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Achievable speeds; None where nothing tells. Bytes per second, FLOP/s for `flops`.

    Attributes:
        flops: FLOP/s of one rank, in the format the model computes in; None where it is not known.
        memory: bytes per second of one rank's GPU memory, reads and writes together; None where it is not known.
        peer: bytes per second from one rank to another on its host, in one direction; None where it is not known.
        network: bytes per second from one host to the others, in one direction, all its links together; None where it
            is not known.
        pcie: bytes per second of one rank's PCIe link, in one direction; None where it is not known.
        ddr: bytes per second of one host's memory, all its ranks together; None where it is not known.
        nvme_read: bytes per second that one host reads from all its drives together; None where it is not known.
        nvme_write: the same for writing.
    """

    flops: float | None = None
    memory: float | None = None
    peer: float | None = None
    network: float | None = None
    pcie: float | None = None
    ddr: float | None = None
    nvme_read: float | None = None
    nvme_write: float | None = None

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Returns the names of the speeds."""
        return tuple(field.name for field in fields(cls))


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The hosts of a run; all alike.

    Attributes:
        label: name of the machine in tables, as it was given.
        ranks: ranks of the job.
        ranks_per_host: ranks on each host; the last host may have fewer.
        gpu: GPU of each rank; None for ranks on the CPU.
        gpu_memory_bytes: memory of one GPU that a rank may use; None for ranks on the CPU.
        host_memory_bytes: memory of one host that its ranks may use together; None where nothing tells.
        nvme_bytes: space of one host for offloading; None where nothing tells.
        cores_per_host: cores on which the ranks of a host compute and copy; with more ranks than cores, speeds are
            those of a rank that has a core to itself. None where each rank has a processor of its own.
        given: speeds the user stated; they go before those of the catalogue.
        notes: assumptions that were made, in words.
    """

    label: str
    ranks: int
    ranks_per_host: int
    gpu: GpuSpec | None = None
    gpu_memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    nvme_bytes: int | None = None
    cores_per_host: float | None = None
    given: Speeds = Speeds()
    notes: tuple[str, ...] = ()

    @property
    def hosts(self) -> int:
        """How many hosts."""
        return -(-self.ranks // self.ranks_per_host)

    @property
    def on_cpu(self) -> bool:
        """Whether ranks compute on the CPU, so that all state lies in host memory."""
        return self.gpu_memory_bytes is None

    @property
    def ranks_per_core(self) -> float:
        """Ranks that take turns on a core when all of a host compute at once; 1 where each has its own."""
        return 1.0 if self.cores_per_host is None else max(1.0, self.ranks_per_host / self.cores_per_host)

    def with_ranks(self, ranks: int) -> Machine:
        """Returns the machine with another number of ranks on as many hosts as they need."""
        return replace(self, ranks=ranks, ranks_per_host=min(self.ranks_per_host, ranks))

    def speeds(self, *, half: bool) -> Speeds:
        """Returns achievable speeds: the user's, else the catalogue's times `ACHIEVABLE`, else None.

        Args:
            half: the model computes in bf16 or fp16.
        """
        known = Speeds() if self.gpu is None else _speeds_of(self.gpu, self.ranks_per_host, half=half)
        stated = {name: value for name in Speeds.names() if (value := getattr(self.given, name)) is not None}
        return replace(known, **stated)

    def with_cautious_speeds(self) -> Machine:
        """Returns the machine with cautious speeds where nothing tells, for a choice among layouts."""
        known = self.speeds(half=True)
        unknown = {name: self.cautious_speed(name) for name in Speeds.names() if getattr(known, name) is None}
        return replace(self, given=replace(self.given, **unknown)) if unknown else self

    def cautious_speed(self, name: str) -> float:
        """Returns what a choice takes a speed for that is not known: a slow one of its kind, see `CAUTIOUS`.

        Args:
            name: name of the speed.
        """
        return CAUTIOUS_CORE_FLOPS if name == "flops" and self.on_cpu else CAUTIOUS[name]


def _speeds_of(gpu: GpuSpec, ranks_per_host: int, *, half: bool) -> Speeds:
    links = ACHIEVABLE["links"]
    network, ddr = gpu.network_bytes_per_s, gpu.ddr_bytes_per_s
    return Speeds(
        flops=(gpu.half_flops if half else gpu.single_flops) * ACHIEVABLE["compute"],
        memory=gpu.memory_bytes_per_s * ACHIEVABLE["memory"],
        peer=gpu.peer_bytes_per_s * links,
        network=None if network is None else network * links * ranks_per_host,
        pcie=gpu.pcie_bytes_per_s * links,
        ddr=None if ddr is None else ddr * links * ranks_per_host,
    )
