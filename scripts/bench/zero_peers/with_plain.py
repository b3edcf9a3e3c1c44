"""Plain torch as a contender: no ranks, no sharding, the same optimizer. In bf16, with masters in fp32."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .contender import CLIPPING, LEARNING_RATE
from .job import Job

#: See `contender.prepare`.
NEEDS: tuple[str, ...] = ()


class Plain:
    """See `contender.Trainer`."""

    def __init__(self, model: nn.Module, *, bf16: bool) -> None:
        self._model = model
        self._params = list(model.parameters())
        self._masters = [nn.Parameter(p.detach().clone()) for p in self._params] if bf16 else self._params
        if bf16:
            model.to(torch.bfloat16)
            self._params = list(model.parameters())
        self._optimizer = torch.optim.AdamW(self._masters, lr=LEARNING_RATE, weight_decay=0.01, fused=True)

    def forward_backward(self, batch: Tensor) -> float:
        """See `Trainer`."""
        loss = self._model(batch)
        loss.backward()
        return float(loss.detach())

    def update(self) -> None:
        """See `Trainer`."""
        separate = self._masters is not self._params
        if separate:
            for param, master in zip(self._params, self._masters, strict=True):
                assert param.grad is not None, "every parameter is used"
                master.grad = param.grad.float()
                param.grad = None
        nn.utils.clip_grad_norm_(self._masters, CLIPPING)
        self._optimizer.step()
        if separate:
            with torch.no_grad():
                for param, master in zip(self._params, self._masters, strict=True):
                    param.copy_(master)
        self._optimizer.zero_grad()

    def traffic(self) -> dict[str, dict[str, int]]:
        """See `Trainer`."""
        return {}


def build(model: nn.Module, job: Job, rank: int) -> Plain:
    """See `contender.build`."""
    return Plain(model, bf16=job.bf16)
