"""DeepSpeed as a contender: its engine on CPU and Gloo, with torch's fused AdamW.

Its own CPU optimizer would be compiled here; torch's is the same arithmetic as everybody else's, and as fast.
"""

from __future__ import annotations

import torch
from torch import nn

from .contender import CLIPPING, LEARNING_RATE, EngineTrainer
from .job import Job

#: See `contender.prepare`.
NEEDS: tuple[str, ...] = ("deepspeed",)


def build(model: nn.Module, job: Job, rank: int) -> EngineTrainer:
    """See `contender.build`."""
    import deepspeed  # pyright: ignore[reportMissingImports]

    config = {
        "train_micro_batch_size_per_gpu": job.shape.micro,
        "bf16": {"enabled": job.bf16},
        "gradient_clipping": CLIPPING,
        "zero_optimization": {"stage": job.stage},
        "steps_per_print": 1_000_000,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=True)
    return EngineTrainer(engine)
