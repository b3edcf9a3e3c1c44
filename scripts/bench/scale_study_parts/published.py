"""Speeds that others have published for Llama 3.1 405B, with what their sources say of the layout. Predicts nothing."""

from __future__ import annotations

from dataclasses import dataclass

#: Dense bf16 FLOP/s of an H100 SXM by its datasheet, of which the source's MFU is a share.
H100_PEAK = 989e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Row:
    """A row of table 4, "Scaling configurations and MFU for each stage of Llama 3 405B pre-training".

    Source: The Llama 3 Herd of Models (Dubey et al., 2024, arXiv 2407.21783), section 3.3.2.

    Attributes:
        ranks: GPUs.
        context: ranks that share a sequence.
        data: ranks with samples of their own.
        sequence: tokens of a sample.
        samples: samples of a data rank in an update.
        tflops: TFLOP/s of a GPU.
    """

    ranks: int
    context: int
    data: int
    sequence: int
    samples: int
    tflops: float


LLAMA3 = (
    Llama3Row(ranks=8192, context=1, data=64, sequence=8192, samples=32, tflops=430),
    Llama3Row(ranks=16384, context=1, data=128, sequence=8192, samples=16, tflops=400),
    Llama3Row(ranks=16384, context=16, data=8, sequence=131072, samples=16, tflops=380),
)
LLAMA3_TENSOR, LLAMA3_PIPE = 8, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TitanRow:
    """A row of torchtitan's tables 5 and 6: 512 H100 of 96 GB, tensor 8, pipe 8, Float8, full recomputation, AsyncTP.

    Source: torchtitan's benchmarks/llama3_h100_202412_torchtitan.md; TorchTitan (Liang et al., 2024, arXiv 2410.06511).

    Attributes:
        schedule: pipeline schedule.
        context: ranks that share a sequence.
        sequence: tokens of a sample.
        samples: samples of a data rank in an update.
        tokens: tokens per second of a GPU.
    """

    schedule: str
    context: int
    sequence: int
    samples: int
    tokens: float


TITAN_RANKS, TITAN_TENSOR, TITAN_PIPE = 512, 8, 8
TITAN_1F1B = TitanRow(schedule="1f1b", context=1, sequence=8192, samples=32, tokens=100)
TITAN_INTERLEAVED = TitanRow(schedule="interleaved", context=1, sequence=8192, samples=32, tokens=128)
TITAN_LONG = (
    TitanRow(schedule="1f1b", context=1, sequence=32768, samples=8, tokens=76),
    TitanRow(schedule="1f1b", context=2, sequence=65536, samples=8, tokens=47),
    TitanRow(schedule="1f1b", context=4, sequence=131072, samples=8, tokens=31),
    TitanRow(schedule="1f1b", context=8, sequence=262144, samples=8, tokens=16),
)
#: What torchtitan 9dec370, the commit that the tables name, takes where a config says nothing: as many micro batches as
#: pipeline ranks, and two chunks a rank under interleaved schedules (torchtitan/parallelisms/pipelining_utils.py). The
#: tables tell neither, nor the sequence of table 5; llama3_405b.toml of that commit has 8,192 tokens.
TITAN_MICROS, TITAN_CHUNKS = 8, 2


def titan_bounds(blocks: int, chunks: int) -> tuple[int, ...]:
    """Returns where `generate_split_points` of that commit cuts the blocks: the first and the last chunk have fewer.

    Args:
        blocks: blocks of the model.
        chunks: chunks of all ranks.
    """
    base, more = divmod(blocks, chunks)
    bounds = [0, base]
    for _ in range(chunks - 2):
        bounds.append(bounds[-1] + base + (more > 0))
        more -= more > 0
    return (*bounds, blocks)
