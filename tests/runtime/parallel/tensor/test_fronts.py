"""A class with a front looks like the class behind it, and does both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dsrun.runtime.parallel.tensor.fronts import own_class, with_front


class Doubled:
    """Doubles what the own forward returns."""

    def forward(self, *args: Any) -> Any:
        return 2 * super().forward(*args)  # type: ignore[misc] # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]


class Raised:
    """Adds one to what the own forward returns."""

    def forward(self, *args: Any) -> Any:
        return 1 + super().forward(*args)  # type: ignore[misc] # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]


class Negated(nn.Identity):
    """A forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return -input


def test_a_module_stays_what_it_is_and_its_own_forward_runs() -> None:
    module = Negated()

    def tenfold(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return output * 10

    module.register_forward_hook(tenfold)
    module.__class__ = with_front(Doubled, Negated)
    assert isinstance(module, Negated)
    names = (type(module).__name__, type(module).__qualname__, type(module).__module__)
    assert names == ("Negated", "Negated", __name__)
    assert module(torch.ones(())).item() == -20, "hooks stay"


def test_the_last_front_stands_before_those_that_came_before_it() -> None:
    module = Negated()
    module.__class__ = doubled = with_front(Doubled, Negated)
    assert own_class(module) is Negated
    module.__class__ = with_front(Raised, doubled)
    assert own_class(module) is doubled
    assert module(torch.ones(())).item() == 1 + 2 * -1


def test_modules_of_one_class_get_one_class_and_others_stay() -> None:
    assert with_front(Doubled, nn.Linear) is with_front(Doubled, nn.Linear)
    assert with_front(Doubled, nn.Linear) is not with_front(Raised, nn.Linear)
    assert nn.Linear(1, 1).forward.__func__ is nn.Linear.forward
