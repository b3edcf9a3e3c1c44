"""The models that all contenders train, as lists of layers in plain torch, and their data. Knows no contender."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from zero_peers.gpt import Block
from zero_peers.job import Shape

from .job import Job

_HEAD_SIZE = 64
_SEED = 20
_SLEEP_WIDTH = 16


class Embedding(nn.Module):
    """Tokens and their positions to vectors."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.tokens = nn.Embedding(job.vocab, job.hidden)
        self.positions = nn.Embedding(job.seq, job.hidden)

    def forward(self, ids: Tensor) -> Tensor:
        """[batch, tokens] to [batch, tokens, hidden]."""
        return self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))


class Head(nn.Module):
    """Vectors to scores of each token."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(job.hidden)
        self.scores = nn.Linear(job.hidden, job.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, hidden] to [batch, tokens, vocab]."""
        return self.scores(self.norm(x))


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float) -> Tensor:
        ctx.forward_s = forward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.forward_s)
        return grads[0], None


class Sleeper(nn.Module):
    """A layer that leaves its core alone: it sleeps in its forward, and twice as long in its backward."""

    def __init__(self, forward_s: float) -> None:
        super().__init__()
        self.layer = nn.Linear(_SLEEP_WIDTH, _SLEEP_WIDTH)
        self._forward_s = forward_s

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 16] to the same."""
        return _Sleep.apply(self.layer(x), self._forward_s)  # pyright: ignore


def layers_of(job: Job) -> list[nn.Module]:
    """Returns all layers, with the same values in every process."""
    torch.manual_seed(_SEED)
    if job.model == "sleep":
        return [Sleeper(job.forward_ms / 1e3) for _ in range(job.layers)]
    shape = Shape(job.layers, job.hidden, max(1, job.hidden // _HEAD_SIZE), job.vocab, job.seq, job.samples)
    return [Embedding(job), *(Block(shape) for _ in range(job.layers)), Head(job)]


def bounds_of(job: Job) -> list[int]:
    """Returns the first layer of each chunk, and the number of layers at the end; the same cut for everybody."""
    chunks = job.ranks * job.chunks
    inner, rest = divmod(job.layers, chunks)
    assert rest == 0, "chunks of the same size"
    if job.model == "sleep":
        return [inner * chunk for chunk in range(chunks + 1)]
    return [0, *(1 + inner * chunk for chunk in range(1, chunks)), job.layers + 2]


def loss_of(output: Tensor, labels: Tensor) -> Tensor:
    """Returns the mean loss of a micro batch."""
    if labels.is_floating_point():
        return functional.mse_loss(output, labels)
    return functional.cross_entropy(output.flatten(0, 1), labels.flatten())


def batch_of(job: Job, step: int) -> list[tuple[Tensor, Tensor]]:
    """Returns inputs and labels of each micro batch, the same for every contender."""
    generator = torch.Generator().manual_seed(1000 + step)
    if job.model == "sleep":
        return [
            (torch.randn(job.samples, _SLEEP_WIDTH, generator=generator), torch.ones(job.samples, _SLEEP_WIDTH))
            for _ in range(job.micros)
        ]
    ids = torch.randint(job.vocab, (job.micros, job.samples, job.seq + 1), generator=generator)
    return [(micro[:, :-1].contiguous(), micro[:, 1:].contiguous()) for micro in ids]
