"""What a script's own optimizer keeps comes back from a checkpoint as it was, or the save says why it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import optim

from dsrun.errors import CheckpointError
from support.ranks import run_ranks
from support.training import config, full_parameters, make_engine, train

KINDS = {"steps": int, "gain": float, "turned": bool}


class Counting(optim.Optimizer):
    """Counts in numbers of Python's, as optimizers of scripts do, and steps by what it has counted."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state |= {"steps": 0, "gain": 1.0, "turned": False, "mean": torch.zeros_like(param), "none": None}
                state["steps"] += 1
                state["gain"] *= 0.9 if state["turned"] else 0.1 + 0.7
                state["turned"] = not state["turned"]
                state["mean"].lerp_(param.grad, 1.0 / state["steps"])
                param.sub_(state["mean"], alpha=group["lr"] * state["gain"])


def _engine(stage: int, size: int, **more: Any) -> Any:
    settings = config(stage, micro=6 // size, zero_allow_untested_optimizer=True)
    settings["zero_optimization"] |= more
    settings.pop("optimizer")
    return make_engine(settings, optimizer=Counting)


def _save(folder: str) -> list[float]:
    engine = _engine(1, 2)
    train(engine, range(3), samples=6)
    engine.save_checkpoint(folder)
    losses = train(engine, range(3, 6), samples=6)
    engine.destroy()
    return losses


def _go_on(folder: str, stage: int, more: dict[str, Any]) -> tuple[list[float], list[dict[str, Any]]]:
    engine = _engine(stage, 2, **more)
    train(engine, range(1), samples=6)
    engine.load_checkpoint(folder)
    kept = [{name: state[name] for name in KINDS} for state in engine.optimizer.state.values()]
    losses = train(engine, range(3, 6), samples=6)
    engine.destroy()
    return losses, kept


@pytest.mark.parametrize(("stage", "more"), [(3, {}), (2, {"offload_optimizer": {"device": "cpu"}})])
def test_numbers_of_python_come_back_with_their_type_and_value(tmp_path: Path, stage: int, more: Any) -> None:
    expected = run_ranks(2, _save, str(tmp_path))[0]
    for losses, kept in run_ranks(2, _go_on, str(tmp_path), stage, more):
        assert losses == expected
        assert kept
        assert all({name: type(value) for name, value in state.items()} == KINDS for state in kept)
        gain = 1.0 * (0.1 + 0.7) * 0.9 * (0.1 + 0.7)  # all its bits count
        assert all(state == {"steps": 3, "gain": gain, "turned": True} for state in kept)


@pytest.mark.parametrize(
    ("value", "what"),
    [([1, 2], "of type list"), (torch.zeros(3), r"a tensor of shape \(3,\)"), (1 << 63, "of type int")],
)
def test_a_state_of_another_form_is_refused_by_name(tmp_path: Path, value: Any, what: str) -> None:
    engine = _engine(1, 1)
    train(engine, range(1), samples=6)
    before = full_parameters(engine)
    next(iter(engine.optimizer.state.values()))["odd"] = value
    with pytest.raises(CheckpointError, match=f"optimizer state `odd` is {what}"):
        engine.save_checkpoint(str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert all(torch.equal(now, before[name]) for name, now in full_parameters(engine).items())
