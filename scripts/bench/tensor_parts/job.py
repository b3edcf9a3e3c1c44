"""What one rank of a contender shall build and run, as a value that travels as JSON. Imports no contender."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from teams.job import JsonJob


@dataclass(frozen=True, slots=True)
class Job(JsonJob):
    """One rank's work on a Llama.

    Attributes:
        program: module that a rank runs.
        contender: `dsrun`, `torch` (DTensor, by transformers' own plan), `deepspeed` (AutoTP), `plain` (one process
            that has the whole model), or `linear` (layers alone, see `linears.py`).
        ranks: number of ranks, which share every layer.
        stage: ZeRO stage of the engines.
        bf16: whether parameters and gradients are bf16 with fp32 masters, else all is fp32.
        tensor_options: keys of dsrun's section `tensor_parallel` beside the size.
        hidden: width.
        layers: number of blocks.
        heads: number of heads of queries.
        key_heads: number of heads of keys and values.
        inner: width inside of a block's MLP.
        vocab: tokens there are.
        samples: samples of a step.
        seq: tokens of a sample.
    """

    program: ClassVar[str] = "tensor_parts.rank"

    contender: str
    ranks: int
    stage: int = 0
    bf16: bool = False
    tensor_options: dict[str, bool] = field(default_factory=dict[str, bool])
    hidden: int = 512
    layers: int = 8
    heads: int = 8
    key_heads: int = 4
    inner: int = 1408
    vocab: int = 8192
    samples: int = 4
    seq: int = 128
