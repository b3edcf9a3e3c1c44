"""Small blocks and plans for tests of the comparison of cut blocks with whole ones, and that comparison itself."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsrun.errors import ModelError
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.parallel.tensor.comparison.first_forward import compare_in_first_forward
from dsrun.runtime.parallel.tensor.comparison.regions import kinds_of_regions
from dsrun.runtime.parallel.tensor.styles import COLUMN, ROW, Form, ModelPlan, Style
from support.cut_models import MODULES, VOCAB, cut_over, plan_of

#: Tokens for models of transformers, and hidden states for blocks of one's own.
IDS = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(4))
X = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(7))

#: Sizes of a DeepSeek-V2, and the styles of its modules.
DEEPSEEK: Mapping[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}
LATENT = {**MODULES, "kv_a_proj_with_mqa": Style(Form.SHARED_TAIL, tail=4)}


class Block(nn.Module):
    """A block of one's own, with whatever a test gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 8), nn.Linear(8, 6), nn.LayerNorm(6)
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        self.calls += 1
        return x + self.down(F.gelu(self.up(self.norm(x)))) * self.scale


class Stack(nn.Module):
    """Two blocks."""

    def __init__(self, kind: type[nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(2))

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        for block in self.blocks:
            x = block(x, *more)
        return x


def of_all_blocks(styles: Mapping[str, Style], *, numbers: tuple[int, ...] = (0, 1)) -> ModelPlan:
    return ModelPlan("the test", {f"blocks.{i}.{name}": style for i in numbers for name, style in styles.items()})


RIGHT = of_all_blocks({"up": COLUMN, "down": ROW})


class Attention(nn.Module):
    """Attention of 4 heads, and the same for tests that give it something of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, 2)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.o(self.mixed(self.of_heads(q), k, v, x).transpose(1, 2).flatten(-2))

    def of_heads(self, q: Tensor) -> Tensor:
        return q

    def mixed(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class Layer(nn.Module):
    """A block around a module that attends."""

    def __init__(self, kind: type[nn.Module] = Attention) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(6), kind()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x))


class OfAllHeads(Attention):
    """Queries divided by the largest of all heads, which a rank with some heads does not know."""

    def of_heads(self, q: Tensor) -> Tensor:
        return q / q.abs().amax((1, 3), keepdim=True)


def layers_of(kind: type[nn.Module], block: type[nn.Module] = Layer) -> Stack:
    torch.manual_seed(2)
    return Stack(lambda: block(kind))  # type: ignore[arg-type]


ATTENTION = of_all_blocks({**dict.fromkeys(("attention.q", "attention.k", "attention.v"), COLUMN), "attention.o": ROW})


def checked(
    model: nn.Module,
    plan: ModelPlan,
    size: int,
    call: Callable[..., Any],
    *,
    between: Callable[[nn.Module], None] = lambda model: None,
    **options: bool,
) -> list[tuple[Any, list[str], Any]]:
    """Returns for each rank what the first call gives, what was said, and the model.

    Args:
        model: model, left as it is.
        plan: its plan.
        size: ranks.
        call: function that is given a model, and calls it.
        between: function that is given each model after it was cut, and before it is called.
        options: options of `cut_layers`.
    """
    models = [copy.deepcopy(model) for _ in range(size)]

    def body(axis: LoopbackCollectives) -> tuple[Any, list[str], Any]:
        mine = models[axis.rank]
        said: list[str] = []
        kinds = kinds_of_regions(mine, plan)
        cuts = cut_over(mine, plan, axis, **options)
        compare_in_first_forward(mine, kinds, cuts, axis, source=plan.source, say=said.append)
        between(mine)
        return call(mine), said, mine

    return LoopbackWorld(size).run(body)


def refusal(model: nn.Module, plan: ModelPlan, size: int, call: Callable[..., Any], **more: Any) -> str:
    """Returns the message that all ranks are given in the first call."""

    def refused(mine: nn.Module) -> str:
        with pytest.raises(ModelError) as caught:
            call(mine)
        return caught.value.render()

    first, *others = [result for result, _, _ in checked(model, plan, size, refused, **more)]
    assert others == [first] * (size - 1)
    return first


def forward(model: Any) -> Tensor:
    return model(IDS, use_cache=False).logits


def train(model: Any) -> Tensor:
    loss: Tensor = model(IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    return loss.detach()


def changed(model: nn.Module, last: str, style: Style, modules: Mapping[str, Style] = MODULES) -> ModelPlan:
    return plan_of(model, {**modules, last: style})
