"""GPUs by name: memory and datasheet speeds, each with its source. Knows nothing of the machine it runs on.

Speeds are peaks as vendors print them: dense (no sparsity), in one direction of a link. What of a peak can be reached
is `ACHIEVABLE`, printed with every plan.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from dsrun.errors import UsageError

#: Share of the datasheet's figure that large kernels and transfers reach: GEMMs of 8192^3 and NCCL rings are seen at
#: 0.75 to 0.85 of their peak on A100 and H100, streaming reads and writes of device memory at about 0.9.
ACHIEVABLE = {"compute": 0.8, "memory": 0.9, "links": 0.8}

_GB = 10**9
_MIB = 1 << 20
#: Bytes per second that a search takes paths of unknown speed for, by the names of `Speeds`, so that nothing unknown is
#: free. Assumed, not measured, and never told as a time: slow ones of their kind. A GPU of a few generations ago; ranks
#: of a host over PCIe 3.0 x8; hosts over 10 Gb/s Ethernet; a core's part of its processor's memory; two channels of
#: DDR4-2666; one drive on PCIe 3.0 x4.
CAUTIOUS = {
    "flops": 50e12,
    "memory": 10e9,
    "peer": 8e9,
    "network": 1.25e9,
    "pcie": 8e9,
    "ddr": 40e9,
    "nvme_read": 3e9,
    "nvme_write": 1e9,
}
#: The same of a rank that computes on a core.
CAUTIOUS_CORE_FLOPS = 50e9


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """One GPU as its datasheet describes it; None where the vendor names no figure.

    Attributes:
        name: our name, with the memory on the label.
        memory_bytes: total bytes of the GPU's memory as the driver reports them.
        half_flops: dense tensor-core FLOP/s in bf16 (fp16 where there is no bf16) with fp32 accumulation.
        single_flops: FLOP/s in fp32 outside of tensor cores, which is what torch uses unless told otherwise.
        memory_bytes_per_s: bandwidth of its memory, reads and writes together.
        pcie_bytes_per_s: PCIe, one direction.
        peer_bytes_per_s: bytes per second to the other GPUs of its host, in one direction: NVLink, or PCIe where there
            is none.
        network_bytes_per_s: its share of the host's network in the vendor's reference system, one direction.
        ddr_bytes_per_s: its share of the host's memory bandwidth in that system.
        source: document that states the figures.
    """

    name: str
    memory_bytes: int
    half_flops: float
    single_flops: float
    memory_bytes_per_s: float
    pcie_bytes_per_s: float
    peer_bytes_per_s: float
    network_bytes_per_s: float | None = None
    ddr_bytes_per_s: float | None = None
    source: str


def _gpu(
    name: str,
    mib: int,
    tflops: tuple[float, float],
    *,
    hbm: float,
    pcie: float,
    peer: float,
    source: str,
    network: float | None = None,
    ddr: float | None = None,
) -> GpuSpec:
    """A row: memory in MiB, TFLOP/s in half and single precision, bandwidths in GB/s."""
    return GpuSpec(
        name=name,
        memory_bytes=mib * _MIB,
        half_flops=tflops[0] * 1e12,
        single_flops=tflops[1] * 1e12,
        memory_bytes_per_s=hbm * _GB,
        pcie_bytes_per_s=pcie * _GB,
        peer_bytes_per_s=peer * _GB,
        network_bytes_per_s=None if network is None else network * _GB,
        ddr_bytes_per_s=None if ddr is None else ddr * _GB,
        source=source,
    )


_A100 = "NVIDIA A100 datasheet (2021); host as in DGX A100: 8 HDR links, 16 channels of DDR4-3200 for 8 GPUs"
_H100 = "NVIDIA H100 datasheet (2022, dense); host as in DGX H100: 8 NDR links, 16 channels of DDR5-4800 for 8 GPUs"
_H200 = "NVIDIA H200 datasheet (2023, dense); host as in DGX H200: 8 NDR links, 16 channels of DDR5-4800 for 8 GPUs"
_B200 = "NVIDIA DGX B200 and HGX B200 datasheets (2024, dense); 8 NDR links, 16 channels of DDR5-5600 for 8 GPUs"

CATALOGUE: tuple[GpuSpec, ...] = (
    _gpu("A100-40G", 40960, (312, 19.5), hbm=1555, pcie=32, peer=300, network=25, ddr=51.2, source=_A100),
    _gpu("A100-80G", 81920, (312, 19.5), hbm=2039, pcie=32, peer=300, network=25, ddr=51.2, source=_A100),
    _gpu("H100-80G", 81559, (989, 67), hbm=3350, pcie=64, peer=450, network=50, ddr=76.8, source=_H100),
    _gpu(
        "H100-PCIe-80G", 81559, (756, 51), hbm=2000, pcie=64, peer=64, source="NVIDIA H100 PCIe datasheet (2022, dense)"
    ),
    _gpu("H200-141G", 143771, (989, 67), hbm=4800, pcie=64, peer=450, network=50, ddr=76.8, source=_H200),
    _gpu("B200-180G", 183359, (2250, 75), hbm=8000, pcie=64, peer=900, network=50, ddr=89.6, source=_B200),
    _gpu("L40S-48G", 46068, (362, 91.6), hbm=864, pcie=32, peer=32, source="NVIDIA L40S datasheet (2023, dense)"),
    _gpu("L4-24G", 23034, (121, 30.3), hbm=300, pcie=32, peer=32, source="NVIDIA L4 datasheet (2023, dense)"),
    _gpu("A10-24G", 23028, (125, 31.2), hbm=600, pcie=32, peer=32, source="NVIDIA A10 datasheet (2021, dense)"),
    _gpu(
        "A6000-48G", 49140, (154.8, 38.7), hbm=768, pcie=32, peer=32, source="NVIDIA RTX A6000 datasheet (2020, dense)"
    ),
    _gpu(
        "RTX3090-24G",
        24576,
        (71, 35.6),
        hbm=936,
        pcie=32,
        peer=32,
        source="NVIDIA Ampere GA102 whitepaper (2020), bf16 with fp32 accumulation",
    ),
    _gpu(
        "RTX4090-24G",
        24564,
        (165.2, 82.6),
        hbm=1008,
        pcie=32,
        peer=32,
        source="NVIDIA Ada whitepaper (2022), bf16 with fp32 accumulation",
    ),
    _gpu(
        "RTX5090-32G",
        32607,
        (209.5, 104.8),
        hbm=1792,
        pcie=64,
        peer=64,
        source="NVIDIA Blackwell RTX whitepaper (2025), bf16 with fp32 accumulation",
    ),
    _gpu("V100-16G", 16160, (125, 15.7), hbm=900, pcie=16, peer=150, source="NVIDIA V100 datasheet (2020), fp16"),
    _gpu("V100-32G", 32510, (125, 15.7), hbm=900, pcie=16, peer=150, source="NVIDIA V100 datasheet (2020), fp16"),
    _gpu("T4-16G", 15109, (65, 8.1), hbm=320, pcie=16, peer=16, source="NVIDIA T4 datasheet (2019), fp16"),
)

#: Words of a driver's product name that decide which row it is; every word of one tuple has to be there.
_PRODUCTS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("a100", "40gb"), "A100-40G"),
    (("a100", "80gb"), "A100-80G"),
    (("h100", "pcie"), "H100-PCIe-80G"),
    (("h100", "80gb"), "H100-80G"),
    (("h200",), "H200-141G"),
    (("b200",), "B200-180G"),
    (("l40s",), "L40S-48G"),
    (("l4",), "L4-24G"),
    (("a10",), "A10-24G"),
    (("a6000",), "A6000-48G"),
    (("rtx", "3090"), "RTX3090-24G"),
    (("rtx", "4090"), "RTX4090-24G"),
    (("rtx", "5090"), "RTX5090-32G"),
    (("v100", "16gb"), "V100-16G"),
    (("v100", "32gb"), "V100-32G"),
    (("t4",), "T4-16G"),
)


def find_gpu(name: str) -> GpuSpec:
    """Returns the GPU that a user names: `H100-80G`, `h100`, `rtx 4090`; without memory the largest of its kind.

    Raises:
        UsageError: there is no such GPU here; the hint has the names that come close, or all.
    """
    wanted = _plain(name)
    exact = [gpu for gpu in CATALOGUE if wanted in (_plain(gpu.name), f"{_plain(gpu.name)}b")]
    of_kind = [gpu for gpu in CATALOGUE if wanted and wanted == _plain(gpu.name.rpartition("-")[0])]
    if found := exact or of_kind:
        return max(found, key=lambda gpu: gpu.memory_bytes)
    names = {_plain(text): gpu.name for gpu in CATALOGUE for text in (gpu.name.rpartition("-")[0], gpu.name)}
    close = difflib.get_close_matches(wanted, names, n=3, cutoff=0.6)
    close = list(dict.fromkeys(names[key] for key in close)) or [gpu.name for gpu in CATALOGUE]
    raise UsageError(f"GPU `{name}` is not in the catalogue", hint=f"expected {_alternatives(close)}")


def find_product(product: str) -> GpuSpec | None:
    """Returns the GPU behind a driver's product name, e.g. `NVIDIA A100-SXM4-80GB`; None for an unknown one."""
    words = set(re.split(r"[^a-z0-9]+", product.lower()))
    name = next((name for needed, name in _PRODUCTS if words.issuperset(needed)), None)
    return next((gpu for gpu in CATALOGUE if gpu.name == name), None)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower().removeprefix("nvidia"))


def _alternatives(names: list[str]) -> str:
    quoted = [f"`{name}`" for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"
