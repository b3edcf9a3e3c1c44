"""What could hide a wrong plan does not: zeros, frozen weights, odd outputs, blocks that are never called or unlike."""

from __future__ import annotations

import copy
import dataclasses
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from dsrun.errors import ConfigError
from dsrun.runtime.parallel.tensor.styles import COLUMN, ROW, WHOLE, Form, ModelPlan, Style
from support.compared_blocks import (
    ATTENTION,
    RIGHT,
    Attention,
    Block,
    Layer,
    OfAllHeads,
    Stack,
    X,
    checked,
    layers_of,
    of_all_blocks,
    refusal,
)
from support.operation_names import OperationNames


def test_a_projection_that_begins_at_zero_hides_nothing() -> None:
    class Gated(Attention):
        """A gate by a weight that the plan does not name; its gradients are parts."""

        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(2)
            nn.init.zeros_(self.o.weight)
            nn.init.zeros_(self.o.bias)

        def of_heads(self, q: Tensor) -> Tensor:
            return self.norm(q)

    for _, said, _ in checked(layers_of(Gated), ATTENTION, 2, lambda model: model(X)):
        assert ["`attention.norm.weight`, `attention.norm.bias`" in text for text in said] == [True]

    class Hidden(OfAllHeads):
        def __init__(self) -> None:
            super().__init__()
            nn.init.zeros_(self.o.weight)

    assert "output differs by" in refusal(layers_of(Hidden), ATTENTION, 2, lambda model: model(X))


def test_a_bias_that_begins_at_zero_and_is_added_once_a_rank_is_seen() -> None:
    class Twice(Block):
        def __init__(self) -> None:
            super().__init__()
            nn.init.zeros_(self.down.bias)

        def forward(self, x: Tensor, *more: Any) -> Tensor:
            return x + self.down(F.gelu(self.up(x))) + self.down.bias

    model = Stack(Twice)
    styles = of_all_blocks({"up": COLUMN, "down": ROW, "norm": WHOLE})
    for _, said, _ in checked(model, styles, 2, lambda mine: mine(X)):
        assert said == []

    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
            nn.init.zeros_(self.down.bias)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.gelu(self.up(x)))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Summed()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(x)

    # Each rank adds the bias, and the module around sums what they give.
    plan = ModelPlan(
        "the test",
        of_all_blocks({"inner": Style(Form.SUMMED_OUTPUT), "inner.up": COLUMN}).modules,
        {f"blocks.{i}.inner.down.weight": ROW for i in range(2)},
    )
    assert "output differs by" in refusal(Stack(Outer), plan, 2, lambda mine: mine(X))


class ByToken(Attention):
    """What heads give is scaled by a whole Linear, whose gradient each rank has a part of, and its input's too."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(6, 1)

    def mixed(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return super().mixed(q, k, v, x) * self.score(x).unsqueeze(1)


@pytest.mark.parametrize("first", ["evaluation", "inference", "frozen"])
def test_gradients_of_hidden_states_are_compared_whatever_comes_first(first: str) -> None:
    """A model is evaluated before it trains, or what stands before its blocks is frozen."""

    class Post(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x + self.attention(x))

    def call(mine: nn.Module) -> Tensor:
        with torch.inference_mode() if first == "inference" else torch.set_grad_enabled(first == "frozen"):
            return mine(X)

    message = refusal(layers_of(ByToken, Post), ATTENTION, 2, call)
    assert "gradient of argument [0][0] differs by" in message


def test_a_forward_with_gradients_is_looked_at_after_one_without() -> None:
    """Gradients of further inputs are known there alone."""

    class Biased(Block):
        def forward(self, x: Tensor, *more: Any) -> Tensor:
            return super().forward(x) + self.down(self.up(x) * more[0])

    bias = torch.randn(1, requires_grad=True)
    traffic: list[list[int]] = []

    def call(mine: nn.Module) -> None:
        axis = mine.blocks[0].up._dsrun_tensor_cut.axis  # type: ignore[union-attr]
        counts: list[int] = []
        for grads in (False, False, True, True, False):
            with torch.set_grad_enabled(grads):
                before = axis.traffic.calls.total()
                mine(X, bias.detach() if not grads else bias)
                counts.append(axis.traffic.calls.total() - before)
        traffic.append(counts)

    message = refusal(Stack(Biased), RIGHT, 2, call)
    assert "gradient of argument [0][1] differs by" in message

    def right(mine: nn.Module) -> None:
        axis = mine.blocks[0].up._dsrun_tensor_cut.axis  # type: ignore[union-attr]
        for grads in (False, False, True, True, False):
            with torch.set_grad_enabled(grads):
                before = axis.traffic.calls.total()
                mine(X)
                traffic.append([axis.traffic.calls.total() - before])

    traffic.clear()
    checked(Stack(), RIGHT, 1, right)
    (first,), (second,), (third,), (fourth,), (fifth,) = traffic
    assert first > second
    assert third > fourth
    assert second == fifth


@dataclasses.dataclass
class Output:
    hidden: Tensor


@pytest.mark.parametrize("form", ["dataclass", "object", "dict", "state", "in place"])
def test_what_a_block_gives_is_found_in_any_form(form: str) -> None:
    class Wrapped(Layer):
        def forward(self, x: Any) -> Any:
            if form == "state":  # nothing is returned
                x["hidden"] = super().forward(x["hidden"])
                return None
            if form == "in place":
                x.add_(super().forward(x))
                return None
            y = super().forward(x)
            made = {"dataclass": Output(y), "object": types.SimpleNamespace(hidden=y), "dict": {"hidden": y}}
            return made[form]

    class Model(Stack):
        def forward(self, x: Tensor, *more: Any) -> Tensor:
            x = x * 1.0
            for block in self.blocks:
                if form == "state":
                    state = {"hidden": x}
                    block(state)
                    x = state["hidden"]
                elif form == "in place":
                    block(x)
                else:
                    y = block(x)
                    x = y["hidden"] if form == "dict" else y.hidden
            return x

    def model(kind: type[nn.Module]) -> nn.Module:
        torch.manual_seed(2)
        return Model(lambda: Wrapped(kind))  # type: ignore[arg-type]

    call: Callable[[Any], Tensor] = lambda mine: mine(X).detach()  # noqa: E731
    expected = model(Attention)
    for found, said, _ in checked(expected, ATTENTION, 2, call):
        assert said == []
        torch.testing.assert_close(found, expected(X).detach())
    assert "differs by" in refusal(model(OfAllHeads), ATTENTION, 2, call)


def test_blocks_that_are_never_called_are_compared_by_what_is_in_them() -> None:
    class Direct(Stack):
        def forward(self, x: Tensor, *more: Any) -> Tensor:
            for block in self.blocks:
                x = x + block.attention(block.norm(x))
            return x

    def model(kind: type[nn.Module]) -> nn.Module:
        torch.manual_seed(2)
        return Direct(lambda: Layer(kind))  # type: ignore[arg-type]

    expected = model(Attention)
    for found, said, mine in checked(expected, ATTENTION, 2, lambda mine: mine(X)):
        assert said == []
        torch.testing.assert_close(found, expected(X))
        assert not any(part._forward_pre_hooks for part in mine.modules()), "guards are gone"
    message = refusal(model(OfAllHeads), ATTENTION, 2, lambda mine: mine(X))
    assert "`blocks.0.attention` (OfAllHeads)" in message


def test_a_cut_layer_that_is_called_where_nothing_can_be_compared_is_refused_by_name() -> None:
    class Bare(Stack):
        def forward(self, x: Tensor, *more: Any) -> Tensor:
            for block in self.blocks:
                x = x + block.down(F.gelu(block.up(x)))
            return x

    message = refusal(Bare(), RIGHT, 2, lambda mine: mine(X))
    assert message.startswith("error: model: `blocks.0.up` (Linear) is cut (plan of the test), and is called where its")
    assert '"check": false' in message


def test_models_without_repeated_blocks_are_compared() -> None:
    class Model(nn.Module):
        def __init__(self, norm: bool) -> None:
            super().__init__()
            self.embed = nn.Linear(6, 6)
            self.mlp = nn.ModuleDict({"up": nn.Linear(6, 8), "down": nn.Linear(8, 6)})
            self.norm = norm

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            y = self.mlp["up"](x)
            return x + self.mlp["down"](F.layer_norm(y, y.shape[-1:]) if self.norm else y.sin())

    plan = ModelPlan("the test", {"mlp.up": COLUMN, "mlp.down": ROW})
    # A dict of modules is never called; so the model itself is what is compared.
    expected = Model(False)
    assert "`mlp.up`" in refusal(expected, plan, 2, lambda mine: mine(X))

    class Flat(Model):
        def __init__(self, norm: bool) -> None:
            super().__init__(norm)
            self.up, self.down = self.mlp["up"], self.mlp["down"]
            del self.mlp

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            y = self.up(x)
            return x + self.down(F.layer_norm(y, y.shape[-1:]) if self.norm else y.sin())

    plan = ModelPlan("the test", {"up": COLUMN, "down": ROW})
    for found, said, _ in checked(model := Flat(False), plan, 2, lambda mine: mine(X)):
        assert said == []
        torch.testing.assert_close(found, model(X))
    assert "ranks, the model (Flat) does something else" in refusal(Flat(True), plan, 2, lambda mine: mine(X))


def test_blocks_that_differ_by_an_attribute_are_of_two_kinds() -> None:
    model = layers_of(OfAllHeads)
    for number, block in enumerate(model.blocks):
        block.attention.of_all = number == 1  # type: ignore[union-attr]

    class Sometimes(OfAllHeads):
        of_all: bool

        def of_heads(self, q: Tensor) -> Tensor:
            return super().of_heads(q) if self.of_all else q

    for block in model.blocks:
        block.attention.__class__ = Sometimes  # type: ignore[union-attr]
    assert "`blocks.1` (Layer)" in refusal(model, ATTENTION, 2, lambda mine: mine(X))


def test_a_recomputed_part_of_a_block_is_compared() -> None:
    """`torch.utils.checkpoint` calls it again in the comparison's own backward."""

    class Part(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.utils.checkpoint.checkpoint(self.attention, self.norm(x), use_reentrant=False)

    model = layers_of(Attention, Part)
    for found, said, _ in checked(model, ATTENTION, 2, lambda mine: mine(X)):
        assert said == []
        torch.testing.assert_close(found, model(X))
    assert "differs by" in refusal(layers_of(OfAllHeads, Part), ATTENTION, 2, lambda mine: mine(X))


def test_operations_that_a_script_records_are_those_of_its_own_forward() -> None:
    """As torch's selective recomputation does, which takes the n-th of the second run for the n-th of the first."""

    def call(mine: nn.Module) -> None:
        runs: list[list[str]] = []
        for _ in range(2):
            with OperationNames() as recorded:
                mine(X)
            runs.append(recorded.names)
        assert runs[0] == runs[1]

    checked(Stack(), RIGHT, 2, call)


def test_a_refusal_of_the_cut_block_goes_through_as_it_is() -> None:
    class Strict(Block):
        def forward(self, x: Tensor, *more: Any) -> Tensor:
            inner = self.up(x)
            if inner.shape[-1] != 8:
                raise ConfigError("`something` says so", hint="this is the way out")
            return x + self.down(inner)

    def call(mine: nn.Module) -> None:
        with pytest.raises(ConfigError, match="says so"):
            mine(X)

    checked(Stack(Strict), RIGHT, 2, call)


def test_weights_of_which_noise_makes_no_numbers_are_compared_as_they_are() -> None:
    class Inverse(Block):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.eye(6) * 2)

        def forward(self, x: Tensor, *more: Any) -> Tensor:
            exact = self.table.diag().diag() == self.table
            return super().forward(x) * torch.where(exact.all(), 1.0, torch.nan)

    for _, said, _ in checked(Stack(Inverse), RIGHT, 2, lambda mine: mine(X)):
        assert said == []
    wrong = of_all_blocks({"up": COLUMN, "down": Style(Form.ROW, parts=2)})
    assert "output differs by" in refusal(Stack(Inverse), wrong, 2, lambda mine: mine(X))


def test_a_block_that_cannot_be_run_alone_is_told_and_trains() -> None:
    lock = threading.Lock()  # cannot be copied
    model = Stack()
    for found, said, _ in checked(model, RIGHT, 2, lambda mine: mine(X, lock)):
        torch.testing.assert_close(found, model(X))
        assert len(said) == 1
        assert said[0].startswith("tensor parallelism: `blocks.0` cannot be run alone (TypeError: cannot pickle")
        assert said[0].endswith("; its plan is not checked")


def test_parts_of_a_block_that_cannot_be_run_alone_are_compared_in_its_place() -> None:
    class Locked(Layer):
        def forward(self, x: Tensor, *more: Any) -> Tensor:
            return super().forward(x)

    lock = threading.Lock()

    class Twice(Locked):
        """Of two parts."""

        def __init__(self, kind: type[nn.Module] = Attention) -> None:
            super().__init__(kind)
            self.second = kind()

        def forward(self, x: Tensor, *more: Any) -> Tensor:
            return super().forward(x) + self.second(x)

    second = {f"{name.replace('attention', 'second')}": style for name, style in ATTENTION.modules.items()}
    both = ModelPlan("the test", {**ATTENTION.modules, **second})
    for _, said, _ in checked(layers_of(Attention, Twice), both, 2, lambda mine: mine(X, lock)):
        assert len(said) == 1
        assert said[0].endswith("; its parts are compared in its place")
    message = refusal(layers_of(OfAllHeads, Locked), ATTENTION, 2, lambda mine: mine(X, lock))
    assert "`blocks.0.attention` (OfAllHeads)" in message


def test_blocks_that_differ_by_a_function_or_a_number_are_of_two_kinds() -> None:
    def bad(x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:])

    class Acting(Block):
        act: Callable[[Tensor], Tensor] = F.gelu
        window = 0

        def forward(self, x: Tensor, *more: Any) -> Tensor:
            return x + self.down(bad(self.up(x)) if self.window else self.act(self.up(x)))

    by_function, by_number = Stack(Acting), Stack(Acting)
    for number, block in enumerate(by_function.blocks):
        block.act = bad if number else torch.sin  # type: ignore[assignment]
    for number, block in enumerate(by_number.blocks):
        block.act = torch.sin  # type: ignore[assignment]
        block.window = 4 * number  # type: ignore[assignment]
    for model in (by_function, by_number):
        assert "`blocks.1` (Acting)" in refusal(model, RIGHT, 2, lambda mine: mine(X))


def test_forward_hooks_of_the_script_are_told() -> None:
    model = Stack()
    seen: list[int] = []
    model.blocks[1].up.register_forward_hook(lambda module, args, output: seen.append(output.shape[-1]))  # type: ignore[union-attr]
    model.blocks[0].up.register_forward_hook(lambda module, args, output: seen.append(output.shape[-1]))  # type: ignore[union-attr]
    for _, said, _ in checked(model, RIGHT, 2, lambda mine: mine(X)):
        assert [text.startswith("tensor parallelism: forward hooks of `blocks.0.up` see this") for text in said] == [
            True
        ]
    assert seen == [4] * 4, "a comparison runs none"


def test_blocks_on_slices_of_the_sequence_are_compared_with_whole_sequences() -> None:
    """The second and third block are each of a kind of their own, and are given slices."""
    x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(7))

    class Ends(Stack):
        def __init__(self, kind: type[nn.Module]) -> None:
            super().__init__(lambda: Layer(kind))  # type: ignore[arg-type]
            self.blocks.append(Layer(kind))
            for number, block in enumerate(self.blocks):
                block.label = "abc"[number]  # type: ignore[assignment]

    torch.manual_seed(2)
    model = Ends(Attention)
    names = ("attention.q", "attention.k", "attention.v")
    plan = of_all_blocks({**dict.fromkeys(names, COLUMN), "attention.o": ROW}, numbers=(0, 1, 2))
    for found, said, _ in checked(model, plan, 2, lambda mine: mine(x), slices=True):
        assert said == []
        torch.testing.assert_close(found, model(x))
    for number in range(3):
        wrong = copy.deepcopy(model)
        wrong.blocks[number].attention.__class__ = OfAllHeads  # type: ignore[union-attr]
        message = refusal(wrong, plan, 2, lambda mine: mine(x), slices=True)
        assert f"`blocks.{number}` (Layer)" in message


def test_parts_of_a_block_on_slices_are_compared_where_it_cannot_be_run_alone() -> None:
    x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(7))
    lock = threading.Lock()

    class Locked(Layer):
        def forward(self, x: Tensor, *more: Any) -> Tensor:
            return super().forward(x)

    for found, said, _ in checked(
        model := layers_of(Attention, Locked), ATTENTION, 2, lambda m: m(x, lock), slices=True
    ):
        assert [text.endswith("; its parts are compared in its place") for text in said] == [True]
        torch.testing.assert_close(found, model(x, lock))
    message = refusal(layers_of(OfAllHeads, Locked), ATTENTION, 2, lambda mine: mine(x, lock), slices=True)
    assert "`blocks.0.attention` (OfAllHeads)" in message
