"""A whole model switched on by a section: the budget is kept, the compiler's share counts, the profile is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsrun.config.sections.activation import ActivationCheckpointing
from dsrun.errors import ModelError
from dsrun.runtime.activation.activate import Activations, activate
from dsrun.runtime.activation.choose.policy import Treatment
from dsrun.runtime.activation.recompute.rng import RngTracker
from support.allocations import allocations, peak_of
from support.models import Block

LAYERS, WIDTH, SAMPLES, TOKENS = 6, 32, 4, 64
INPUT_BYTES = SAMPLES * TOKENS * WIDTH * 4


class Blocks(nn.Module):
    """The blocks of a small GPT."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH, 4) for _ in range(layers))

    def forward(self, x_BTD: Tensor) -> Tensor:
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return x_BTD


def make(layers: int = LAYERS) -> Blocks:
    torch.manual_seed(1)
    return Blocks(layers)


def switch_on(model: nn.Module, said: list[str], **keys: Any) -> Activations:
    section = ActivationCheckpointing.model_validate(keys)
    made = activate(model, section, skip=lambda _: False, script_chooses=False, tracker=RngTracker(), say=said.append)
    assert made is not None
    return made


def stepper(model: nn.Module) -> Callable[[], None]:
    """A micro step whose gradients are there already, so that only activations come and go."""
    x = torch.randn(SAMPLES, TOKENS, WIDTH, generator=torch.Generator().manual_seed(2)).requires_grad_()
    grad = torch.ones_like(x)
    for tensor in (x, *model.parameters()):
        tensor.grad = torch.zeros_like(tensor)
    return lambda: model(x).backward(grad)


def peak_bytes(step: Callable[[], None]) -> int:
    """The most that a fourth micro step holds above what is there before it."""
    for _ in range(3):
        step()
    return peak_of(allocations(step))


def test_the_measured_peak_stays_within_the_budget_and_uses_it() -> None:
    profiled = make()
    figures = switch_on(profiled, [], policy="every_block", profile=True)._profile
    assert figures is not None
    stepper(profiled)()
    block_bytes = figures.figures["blocks.0"].dropped_bytes
    plain = peak_bytes(stepper(make()))
    working = plain - LAYERS * block_bytes  # what backward itself works with, which no policy holds
    assert 0 < working < block_bytes

    budget = 4 * block_bytes
    said: list[str] = []
    model = make()
    activations = switch_on(model, said, policy="memory_budget", memory_budget=budget)
    found = peak_bytes(stepper(model))
    assert activations.solution is not None
    treatments = activations.solution.treatments
    # Three blocks kept leave room for three inputs; four would fill the budget alone. Equal blocks do not take equal
    # seconds on a busy machine, so which ones is not said here.
    assert treatments.count(Treatment.KEEP) == 3
    assert treatments.count(Treatment.RECOMPUTE) == 3
    assert activations.solution.peak_bytes <= budget
    assert found - working <= budget
    assert found - working > budget - block_bytes
    assert len(said) == 1
    assert said[0].startswith("activations: 3 ")


def test_a_budget_that_nothing_meets_is_told_with_the_least_that_would_do() -> None:
    step = stepper(model := make(2))
    switch_on(model, [], policy="memory_budget", memory_budget=1000)
    step()
    step()
    with pytest.raises(ModelError, match=r"memory_budget` is 1000 .*; the blocks need .* at least"):
        step()


def test_the_profile_is_printed_once_after_three_micro_steps() -> None:
    said: list[str] = []
    step = stepper(model := make(2))
    switch_on(model, said, policy="every_block", profile=True)
    for steps in range(1, 7):
        step()
        assert len(said) == (steps > 3)
    head, columns, *rows = said[0].splitlines()
    assert head == "activations of 2 blocks, 3 micro steps"
    assert columns.split() == ["block", "kept", "dropped", "forward", "again"]
    assert [row.split()[:3] for row in rows] == [[f"blocks.{i}", "32.0", "KiB"] for i in range(2)]


def test_a_line_says_what_becomes_of_the_blocks() -> None:
    model = make()
    activations = switch_on(model, [], policy="ratio", ratio=0.5, cpu_checkpointing=True, packing="int8")
    assert activations.describe() == (
        "activations: policy ratio, 3 of 6 blocks, what is kept in host memory, packed to 8 bits"
    )


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_smaller_share_of_the_compiler_saves_fewer_bytes_and_gives_the_same_gradients() -> None:
    def saved(share: float) -> tuple[int, list[Tensor]]:
        torch._dynamo.reset()
        model = make(2)
        for block in model.blocks:
            block.compile(backend="aot_eager_decomp_partition")
        activations = switch_on(model, [], policy="compiler", compiler_budget=share)
        storages: dict[int, int] = {}
        x = torch.linspace(-1, 1, SAMPLES * TOKENS * WIDTH).view(SAMPLES, TOKENS, WIDTH).requires_grad_()

        def note(tensor: Tensor) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = model(x).sum()
        loss.backward()
        activations.remove()
        return sum(storages.values()), [param.grad for param in model.parameters() if param.grad is not None]

    (all_bytes, expected), (few_bytes, found) = saved(1.0), saved(0.0)
    assert few_bytes < 0.5 * all_bytes
    assert len(expected) == len(found) > 0
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(found, expected, strict=True))


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("policy", ["every_block", "hierarchical", "selective"])
@pytest.mark.parametrize("in_place", [True, False])
def test_blocks_of_a_model_that_is_compiled_as_a_whole_are_refused_by_name(policy: str, in_place: bool) -> None:
    model = make(2)
    switch_on(model, [], policy=policy)
    called: Any = model
    if in_place:
        model.compile(backend="aot_eager")
    else:
        called = torch.compile(model, backend="aot_eager")
    with pytest.raises(ModelError, match=r"`blocks\.0` runs inside of a compiled model") as refused:
        called(torch.randn(2, 4, WIDTH))
    assert "block.compile()" in str(refused.value.hint)
