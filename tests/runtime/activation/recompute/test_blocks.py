"""Hooks around blocks: nothing of the model changes, segments follow the model's own loop, and bad names are told."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsrun.config.sections.activation import ActivationCheckpointing
from dsrun.errors import ModelError
from dsrun.runtime.activation.activate import Activations, activate
from dsrun.runtime.activation.keep.rings import Rings
from dsrun.runtime.activation.recompute.blocks import choose_stacks
from dsrun.runtime.activation.recompute.rng import RngTracker
from dsrun.runtime.memory.bus import Bus, instant_bus_for
from support.devices import on_devices
from support.slow_lanes import late_bus

WIDTH = 16


class Block(nn.Module):
    """Counts its forwards; may change its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return x + self.lin(x).tanh()


class Model(nn.Module):
    """Blocks in a loop of the model's own; `between` is what it does between two of them."""

    def __init__(self, count: int = 6, between: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.between(block(x))
        return x


def scaled(x: Tensor) -> Tensor:
    return x * 1.5


def scaled_in_place(x: Tensor) -> Tensor:
    return x.mul_(1.5)


def switch_on(model: nn.Module, **keys: Any) -> Activations:
    made = activate(
        model,
        ActivationCheckpointing.model_validate(keys),
        skip=lambda module: False,
        script_chooses=False,
        tracker=RngTracker(),
        say=lambda text: None,
    )
    assert made is not None
    return made


def make(**options: Any) -> Model:
    torch.manual_seed(1)
    return Model(**options)


def sample() -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(2)).requires_grad_()


def gradients(model: nn.Module) -> list[Tensor]:
    x = sample()
    model(x).square().sum().backward()
    assert x.grad is not None
    return [x.grad, *(param.grad for param in model.parameters() if param.grad is not None)]


INPUT_BYTES = 4 * WIDTH * 4


@pytest.mark.parametrize(
    ("keys", "kept", "runs"),
    [
        ({"policy": "every_block"}, 6, [2] * 6),
        ({"policy": "interval", "interval": 3}, 2, [2] * 6),
        ({"policy": "interval", "interval": 4}, 2, [2] * 6),
        ({"policy": "ratio", "ratio": 0.5}, 3, [2, 2, 2, 1, 1, 1]),
        ({"policy": "sqrt"}, 3, [2] * 6),
        ({"policy": "hierarchical"}, 3, [3, 2, 3, 2, 3, 2]),
        ({"number_checkpoints": 2}, 2, [2] * 6),
    ],
)
def test_policies_keep_as_many_inputs_and_run_as_often_as_they_say(
    keys: dict[str, Any], kept: int, runs: list[int]
) -> None:
    expected = gradients(make())
    model = make()
    activations = switch_on(model, **keys)
    x = sample()
    loss = model(x).square().sum()
    assert activations.keeper.device_bytes == kept * INPUT_BYTES
    loss.backward()
    assert activations.keeper.device_bytes == 0
    assert [block.runs for block in model.blocks] == runs
    model.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), expected, strict=True))


@pytest.mark.parametrize("policy", ["sqrt", "hierarchical"])
@pytest.mark.parametrize("between", [scaled, scaled_in_place, torch.clone])
def test_what_a_model_does_between_blocks_costs_memory_and_no_bits(
    policy: str, between: Callable[[Tensor], Tensor]
) -> None:
    expected = gradients(make(between=between))
    model = make(between=between)
    activations = switch_on(model, policy=policy)
    loss = model(sample()).square().sum()
    assert activations.keeper.device_bytes == 6 * INPUT_BYTES
    loss.backward()
    model.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), expected, strict=True))


class Adding(nn.Module):
    """Adds what a block gives to the block's own input, in place: no operation of the block saves that input.

    Args:
        width: of its vectors.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.ReLU(), nn.Linear(width, width), nn.ReLU()) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        for block in self.blocks:
            x += block(x)
        return x


def made_for(build: Callable[[], nn.Module], device: torch.device) -> nn.Module:
    torch.manual_seed(1)
    return build().to(device)


def trained(model: nn.Module, x: Tensor, *, steps: int) -> list[Tensor]:
    """Gradients of several steps, of which the later ones know what the first one did."""
    found: list[Tensor] = []
    for step in range(steps):
        leaf = (x + step).requires_grad_()
        model.zero_grad()
        model(leaf).square().mean().backward()
        assert leaf.grad is not None
        found += [leaf.grad, *(param.grad for param in model.parameters() if param.grad is not None)]
    return found


def switch_on_in_host_memory(
    model: nn.Module, bus_of: Callable[[torch.device], Bus] = instant_bus_for, **keys: Any
) -> None:
    section = ActivationCheckpointing.model_validate({"cpu_checkpointing": True, **keys})
    stacks = choose_stacks(model, [], skip=lambda module: False)
    rings = Rings(section, io=None, rank=0, bus_of=bus_of)
    Activations(section, stacks, tracker=RngTracker(), rings=rings, say=lambda text: None)


def adding() -> nn.Module:
    return Adding(WIDTH)


def scaling() -> nn.Module:
    return Model(between=scaled_in_place)


@pytest.mark.gpu_seconds(0.6)
@pytest.mark.parametrize(
    ("device", "build", "policy", "nvme"),
    on_devices(
        product([adding, scaling], ["every_block", "sqrt", "hierarchical"], [False, True]),
        on_gpu=[
            (adding, "every_block", False),
            (adding, "hierarchical", True),
            (scaling, "every_block", True),
            (scaling, "sqrt", False),
        ],
    ),
    indirect=["device"],
)
def test_inputs_that_change_in_place_behind_their_blocks_leave_as_they_were(
    build: Callable[[], nn.Module], policy: str, device: torch.device, tmp_path: Path, *, nvme: bool
) -> None:
    x = sample().detach().to(device)
    expected = trained(made_for(build, device), x, steps=3)
    model = made_for(build, device)
    disk: dict[str, Any] = {"nvme_path": str(tmp_path)} if nvme else {}
    switch_on_in_host_memory(model, late_bus, policy=policy, **disk)
    assert all(torch.equal(a, b) for a, b in zip(trained(model, x, steps=3), expected, strict=True))


@pytest.mark.cuda
@pytest.mark.gpu_seconds(1)
def test_large_inputs_on_a_gpu_that_change_in_place_leave_as_they_were() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.randn(16384, 512, device=device, generator=torch.Generator(device).manual_seed(2))  # 32 MiB
    expected = trained(made_for(lambda: Adding(512), device), x, steps=3)
    model = made_for(lambda: Adding(512), device)
    switch_on_in_host_memory(model, policy="every_block")
    assert all(torch.equal(a, b) for a, b in zip(trained(model, x, steps=3), expected, strict=True))


def test_the_model_stays_what_it_is_and_hooks_come_off() -> None:
    model = make()
    names, forwards, kinds = (
        list(model.state_dict()),
        [b.forward for b in model.blocks],
        [type(b) for b in model.blocks],
    )
    activations = switch_on(model, policy="every_block")
    assert list(model.state_dict()) == names
    assert [b.forward for b in model.blocks] == forwards
    assert [type(b) for b in model.blocks] == kinds
    activations.remove()
    gradients(model)
    assert [block.runs for block in model.blocks] == [1] * 6
    assert not model.blocks[0]._forward_hooks
    assert not model.blocks[0]._forward_pre_hooks


def test_a_copy_of_the_model_trains_its_own_weights() -> None:
    model = make()
    switch_on(model, policy="every_block")
    twin = copy.deepcopy(model)
    gradients(twin)
    assert all(param.grad is None for param in model.parameters())
    assert all(param.grad is not None for param in twin.parameters())


def test_hooks_of_the_script_belong_to_the_block() -> None:
    def run(model: Model) -> list[Tensor]:
        for block in model.blocks:
            block.register_forward_hook(lambda module, args, output: output.sin())
            block.register_forward_pre_hook(lambda module, args: (args[0].cos(),))
            block.register_forward_pre_hook(lambda module, args: (args[0] * args[0],), prepend=True)
        return gradients(model)

    expected = run(make())
    model = make()
    switch_on(model, policy="sqrt")
    assert all(torch.equal(a, b) for a, b in zip(run(model), expected, strict=True))


def test_a_block_that_raises_leaves_no_hook_open() -> None:
    model = make()
    switch_on(model, policy="every_block")
    with pytest.raises(RuntimeError):
        model(torch.ones(4, WIDTH + 1, requires_grad=True))
    expected = gradients(make())
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), expected, strict=True))


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("policy", ["every_block", "sqrt", "hierarchical"])
def test_compiled_blocks_give_the_bits_of_compiled_blocks(policy: str, in_place: bool) -> None:
    def compiled() -> Model:
        torch._dynamo.reset()
        model = make(count=3)
        for index, block in enumerate(model.blocks):
            if in_place:
                block.compile(backend="aot_eager")
            else:
                model.blocks[index] = torch.compile(block, backend="aot_eager")  # type: ignore[assignment]
        return model

    expected = gradients(compiled())
    model = compiled()
    activations = switch_on(model, policy=policy)
    x = sample()
    loss = model(x).square().sum()
    assert activations.keeper.device_bytes <= 3 * INPUT_BYTES
    loss.backward()
    assert x.grad is not None
    found = [x.grad, *(param.grad for param in model.parameters() if param.grad is not None)]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_compilers_budget_needs_compiled_blocks_and_is_put_back() -> None:
    config: Any = __import__("torch._functorch.config", fromlist=["config"])
    before = config.activation_memory_budget
    with pytest.raises(ModelError, match='policy` is "compiler", and no block of `blocks` is compiled'):
        switch_on(make(), policy="compiler")
    model = make()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    activations = switch_on(model, policy="compiler", compiler_budget=0.25)
    assert config.activation_memory_budget == 0.25
    activations.remove()
    assert config.activation_memory_budget == before


def test_selective_refuses_compiled_blocks() -> None:
    model = make()
    model.blocks[1].compile(backend="aot_eager")
    with pytest.raises(ModelError, match=r"`blocks\.1` is compiled"):
        switch_on(model, policy="selective")


def test_patterns_choose_the_outermost_modules_and_form_stacks_by_parent() -> None:
    model = nn.ModuleDict({"left": make(count=2), "right": make(count=3)})
    activations = switch_on(model, policy="interval", interval=2, blocks=["*.blocks.*"])
    assert [[(s.start, s.stop) for s in parts] for parts in activations.segments] == [[(0, 2)], [(0, 2), (2, 3)]]


def test_a_pattern_that_matches_nothing_is_told_with_what_there_is() -> None:
    with pytest.raises(
        ModelError, match=r"activation_checkpointing.blocks` has 'layer.\*', which is the name of no"
    ) as e:
        switch_on(make(), policy="every_block", blocks=["blocks.*", "layer.*"])
    assert "`blocks` (6 blocks)" in str(e.value.hint)


def test_a_model_without_blocks_is_told_to_name_them() -> None:
    with pytest.raises(ModelError, match="no stack of blocks was found in Linear") as refused:
        switch_on(nn.Linear(2, 2), policy="every_block")
    assert '"blocks": ["layers.*"]' in str(refused.value.hint)


def test_the_way_out_where_no_block_is_found_names_a_list_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.body = nn.ModuleDict({"only": nn.ModuleList([nn.Linear(2, 2)])})
    with pytest.raises(ModelError, match="no stack of blocks was found in Sequential") as refused:
        switch_on(model, policy="every_block")
    assert '"blocks": ["body.*"]' in str(refused.value.hint)


def test_too_few_checkpoints_for_the_buffer_are_told_before_the_first_step() -> None:
    with pytest.raises(ModelError, match="number_checkpoints` is 4; policy every_block keeps 6 inputs"):
        switch_on(make(), policy="every_block", contiguous_memory_optimization=True, number_checkpoints=4)


def test_nothing_is_switched_on_where_nothing_is_asked_for_or_the_script_chooses() -> None:
    for keys, script_chooses in (({}, False), ({"cpu_checkpointing": True}, True), ({"policy": "none"}, True)):
        assert (
            activate(
                make(),
                ActivationCheckpointing.model_validate(keys),
                skip=lambda module: False,
                script_chooses=script_chooses,
                tracker=RngTracker(),
                say=print,
            )
            is None
        )
