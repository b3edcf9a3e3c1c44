"""Parameters that want a gradient and are in no optimizer group: as in torch they get it, and nobody updates them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dsrun
from support.ranks import run_ranks

WIDTH = 8


class Block(nn.Module):
    """A block of which a part is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Model(nn.Module):
    """Blocks, and a layer of which nothing is in a group."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x).float().square().mean()


def is_left_out(name: str) -> bool:
    return name.startswith(("inp.", "blocks.1.")) or name == "blocks.2.up.weight"


def make() -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model()
    grouped = [param for name, param in model.named_parameters() if not is_left_out(name)]
    return model, torch.optim.AdamW(grouped, lr=0.01, weight_decay=0.1)


def batch(step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def plain() -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    model, optimizer = make()
    losses: list[float] = []
    for step in range(3):
        loss = model(batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    return losses, grads, {name: param.detach() for name, param in model.named_parameters()}


def _engine(stage: int, bf16: bool) -> Any:
    model, optimizer = make()
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
        },
        "gradient_clipping": 0.0,
        "bf16": {"enabled": bf16},
        "checkpoint": {"asynchronous": False},
    }
    return dsrun.initialize(model=model, optimizer=optimizer, config=settings)[0]


def _step(engine: Any, step: int, *, bf16: bool) -> float:
    loss = engine(batch(step).bfloat16() if bf16 else batch(step))
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def _train(stage: int, bf16: bool, folder: str) -> Any:
    engine = _engine(stage, bf16)
    losses = [_step(engine, step, bf16=bf16) for step in range(2)]
    engine.save_checkpoint(folder)
    losses.append(_step(engine, 2, bf16=bf16))
    grads = {name: dsrun.utils.safe_get_full_grad(param) for name, param in engine.module.named_parameters()}
    grads = {name: grad for name, grad in grads.items() if grad is not None}
    weights = engine.module_state_dict(all_ranks=True)
    again = _engine(stage, bf16)
    again.load_checkpoint(folder)
    return losses, grads, weights, _step(again, 2, bf16=bf16)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_they_get_gradients_and_keep_their_values_as_in_torch(stage: int, tmp_path: Path) -> None:
    losses, grads, weights = plain()
    for found in run_ranks(2, _train, stage, False, str(tmp_path)):
        assert found[0] == losses
        assert found[1].keys() == grads.keys() == {name for name in weights if is_left_out(name)}
        assert all(torch.equal(found[1][name], grad) for name, grad in grads.items())
        assert all(torch.equal(found[2][name], value) for name, value in weights.items())
        assert found[3] == losses[2], "a checkpoint has them"


def test_in_16_bits_every_stage_gives_the_same(tmp_path: Path) -> None:
    expected, *others = [run_ranks(1, _train, stage, True, str(tmp_path / str(stage)))[0] for stage in (0, 2, 3)]
    for found in others:
        assert found[0] == expected[0]
        assert found[3] == expected[3] == expected[0][2]
        for mine, theirs in zip(found[1:3], expected[1:3], strict=True):
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[name], value) for name, value in theirs.items())


def test_they_are_named_in_one_line_and_the_next_engine_may_train_them(capsys: pytest.CaptureFixture[str]) -> None:
    engine = _engine(2, False)
    assert (
        "dsrun: not updated, for no optimizer group has them: `inp.weight`, `inp.bias`, `blocks.1.up.weight` and 4 more"
        in capsys.readouterr().out
    )
    model = engine.module
    engine.destroy()
    before = model.inp.weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    again = dsrun.initialize(
        model=model,
        optimizer=optimizer,
        config={"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}},
    )[0]
    assert "not updated" not in capsys.readouterr().out
    _step(again, 0, bf16=False)
    assert not torch.equal(model.inp.weight, before)
