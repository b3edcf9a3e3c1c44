"""Stacks of cut blocks that work on slices of the sequence, forward and backward, against the same stacks whole."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsrun.errors import ModelError
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.parallel.tensor.sequence.blocks import SlicedBlock
from dsrun.runtime.parallel.tensor.styles import COLUMN, GATHERED_COLUMN, ROW, Form, Style
from support.cut_models import compare, cut_over, plan_of

F64 = torch.float64
#: Width, and width inside of an MLP, which none of the numbers of ranks divides; samples, and tokens of one.
D, INNER, B, S = 5, 7, 3, 12
PLAN: Mapping[str, Style] = {"gate": COLUMN, "up": COLUMN, "down": ROW}


class Mlp(nn.Module):
    """Two columns of one input and a row; with `low_rank` beside them a column behind a whole layer."""

    def __init__(self, *, bias: bool = True, low_rank: bool = False) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(D, INNER, bias=bias), nn.Linear(2 if low_rank else D, INNER, bias=bias)
        self.low = nn.Linear(D, 2) if low_rank else nn.Identity()
        self.down = nn.Linear(INNER, D, bias=bias)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down(self.gate(x_BSD).sigmoid() * self.up(self.low(x_BSD)))


class Block(nn.Module):
    """A norm, an MLP and a weight of the block itself; its hidden states come and go in one of several ways."""

    def __init__(self, how: str, **options: bool) -> None:
        super().__init__()
        self.how = how
        self.norm, self.mlp = nn.LayerNorm(D), Mlp(**options)
        self.scale = nn.Parameter(torch.ones(D))

    def forward(self, x_BSD: Tensor, number: int = 0) -> Any:
        x_BSD = x_BSD * self.scale + self.mlp(self.norm(x_BSD))
        return (x_BSD, number) if self.how == "tuple" else x_BSD


class Model(nn.Module):
    """Blocks between two whole layers."""

    def __init__(self, how: str = "bare", *, layers: int = 2, **options: bool) -> None:
        super().__init__()
        self.how = how
        self.before, self.behind = nn.Linear(D, D), nn.Linear(D, D)
        self.layers = nn.ModuleList(Block(how, **options) for _ in range(layers))

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_BSD = self.before(x_BSD)
        for layer in self.layers:
            x: Any = layer(number=1, x_BSD=x_BSD) if self.how == "by name" else layer(x_BSD)
            x_BSD = x[0] if self.how == "tuple" else x
        return self.behind(x_BSD)


def model_of(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(2)
    return make().double()


def hidden_states() -> Tensor:
    return torch.randn(B, S, D, dtype=F64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    "make",
    [Model, lambda: Model("tuple"), lambda: Model("by name"), lambda: Model(bias=False), lambda: Model(low_rank=True)],
    ids=["bare", "tuple", "by name", "without bias", "whole layer beside columns"],
)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_outputs_and_all_gradients_are_those_of_the_whole_stack(
    size: int, make: Callable[[], nn.Module], exact: bool
) -> None:
    model = model_of(make)
    for found in compare(model, plan_of(model, PLAN), (hidden_states(),), size, slices=True, exact=exact):
        assert {name: error for name, error in found.errors.items() if not error < 1e-13} == {}


@pytest.mark.parametrize("layers", [2, 4])
def test_a_block_gathers_and_scatters_once_and_the_stack_ends_with_one_more(layers: int) -> None:
    model = model_of(lambda: Model(layers=layers))
    for found in compare(model, plan_of(model, PLAN), (hidden_states(),), 3, slices=True):
        calls = Counter(all_gather=layers + 1, reduce_scatter=layers)
        assert (found.forward.calls, found.backward.calls) == (calls, calls)
        one = B * S * D * F64.itemsize
        assert found.forward.bytes == found.backward.bytes == Counter({name: n * one for name, n in calls.items()})


def test_whole_weights_that_work_on_slices_are_said_to_have_gradients_in_parts() -> None:
    model = model_of(lambda: Model(low_rank=True))
    (one,) = compare(model, plan_of(model, PLAN), (hidden_states(),), 1, slices=True)
    names = {
        name for name, param in one.model.named_parameters() if id(param) in one.cuts and not one.cuts[id(param)].whole
    }
    inside = ("norm.weight", "norm.bias", "scale", "mlp.down.bias")
    assert names == {f"layers.{number}.{name}" for number in range(2) for name in inside}


def test_a_stack_without_cut_layers_keeps_whole_sequences() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cut = Model()
            self.whole = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(2))

        def forward(self, x_BSD: Tensor) -> Tensor:
            x_BSD = self.cut(x_BSD)
            for layer in self.whole:
                # A sum over the sequence shows whether all of it is there.
                x_BSD = layer(x_BSD) + x_BSD.sum(1, keepdim=True)
            return x_BSD

    model = model_of(Two)
    for found in compare(model, plan_of(model, PLAN), (hidden_states(),), 2, slices=True):
        assert found.worst < 1e-13


@pytest.mark.parametrize("trains", [False, True])
def test_a_gathered_input_is_kept_by_nobody_but_the_graph(trains: bool) -> None:
    """Each block has one, of the whole sequence: that of the last forward would stay beside the next one's."""
    models = [model_of(Model) for _ in range(2)]

    def body(axis: LoopbackCollectives) -> None:
        model: Any = models[axis.rank]
        cut_over(model, plan_of(model, PLAN), axis, slices=True)
        seen: list[weakref.ref[Tensor]] = []

        def look(_: nn.Module, args: tuple[Any, ...]) -> None:
            assert args[0].shape == (B, S, D)
            seen.append(weakref.ref(args[0]))

        for layer in model.layers:
            layer.mlp.gate.register_forward_pre_hook(look)
        with torch.set_grad_enabled(trains):
            y = model(hidden_states())
        if trains:
            y.sum().backward()
        del y
        gc.collect()
        assert [one() for one in seen] == [None, None]

    LoopbackWorld(2).run(body)


def test_a_module_that_fails_keeps_no_gathered_input() -> None:
    models = [model_of(Model) for _ in range(2)]

    def body(axis: LoopbackCollectives) -> None:
        model: Any = models[axis.rank]
        cut_over(model, plan_of(model, PLAN), axis, slices=True)
        seen: list[weakref.ref[Tensor]] = []

        def fail(_: nn.Module, args: tuple[Any, ...]) -> None:
            seen.append(weakref.ref(args[0]))
            raise ZeroDivisionError

        handle = model.layers[0].mlp.gate.register_forward_pre_hook(fail)
        with pytest.raises(ZeroDivisionError):
            model(hidden_states())
        handle.remove()
        gc.collect()
        assert seen[0]() is None
        model(hidden_states()).sum().backward()

    LoopbackWorld(2).run(body)


def test_a_copy_of_a_model_works_on_slices_of_its_own() -> None:
    model = model_of(Model)

    def body(axis: LoopbackCollectives) -> None:
        own = copy.deepcopy(model)
        cut_over(own, plan_of(own, PLAN), axis, slices=True)
        copied = copy.deepcopy(own)
        with torch.no_grad():
            for param in copied.parameters():
                param.mul_(2)

        def run() -> tuple[Tensor, Tensor]:
            x = hidden_states().requires_grad_()
            y: Tensor = own(x)
            (grad,) = torch.autograd.grad(y.sum(), x)
            return y, grad

        before = run()
        assert not torch.equal(copied(hidden_states()), before[0])
        assert all(map(torch.equal, run(), before)), "the copy's columns are none of its siblings"

    LoopbackWorld(2).run(body)


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("joins", [False, True])
def test_a_block_at_an_end_of_the_stack_takes_or_returns_whole_sequences(splits: bool, joins: bool) -> None:
    whole = hidden_states()

    def body(axis: LoopbackCollectives) -> None:
        own = whole.narrow(-2, axis.rank * S // 2, S // 2)
        seen: list[Tensor] = []

        def forward(x_BSD: Tensor, *, mask: Tensor) -> tuple[None, Tensor, Tensor]:
            assert mask.shape == (S,)
            seen.append(x_BSD)
            return None, x_BSD + 1, mask

        mask = torch.ones(S, dtype=torch.int64)
        output = SlicedBlock(axis, splits, joins).run(forward, (whole if splits else own,), {"mask": mask})
        assert torch.equal(seen[0], own)
        assert torch.equal(output[1], (whole if joins else own) + 1)
        assert (output[0], output[2] is mask) == (None, True)

    LoopbackWorld(2).run(body)


@pytest.mark.parametrize("form", [Form.SUMMED_OUTPUT, Form.DIVIDED_INPUT])
def test_every_module_that_cannot_work_on_slices_is_refused_by_name(form: Form) -> None:
    def body(axis: LoopbackCollectives) -> None:
        own = model_of(Model)
        with pytest.raises(ModelError) as found:
            cut_over(own, plan_of(own, {**PLAN, "norm": Style(form)}), axis, slices=True)
        for number in range(2):
            assert found.match(rf"`layers\.{number}\.norm` \(LayerNorm\) cannot work on slices of the sequence")

    LoopbackWorld(1).run(body)


def test_columns_of_the_block_itself_are_refused_for_no_module_could_gather_their_input() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.down = nn.Linear(D, INNER), nn.Linear(INNER, D)

        def forward(self, x_BSD: Tensor) -> Tensor:
            return self.down(self.gate(x_BSD))

    def body(axis: LoopbackCollectives) -> None:
        own = model_of(lambda: nn.Sequential(Bare(), Bare()))
        with pytest.raises(ModelError, match=r"`0` \(Bare\) has columns of its own, and no module around them"):
            cut_over(own, plan_of(own, {"gate": GATHERED_COLUMN, "down": ROW}), axis, slices=True)

    LoopbackWorld(1).run(body)
