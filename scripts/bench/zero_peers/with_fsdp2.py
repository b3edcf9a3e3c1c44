"""FSDP2 as a contender: `fully_shard` a block and at the root, on CPU and Gloo, with torch's fused AdamW.

It has no stage 1 and no stage 2: what is measured for them keeps parameters gathered from forward to backward
(`reshard_after_forward=False`), and shards gradients and optimizer, which is nearest to stage 2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .contender import CLIPPING, LEARNING_RATE
from .job import Job

#: See `contender.prepare`.
NEEDS: tuple[str, ...] = ("torch.distributed.fsdp",)


class Sharded:
    """See `contender.Trainer`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01, fused=True)

    def forward_backward(self, batch: Tensor) -> float:
        """See `Trainer`."""
        loss = self._model(batch)
        loss.backward()
        return float(loss.detach())

    def update(self) -> None:
        """See `Trainer`."""
        nn.utils.clip_grad_norm_(self._model.parameters(), CLIPPING)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def traffic(self) -> dict[str, dict[str, int]]:
        """See `Trainer`."""
        return {}


def build(model: nn.Module, job: Job, rank: int) -> Sharded:
    """See `contender.build`."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (job.ranks,))
    dtype = torch.bfloat16 if job.bf16 else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    blocks = model.get_submodule("blocks")
    for block in blocks.children():
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=job.stage == 3)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=job.stage == 3)
    return Sharded(model)
