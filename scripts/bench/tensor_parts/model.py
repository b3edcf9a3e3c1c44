"""The Llama of transformers that all contenders train, and its data. Knows no contender."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .job import Job

_SEED = 20


def llama_of(job: Job) -> Any:
    """Returns the whole model, with the same fp32 values in every process."""
    from transformers import LlamaConfig, LlamaForCausalLM  # takes seconds, and who times layers alone needs none

    torch.manual_seed(_SEED)
    config = LlamaConfig(
        hidden_size=job.hidden,
        num_hidden_layers=job.layers,
        num_attention_heads=job.heads,
        num_key_value_heads=job.key_heads,
        intermediate_size=job.inner,
        vocab_size=job.vocab,
        max_position_embeddings=job.seq,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def batch_of(job: Job, step: int) -> Tensor:
    """Returns the tokens of a step, the same for every contender and rank."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(job.vocab, (job.samples, job.seq), generator=generator)
