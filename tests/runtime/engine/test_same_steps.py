"""Ranks that share layers and do something else than each other are told at the next update, and not by the loss."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dsrun
from dsrun.errors import ModelError
from support.llama import TinyLlama, settings, tokens
from support.ranks import run_ranks


class Scaled(TinyLlama):
    """Attention's inputs are scaled by a number that a generator of the host gives."""

    def __init__(self, draw: Callable[[], float] | None, *, dropout: float) -> None:
        super().__init__(dropout=dropout)
        self.draw = draw

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embed_tokens(tokens_BT) * (1.0 if self.draw is None else 0.5 + float(self.draw()))
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return self.lm_head(self.norm(x_BTD))


def body(what: str, dropout: float, more: dict[str, Any]) -> tuple[list[float], str]:
    """Trains, and does something on one rank alone before the third update; returns losses and what was raised."""
    torch.set_num_threads(1)
    torch.manual_seed(11)
    rank = int(os.environ["RANK"])
    tensor = more.pop("autotp_size", 2)
    numpy.random.seed(3)
    random.seed(3)
    draw = {"Python's seeds": random.random, "numpy's seeds": numpy.random.rand}.get(what)
    engine: Any = dsrun.initialize(
        model=Scaled(draw, dropout=dropout),
        config=settings(tensor, tensor_parallel=more),
    )[0]
    place, is_odd = divmod(rank, tensor)
    losses: list[float] = []
    try:
        for step in range(3):
            for micro in range(2):
                batch = tokens(step, micro, place)
                inputs, labels = batch[:, :-1], batch[:, 1:]
                if is_odd and step == (0 if what == "first inputs" else 2):
                    match what:
                        case "inputs" | "first inputs":
                            inputs = inputs.flip(1)
                        case "labels":
                            labels = labels.flip(1)
                        case "seeds":
                            torch.manual_seed(rank)
                        case "a draw" if micro:
                            torch.rand(())
                        case "Python's seeds" | "seeds of Python that nobody draws":
                            random.seed(rank)
                        case "numpy's seeds":
                            numpy.random.seed(rank)
                        case _:
                            pass
                if what == "evaluation":
                    engine.eval()
                    with torch.no_grad():
                        engine(inputs)
                    engine.train()
                loss = F.cross_entropy(engine(inputs).flatten(0, 1), labels.flatten())
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            watch = engine._hooks.same
            assert watch is None or watch.shared_3()[2] == 0, "each update begins anew"
    except ModelError as error:
        return losses, error.render()
    finally:
        engine.destroy()
    return losses, ""


@pytest.mark.parametrize(
    ("what", "dropout", "said"),
    [
        ("inputs", 0.0, "other inputs on rank 1 and losses "),
        ("labels", 0.0, "losses "),
        ("seeds", 0.1, "other random numbers on rank 1"),
        ("a draw", 0.1, "other random numbers on rank 1"),
        ("Python's seeds", 0.0, "other random numbers on rank 1"),
        ("numpy's seeds", 0.0, "other random numbers on rank 1"),
    ],
)
def test_what_one_rank_does_alone_is_told_on_all_before_the_weights_change(
    what: str, dropout: float, said: str
) -> None:
    found = run_ranks(2, body, what, dropout, {})
    texts = {text for _, text in found}
    (text,) = texts
    assert text.startswith(
        "error: model: ranks that share each layer did not do the same at step 3, micro step 2: ranks 0, 1: "
    )
    assert said in text
    assert "num_replicas=engine.dp_world_size" in text
    assert all(len(losses) == 5 for losses, _ in found)


@pytest.mark.parametrize(
    ("what", "dropout"),
    [
        ("nothing", 0.1),
        ("evaluation", 0.1),
        ("seeds", 0.0),
        ("a draw", 0.0),
        ("seeds of Python that nobody draws", 0.0),
    ],
)
def test_what_changes_nothing_is_not_told(what: str, dropout: float) -> None:
    """Random numbers that no forward draws are the script's own, say for its data."""
    first, second = run_ranks(2, body, what, dropout, {})
    assert first == second
    assert first[1] == ""
    assert len(first[0]) == 6


def test_replicas_differ_as_they_should_and_one_that_is_torn_is_named() -> None:
    assert [text for _, text in run_ranks(4, body, "nothing", 0.1, {})] == [""] * 4
    texts = {text for _, text in run_ranks(4, body, "labels", 0.0, {})}
    (text,) = texts
    assert "ranks 0, 1: losses " in text
    assert "; ranks 2, 3: losses " in text


@pytest.mark.parametrize("what", ["labels", "first inputs"])
def test_without_comparisons_nothing_is_told(what: str) -> None:
    first, second = run_ranks(2, body, what, 0.0, {"check": False})
    assert first[1] == second[1] == ""
    assert what == "first inputs" or first[0] != second[0]


def test_the_first_inputs_are_told_by_name() -> None:
    for losses, text in run_ranks(2, body, "first inputs", 0.0, {}):
        assert losses == []
        assert "were not given the same inputs as rank 0: `tokens_BT` on rank 1" in text


def caches(check: bool) -> list[float]:
    """Trains a model that returns its keys, with tokens generated in between, and returns the losses."""

    class Caching(TinyLlama):
        def forward(self, tokens_BT: Any, past: Any = None) -> Any:
            keys: list[Any] = []
            hooks = [
                layer.self_attn.k_proj.register_forward_hook(lambda module, args, output: keys.append(output))
                for layer in self.layers
            ]
            logits = super().forward(tokens_BT)
            for hook in hooks:
                hook.remove()
            return logits, tuple(keys)

    torch.set_num_threads(1)
    torch.manual_seed(11)
    engine: Any = dsrun.initialize(model=Caching(), config=settings(2, tensor_parallel={"check": check}))[0]
    losses: list[float] = []
    try:
        for step in range(2):
            for micro in range(2):
                batch = tokens(step, micro, 0)
                engine.eval()
                with torch.no_grad():
                    _, past = engine(batch[:, :2])
                    engine(batch[:, 2:3], tuple(key * 1.0 for key in past))
                engine.train()
                _, keys = engine(batch[:, :-1])
                logits, _ = engine(batch[:, :-1], keys)  # keys of this rank's heads, given back
                loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
    finally:
        engine.destroy()
    return losses


def test_caches_of_this_rank_s_heads_are_no_other_inputs() -> None:
    first, second = run_ranks(2, caches, True)
    assert first == second == run_ranks(2, caches, False)[0]
