"""A small Llama for tests of tensor parallelism, and whole engines of it in threads. Attention and MLP are modules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dsrun
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from support.threaded_ranks import ranks_of_threads

VOCAB, TIME, MICRO = 61, 8, 2


class Attention(nn.Module):
    """Grouped attention that counts heads by its weights."""

    def __init__(self, width: int, heads: int, key_heads: int, *, bias: bool, dropout: float) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.dropout = dropout
        self.q_proj = nn.Linear(width, width, bias=bias)
        self.k_proj = nn.Linear(width, key_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, key_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(width, width, bias=bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        b, t, _ = x_BTD.shape
        q, k, v = (
            layer(x_BTD).view(b, t, -1, self.head_dim).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        chance = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=chance)
        return self.o_proj(mixed.transpose(1, 2).reshape(b, t, -1))


class Mlp(nn.Module):
    """A gated MLP."""

    def __init__(self, width: int, inner: int, *, bias: bool) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, inner, bias=bias), nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


class Layer(nn.Module):
    """Norms, attention, MLP, residuals and dropout."""

    def __init__(self, width: int, heads: int, key_heads: int, inner: int, *, bias: bool, dropout: float) -> None:
        super().__init__()
        self.input_norm, self.post_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.self_attn = Attention(width, heads, key_heads, bias=bias, dropout=dropout)
        self.mlp = Mlp(width, inner, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.dropout(self.self_attn(self.input_norm(x_BTD)))
        return x_BTD + self.dropout(self.mlp(self.post_norm(x_BTD)))


class TinyLlama(nn.Module):
    """A language model; sizes are such that MLP and vocabulary do not divide by two ranks."""

    def __init__(
        self,
        *,
        width: int = 64,
        heads: int = 4,
        key_heads: int = 2,
        inner: int = 101,
        layers: int = 2,
        bias: bool = True,
        dropout: float = 0.0,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(
            Layer(width, heads, key_heads, inner, bias=bias, dropout=dropout) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, VOCAB, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embed_tokens(tokens_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return self.lm_head(self.norm(x_BTD))


def llama(**options: Any) -> TinyLlama:
    """Returns the same model on every rank."""
    torch.manual_seed(11)
    return TinyLlama(**options)


def settings(tensor: int, *, stage: int = 0, **more: Any) -> dict[str, Any]:
    """Returns a config; keys of `tensor_parallel` may stand in `more`."""
    section = {"autotp_size": tensor, **more.pop("tensor_parallel", {})}
    zero = {"stage": stage, **more.pop("zero_optimization", {})}
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-2}},
        "zero_optimization": zero,
        "tensor_parallel": section,
        **more,
    }


def tokens(step: int, micro: int, data_rank: int) -> Tensor:
    """Returns [MICRO, TIME + 1] tokens that depend on nothing else."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + data_rank)
    return torch.randint(0, VOCAB, (MICRO, TIME + 1), generator=generator)


@dataclass(slots=True)
class Ended:
    """What a rank has at the end.

    Attributes:
        losses: loss of each micro batch.
        norms: norm of each step.
        weights: whole weights, on the host.
    """

    losses: list[float] = field(default_factory=list[float])
    norms: list[float] = field(default_factory=list[float])
    weights: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


def train(engine: Any, data_rank: int, steps: range) -> Ended:
    """Trains some steps."""
    ended = Ended()
    for step in steps:
        for micro in range(engine.gradient_accumulation_steps()):
            batch = tokens(step, micro, data_rank)
            logits = engine(batch[:, :-1])
            loss = F.cross_entropy(logits.double().flatten(0, 1), batch[:, 1:].flatten())
            engine.backward(loss)
            engine.step()
            ended.losses.append(loss.item())
        ended.norms.append(engine.get_global_grad_norm())
    weights = engine.module_state_dict(all_ranks=True)
    assert weights is not None
    ended.weights = weights
    return ended


def on_threads(
    ranks: int,
    tensor: int,
    body: Callable[[Any, int], Any] | None = None,
    *,
    make: Callable[[], nn.Module] = llama,
    steps: int = 2,
    **more: Any,
) -> list[Any]:
    """Runs `body` with the engine of each rank and its place on the data axis; by default it trains."""
    models = [make() for _ in range(ranks)]

    def run_body(engine: Any, data_rank: int) -> Any:
        return train(engine, data_rank, range(steps)) if body is None else body(engine, data_rank)

    def rank(collectives: LoopbackCollectives) -> Any:
        config = settings(tensor, **copy.deepcopy(more))
        engine: Any = dsrun.initialize(model=models[collectives.rank], config=config)[0]
        try:
            return run_body(engine, collectives.rank // tensor)
        finally:
            engine.destroy()

    with ranks_of_threads(torch.device("cpu")) as run:
        return LoopbackWorld(ranks).run(lambda collectives: run(collectives, rank))
