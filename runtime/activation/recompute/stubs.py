"""What autograd holds in place of the tensors that a call saved, and how a second run of the call fills it.

Knows the order of saved tensors and nothing of how a call is made; see call.[Note: recomputed calls].
"""

from __future__ import annotations

import weakref
from typing import NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from dsrun.errors import ModelError

_HINT = (
    "what a block does must not depend on anything but its inputs, weights and random numbers; leave it out by "
    "`activation_checkpointing.blocks`"
)


class Maker(Protocol):
    """Who makes saved tensors again."""

    @property
    def name(self) -> str:
        """Of the call, in messages."""
        ...

    def make_again(self) -> None:
        """Fills the stubs of this call."""
        ...


class AllThere(Exception):
    """No error: ends a run of which nothing more is wanted. An Exception, for modules call their last hooks then."""


class Stub:
    """What autograd holds in place of a saved tensor."""

    __slots__ = ("__weakref__", "call", "value")

    def __init__(self, call: Maker) -> None:
        self.call = call
        self.value: Tensor | None = None


def give(stub: Stub) -> Tensor:
    """Returns the tensor that a stub stands for, made again where it is not there.

    A function of no call: torch never lets go of a hook that has raised, and a call holds tensors.
    """
    if stub.value is None:
        stub.call.make_again()
    value, stub.value = stub.value, None  # a second backward makes it again
    if value is None:
        raise ModelError(
            f"activation checkpointing: the second run of `{stub.call.name}` did not come to a tensor that its first "
            "run saved",
            hint=_HINT,
        )
    return value


class Stubs:
    """The stubs of one call, in the order in which its first run saved. Holds none of them: the graph does.

    Args:
        name: name of the call, for error messages.
        measures: count the bytes that stubs stand for.
    """

    def __init__(self, name: str, *, measures: bool) -> None:
        self._name = name
        self._stubs: list[weakref.ref[Stub]] = []
        self._facts: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        # By weak references: the memory of a dropped tensor goes to the next one, and an address is no name.
        self._dropped: dict[StorageWeakRef, int] | None = {} if measures else None
        self._next = 0
        self._stops = False
        self._hint: str | None = None

    def drop(self, tensor: Tensor, call: Maker) -> Stub:
        """Returns what stands for a tensor that `call` saves."""
        stub = Stub(call)
        self._stubs.append(weakref.ref(stub))
        self._facts.append((tensor.shape, tensor.dtype, tensor.device))
        if self._dropped is not None and not is_parameter(tensor):
            storage = tensor.untyped_storage()
            self._dropped[StorageWeakRef(storage)] = storage.nbytes()
        return stub

    def take_dropped_bytes(self) -> int:
        """Returns the bytes that stubs stand for, each storage once, and forgets them; 0 where nobody measures."""
        total = sum((self._dropped or {}).values())
        if self._dropped is not None:
            self._dropped.clear()
        return total

    def expect(self, *, stops: bool, hint: str | None = None) -> None:
        """A second run begins.

        Args:
            stops: whether the second run ends by `AllThere` as soon as the last tensor is there.
            hint: the way out where it goes another way than the first one; None: the one for all blocks.
        """
        self._next = 0
        self._stops = stops
        self._hint = hint

    def fill(self, tensor: Tensor) -> None:
        """Takes the next tensor that the second run saves.

        Raises:
            ModelError: the first run saved another one here.
            AllThere: nothing more is wanted.
        """
        position = self._next
        self._next += 1
        if position >= len(self._stubs):
            self._went_elsewhere(f"more than {len(self._stubs)} tensors")
        facts = (tensor.shape, tensor.dtype, tensor.device)
        if facts != self._facts[position]:
            self._went_elsewhere(
                f"{_described(facts)} as tensor {position}, which was {_described(self._facts[position])}"
            )
        stub = self._stubs[position]()
        if stub is not None:
            stub.value = tensor.detach()
        if self._stops and self._next == len(self._stubs):
            raise AllThere

    def check_all_came(self) -> None:
        """The second run is over.

        Raises:
            ModelError: it saved less than the first.
        """
        if self._next < len(self._stubs):
            self._went_elsewhere(f"{self._next} tensors of {len(self._stubs)}")

    def _went_elsewhere(self, saved: str) -> NoReturn:
        raise ModelError(
            f"activation checkpointing: the second run of `{self._name}` saved {saved}: it went another way than the "
            "first one",
            hint=_HINT if self._hint is None else self._hint,
        )


def is_parameter(tensor: Tensor) -> bool:
    """Whether a saved tensor is a parameter or a view of one, which is there in any case."""
    base = tensor._base if tensor._is_view() else tensor
    return isinstance(base, nn.Parameter)


def _described(facts: tuple[torch.Size, torch.dtype, torch.device]) -> str:
    shape, dtype, device = facts
    return f"{tuple(shape)} {str(dtype).removeprefix('torch.')} on {device}"
