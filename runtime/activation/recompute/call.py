"""Calls whose saved tensors are dropped in forward and made again in backward.

Decides nothing: which calls these are stands in `activation/choose/policy.py`, how they are kept in `options.py`, where
their inputs live meanwhile in `activation/keep/keeper.py`.

[Note: recomputed calls]
While a call runs, autograd gets a `Stub` for every tensor that an operation saves, and the tensor itself goes. What is
kept of the call is what it takes to run it again: its inputs, the state of random generators, and the autocast that
was on. When backward asks for the first stub, the call runs again; the n-th tensor that is saved then is the one that
the n-th stub stands for. The graph of that second run is thrown away: its values are wanted, not its nodes. The run
stops as soon as the last wanted tensor is there, so the last matrix product of a block is not made twice. What ranks
have summed in the first run is kept too, so the second one enters no collective of that kind.

[Note: chains]
Calls of one segment form a chain. An input that is an output of an earlier call of the chain, unchanged, is not kept,
but comes out of that call when it runs again. Anything else is kept: whatever a script does between two blocks, the
numbers are the same, and only the memory differs. A chain runs again *at once* (every call fills its stubs: one more
forward, and all calls of the segment are live), or *in two passes* (first without a graph, for the inputs, then each
call when its backward comes: two more forwards of all but the last, and one call is live).

A chain holds what came before, and never what comes after: graph nodes hold stubs, these their call, and a call the one
before it. Nothing else does, so all goes with the graph, without the garbage collector.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from dsrun.errors import ModelError

from ...kept_results import KeptResults, keeping
from ...second_runs import SecondRun, running_again
from ..keep.keeper import AsItIs, Ticket
from ..keep.nested import tensors_in, with_leaves, with_tensors
from .options import CallOptions
from .stubs import AllThere, Stub, Stubs, give
from .surroundings import Surroundings

_present: ContextVar[RecomputedCall | None] = ContextVar("dsrun_recomputed_call", default=None)


def present_call() -> RecomputedCall | None:
    """Returns the recomputed call that runs, for the first time or again; calls in it are recomputed with it."""
    return _present.get()


@contextmanager
def running(call: RecomputedCall) -> Generator[None]:
    """Inside, `call` is the present one."""
    token = _present.set(call)
    try:
        with keeping(call.results), nullcontext() if call.has_ended else running_again(call.second_run):
            yield
    finally:
        _present.reset(token)


@dataclass(frozen=True, slots=True)
class _FromCall:
    """An input that an earlier call of the chain gives."""

    call: RecomputedCall
    position: int
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class _Kept:
    ticket: Ticket
    requires_grad: bool


class Chain:
    """The calls of one segment so far, see [Note: chains].

    Args:
        at_once: all calls fill their stubs in one run.
    """

    def __init__(self, *, at_once: bool = True) -> None:
        self.at_once = at_once
        self.last: weakref.ref[RecomputedCall] | None = None
        self._outputs: list[tuple[weakref.ref[Tensor], int, weakref.ref[RecomputedCall], int]] = []

    def source_of(self, tensor: Tensor) -> tuple[RecomputedCall, int] | None:
        """Returns the call, and the position in its output, that gave this very tensor as it is now."""
        for there, version, by, position in self._outputs:
            if there() is tensor and tensor._version == version:
                call = by()
                return None if call is None else (call, position)
        return None

    def add(self, call: RecomputedCall, output: Any) -> None:
        """Notes what `call` has given."""
        self._outputs += [
            (weakref.ref(tensor), tensor._version, weakref.ref(call), position)
            for position, tensor in enumerate(tensors_in(output))
        ]
        self.last = weakref.ref(call)


class RecomputedCall:
    """One call, see [Note: recomputed calls].

    Attributes:
        listens: whether tensors that a second run saves now stand for those of the first run; a module's hooks switch
            it on and off.
        arguments: arguments of the second run in progress; None for none.
        second_run: count of the further runs that the call will have.
        stubs: stubs of the tensors that the call saved.
        results: results of other ranks' that the first run has kept.

    Args:
        name: name of the call in messages and tables.
        run: function that makes the call, the first time and again.
        args: positional arguments.
        kwargs: keyword arguments.
        options: options for keeping the call's inputs and running it again.
        chain: the segment it is in; None for a segment of its own.
    """

    def __init__(
        self,
        name: str,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        options: CallOptions,
        chain: Chain | None = None,
    ) -> None:
        self.name = name
        self.run = run
        self._options = options
        self._at_once = chain is None or chain.at_once
        self.before = None if chain is None or chain.last is None else chain.last()
        self.second_run = SecondRun(cut=1, keeps_products=options.contexts is not None)
        if self.before is not None:
            # Another call follows it, see [Note: chains]: it runs to its end, and in two passes once more on its own.
            self.before.second_run.whole, self.before.second_run.cut = 1, 0 if self._at_once else 1
        self._inputs: list[_Kept | _FromCall] = []
        self.kept_bytes = 0
        self.results = KeptResults(beside_products=options.contexts is not None)
        given = list(tensors_in((args, kwargs)))
        self._waits_for = _accelerators_of(given) if options.synchronize or options.observer is not None else None
        self._then = Surroundings(given, options.tracker, preserve_rng=options.preserve_rng)
        self._arguments: Any = with_tensors((args, kwargs), lambda tensor: self._keep(tensor, chain))
        self._contexts = [] if options.contexts is None else list(options.contexts())
        self._chain = chain
        self.stubs = Stubs(name, measures=options.observer is not None)
        self._ended = False
        self._filled = False
        self.listens = False
        self.arguments: tuple[Any, Any] | None = None
        self._started_s = 0.0

    # The first run ----------------------------------------------------------------------------------------------------

    def surroundings(self) -> AbstractContextManager[Any]:
        """Returns what the present run is made in, apart from hooks; to be entered close to the forward."""
        return self._contexts.pop(0) if self._contexts and torch.is_grad_enabled() else nullcontext()

    @property
    def has_ended(self) -> bool:
        """Whether the first run is over."""
        return self._ended

    def begin(self) -> saved_tensors_hooks:
        """Returns the hooks under which the first run is made."""
        self._wait()
        self._started_s = time.perf_counter()
        return saved_tensors_hooks(self._drop, give)

    def end(self, output: Any) -> None:
        """The first run has ended with this output."""
        self._ended = True
        self.kept_bytes += self.results.nbytes
        self._then.settle()
        if self._waits_for is not None:
            self._waits_for |= _accelerators_of(tensors_in(output))
        if self._chain is not None:
            self._chain.add(self, output)
            self._chain = None
        observer = self._options.observer
        if observer is not None:
            self._wait()
            observer.ran(
                self.name,
                seconds=time.perf_counter() - self._started_s,
                kept_bytes=self.kept_bytes,
                dropped_bytes=self.stubs.take_dropped_bytes(),
            )
        elif self._options.synchronize:
            self._wait()

    def _keep(self, tensor: Tensor, chain: Chain | None) -> _Place:
        source = None if chain is None else chain.source_of(tensor)
        if source is not None:
            self._inputs.append(_FromCall(*source, tensor.requires_grad))
        elif isinstance(tensor, nn.Parameter) or not tensor.requires_grad:
            self._inputs.append(_Kept(AsItIs().put(tensor), tensor.requires_grad))
        else:
            self._inputs.append(_Kept(self._options.keeper.put(tensor, label=self.name), tensor.requires_grad))
            self.kept_bytes += tensor.nbytes
        return _Place(len(self._inputs) - 1)

    def _drop(self, tensor: Tensor) -> Stub:
        self.second_run.saved += 1
        return self.stubs.drop(tensor, self)

    # The second run ---------------------------------------------------------------------------------------------------

    def make_again(self) -> None:
        """Runs what it takes to fill this call's stubs.

        Raises:
            ModelError: the call is still running, or goes another way than the first time.
        """
        if not self._ended:
            raise ModelError(
                f"activation checkpointing: a backward runs inside the forward of `{self.name}`, which is to be run "
                "again in backward",
                hint="leave it out by `activation_checkpointing.blocks`",
            )
        found: dict[RecomputedCall, list[Tensor]] = {}
        for call in self._whole_chain():
            fills = call is self or (self._at_once and not call._filled)
            if not self._at_once:
                call._hold_inputs(found)
            found[call] = call._run_again(found, fills=fills, stops=call is self)

    def _whole_chain(self) -> list[RecomputedCall]:
        """This call and those before it that it takes, in order."""
        chain: list[RecomputedCall] = [self]
        wanted = {source.call for source in self._inputs if isinstance(source, _FromCall)}
        call = self.before
        while call is not None:
            if call in wanted or self._at_once:
                chain.append(call)
                wanted |= {source.call for source in call._inputs if isinstance(source, _FromCall)}
            call = call.before
        return chain[::-1]

    def _hold_inputs(self, found: dict[RecomputedCall, list[Tensor]]) -> None:
        """Keeps the inputs that a first pass has made, so that this call's own second run needs no other call."""
        for position, source in enumerate(self._inputs):
            if isinstance(source, _FromCall):
                self._inputs[position] = _Kept(AsItIs().put(found[source.call][source.position]), source.requires_grad)

    def _run_again(self, found: dict[RecomputedCall, list[Tensor]], *, fills: bool, stops: bool) -> list[Tensor]:
        self._wait()
        started_s = time.perf_counter()
        inputs = [self._input(source, found) for source in self._inputs]
        args, kwargs = with_leaves(self._arguments, _Place, lambda place: inputs[place.position])
        self.stubs.expect(stops=stops, hint=_cache_hint(args, kwargs))
        self.results.run_again()
        self.arguments = (args, kwargs)
        self.listens = not isinstance(self.run, nn.Module)
        output: Any = None
        try:
            with running(self), self._then.again(), _saving(fills=fills):
                output = self.run(*args, **kwargs)
        except AllThere:
            pass
        finally:
            self.arguments = None
        if fills:
            self.stubs.check_all_came()
            self.results.clear()
            self._filled = True
        if self._options.observer is not None:
            self._wait()
            self._options.observer.ran_again(self.name, seconds=time.perf_counter() - started_s)
        elif self._options.synchronize:
            self._wait()
        return list(tensors_in(output))

    def _input(self, source: _Kept | _FromCall, found: dict[RecomputedCall, list[Tensor]]) -> Tensor:
        if isinstance(source, _Kept):
            tensor = source.ticket.take()
        else:
            outputs = found[source.call]
            assert source.position < len(outputs), "a call before the last one runs to its end"
            tensor = outputs[source.position]
        return tensor.detach().requires_grad_(source.requires_grad)

    def _wait(self) -> None:
        for device in self._waits_for or ():
            torch.accelerator.synchronize(device)


def _cache_hint(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Returns the way out for a call that is given a cache of keys and values, to which each run adds; None without.

    Models of transformers make one in training too, and take it away from blocks where recomputation is their own.
    """
    caches = [value for value in args if type(value).__name__.endswith("Cache")]
    caches += [value for name, value in kwargs.items() if _is_cache(name, value)]
    if not caches:
        return None
    kind = "use_cache=True" if caches[0] is True else type(caches[0]).__name__
    return (
        f"the block is given a cache ({kind}), to which its second run adds once more: train without it, by "
        "use_cache=False in the model's call or model.config.use_cache = False"
    )


def _is_cache(name: str, value: object) -> bool:
    is_named = "past" in name or "cache" in name
    return type(value).__name__.endswith("Cache") or (is_named and (value is True or isinstance(value, list | tuple)))


def _accelerators_of(tensors: Iterable[Tensor]) -> set[torch.device]:
    return {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}


@dataclass(frozen=True, slots=True)
class _Place:
    """Stands for an input in kept arguments."""

    position: int


@contextmanager
def _saving(*, fills: bool) -> Generator[None]:
    """Inside, a second run saves for the present call's stubs, or makes no graph."""
    with torch.set_grad_enabled(fills), saved_tensors_hooks(_fill_present, _returned) if fills else nullcontext():
        yield


def _fill_present(tensor: Tensor) -> Tensor:
    """Gives a saved tensor to the call that runs again; the node keeps its values, for it will not be used.

    A function of no call: torch never lets go of a hook that has raised, and a call holds tensors. Without its graph: a
    node that holds its own output with it is never freed.
    """
    call = present_call()
    assert call is not None, "the hooks of a second run"
    if call.listens:
        call.stubs.fill(tensor)
    return tensor.detach()


def _returned(tensor: Tensor) -> Tensor:
    return tensor
