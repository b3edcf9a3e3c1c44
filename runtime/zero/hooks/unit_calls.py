"""Which call of which unit autograd is in: when its parameters are needed, and when its gradients are complete.

No hooks are registered here.

[Note: calls]
A *call* is one forward of a unit's module; a module may be called several times before a backward. Each call with a
graph has a backward of its own: it begins when the gradient of one of its outputs is known.

[Note: when a call's backward has ended]
Autograd runs later-made nodes first, and accumulates a gradient as soon as it is there. So when the backward of one
call begins, every node of the calls made after it has run, or never will, and there is never more than one call whose
backward is under way. No look at a call's inputs is needed: they may be leaves, shared between calls (an encoder's
output), changed in place, or hidden in objects.

A reentrant checkpoint (torch.utils.checkpoint with use_reentrant=True) runs a forward without a graph, and in the
backward a second one with a graph, whose backward ends before the outer one goes on: the rule holds there too. Such
forwards without a graph are counted, for they may come back with gradients.

[Note: one ready queue]
That order holds among nodes of one ready queue. Left to itself, autograd has one for each GPU and one for the CPU, each
with a thread of its own. Nodes on the CPU (behind a `.cpu()` in a block) would then run beside the nodes of earlier
calls, and a unit could be reduced, or its slot be given away, before its last gradient. So the engine's backward
switches autograd's threads off: one queue has the nodes of all devices, in the calling thread. A rank has one GPU, so
threads have nothing to overlap; torch means to leave them out by default (pytorch#192082). Backwards of the script's
own (torch.autograd.grad) are as the script has them.

[Note: recomputation]
A checkpoint over several units runs their forwards again while the backward of one of them is under way. That one's
parameters may be overwritten then, as they share a slot; its own forward comes last in the recomputation and brings
them back before any of its kernels reads them.

[Note: gradients of gradients]
A backward with create_graph=True (a gradient penalty) makes nodes that another backward goes through, outside of any
call: the gradients they give parameters may come at any time until the step. They also save parameters, and there is
no moment at which slots could bring these back, nor do hooks of saved tensors outlive the node in which they are set:
where parameters take turns in slots, such a backward is refused.

[Note: backwards of the script]
`loss.backward()` in the script is a micro step as `engine.backward` is one. The first hook that such a backward comes
to, at an output of the model or of a unit, asks autograd whether it will add to the `.grad` of any parameter: that
tells it from `torch.autograd.grad`, and from a backward with `inputs=`. Then the micro step *begins*, in the hook, and
ends with the backward. A backward that raises is not followed to its end; the next call of the engine or of its model
finds it ended and gives its micro step up.

Gradients that came before the first hook (of a parameter that the loss reads past the model) are strays of the micro
step, see [Note: strays] in `zero/grads/reducer.py`. Where another engine's own backward goes through the model (a GAN's
judge), its gradients here do not count; those of a script's `loss.backward()` through several engines count for each of
them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from weakref import ref

import torch
from torch import Tensor

from dsrun.errors import ModelError

from ...compat import adds_gradient, backward_number, in_backward, in_transform, out_of_transforms, when_backward_ends
from ..grads.reducer import GradReducer
from ..params.store import ParamStore
from ..units.unit import ParamUnit
from .outside import OutsideRead, aliased, followed, handed_out

#: Whether an engine's own backward runs in this thread, whichever engine's it is.
_engines_own: ContextVar[bool] = ContextVar("dsrun_engines_own_backward", default=False)


@contextmanager
def engines_own_backward() -> Generator[None]:
    """A context for an engine's own backward: what it gives the parameters of other engines does not count."""
    token = _engines_own.set(True)
    try:
        yield
    finally:
        _engines_own.reset(token)


@dataclass(frozen=True, slots=True)
class ScriptBackward:
    """What shall be called when a backward of the script's own begins and ends, see [Note: backwards of the script].

    Attributes:
        begin: callback, called in a hook before any gradient of the micro step is looked at; may raise, to refuse the
            backward.
        end: once the backward has ended well.
        abandon: later, if it raised.
    """

    begin: Callable[[], None]
    end: Callable[[], None]
    abandon: Callable[[], None]


@dataclass(slots=True, eq=False)
class UnitCalls:
    """The calls of one unit that a backward may still come to.

    Attributes:
        unit: the unit.
        live: serial numbers of calls with a graph.
        without_graph: forwards that a reentrant checkpoint may run again.
        scattered: the first backward found gradients of the unit outside of its calls' backwards.
        loose: whether gradients may come from outside of its calls' backwards, until the next step.
        reads: outside of its calls, by what lives as long as a backward may come to them; see [Note: reads outside].
        unseen: gradients of the unit that the first backward has not come to; later backwards do not look.
    """

    unit: ParamUnit
    live: set[int] = field(default_factory=set[int])
    without_graph: int = 0
    scattered: bool = False
    loose: bool = False
    reads: set[ref[OutsideRead]] = field(default_factory=set["ref[OutsideRead]"])
    unseen: int = 0

    @property
    def anywhere(self) -> bool:
        """Whether gradients may come before and after its calls' backwards."""
        return self.scattered or self.loose or bool(self.reads)

    @property
    def may_get_grads(self) -> bool:
        """False where the coming backward cannot give this unit a gradient."""
        return self.anywhere or bool(self.live) or self.without_graph > 0

    def forget_all(self) -> None:
        """No backward goes through an earlier call any more."""
        self.live.clear()
        self.without_graph = 0
        self.loose = False


@dataclass(slots=True, eq=False)  # not frozen: one is made at every call, and frozen ones take three times as long
class _Call:
    """A call with a graph; `serial` grows from call to call, `again` marks one made during a backward."""

    calls: UnitCalls
    serial: int
    again: bool


class CallTracker:
    """Follows forwards and backwards of all units, see [Note: calls].

    Args:
        store: parameter store, which is asked for parameters while a call's forward or backward runs.
        reducer: gradient reducer, which is told when a unit's gradients begin and are complete, in backwards that
            count.
        trained: function that returns the parameters that are trained.

    Attributes:
        script: callbacks for backwards that the script itself runs; None: such backwards do not count.
    """

    def __init__(
        self,
        store: ParamStore,
        reducer: GradReducer,
        *,
        trained: Callable[[], Iterable[Tensor]] = tuple,
    ) -> None:
        self._store = store
        self._reducer = reducer
        reducer.takes_strays = store.always_there
        self._clock = 0
        self._running: _Call | None = None  # its backward is under way
        self._suspended = False  # a recomputation may have overwritten its parameters
        self._ended: set[int] = set()  # serial numbers, in this backward
        self._in_backward = False
        self._retain_graph = False
        self._trained = trained
        self.script: ScriptBackward | None = None
        self._of_script = False  # the backward under way is the script's own, and counts
        self._asked: tuple[int, bool] = (-1, False)  # number of a backward that does not count; whether it adds
        self._roots: list[bool] = []  # for each forward of the root under way, whether a backward may come

    @property
    def is_active(self) -> bool:
        """Whether the model's forward runs, or a backward through it."""
        return bool(self._roots) or self._in_backward or self._running is not None

    @property
    def _evaluates(self) -> bool:
        """Whether no backward can come of the present forward; one below a reentrant checkpoint has no graph yet."""
        if torch.is_grad_enabled() or self._in_backward or self._running is not None:
            return False
        return not (self._roots and self._roots[-1])

    def enter_root(self) -> None:
        """The root's forward begins."""
        self.find_failed()
        self._roots.append(torch.is_grad_enabled())

    def leave_root(self) -> None:
        """The root's forward has ended, or failed; also called where another hook raised before it began."""
        if self._roots:
            self._roots.pop()

    def tick(self) -> int:
        """Returns a number that grows from call to call."""
        self._clock += 1
        return self._clock

    def enter_forward(self, calls: UnitCalls) -> None:
        """A unit's forward begins, maybe as a recomputation."""
        running = self._running
        if running is not None and not self._suspended and running.calls is not calls:
            self._store.release(running.calls.unit)  # see [Note: recomputation]
            self._suspended = True
        self._store.acquire(calls.unit, evaluating=self._evaluates)
        if running is not None and self._suspended and running.calls is calls:
            self._store.acquire(calls.unit)
            self._suspended = False

    def leave_forward(self, calls: UnitCalls, *, has_graph: bool) -> Callable[[object], None] | None:
        """A unit's forward has ended, or failed.

        Args:
            calls: forward calls of the unit.
            has_graph: the output has autograd nodes of its own.

        Returns:
            what shall be called when the gradient of an output is known; None where that is of no interest.
        """
        self._store.release(calls.unit)
        if self._running is not None and self._running.calls is calls:
            return None  # recomputed only for what its forward saves
        if not torch.is_grad_enabled():
            calls.without_graph += not (self._evaluates or self._in_backward)
            return None
        if not has_graph:
            return None
        call = _Call(calls, self.tick(), again=self._in_backward)
        if not call.again:
            calls.live.add(call.serial)
        return partial(self._begin, call)

    def enter_backward(self, *, retain_graph: bool) -> None:
        """A backward that counts begins."""
        self._in_backward = True
        self._retain_graph = retain_graph

    def leave_backward(self) -> None:
        """A backward, the engine's own or another, has ended."""
        self._end_running()
        self._ended.clear()
        self._in_backward = False

    def abandon_backward(self) -> None:
        """A backward that counts raised: no gradient of it is complete."""
        self._in_backward = False
        self.leave_backward()

    def find_failed(self) -> None:
        """Gives up a backward of the script's own that has raised; called where none can be under way but in another.

        See [Note: backwards of the script].
        """
        if self._of_script and not in_backward():
            self._of_script = False
            assert self.script is not None, "it has begun the micro step"
            self.script.abandon()

    def reach_root(self, grads: object) -> None:
        """The gradient of an output of the root is known."""
        if not (self._in_backward or in_transform()):
            self._counts()

    def _counts(self) -> bool:
        """Whether the backward under way counts, the script's own beginning with the first question."""
        if self._in_backward:
            return True
        number = backward_number()
        if self._asked[0] == number:
            return False
        adds = any(adds_gradient(param) for param in self._trained())
        if self.script is None or _engines_own.get() or not adds:
            self._asked = (number, adds)
            if adds:
                when_backward_ends(self._reducer.drop_strays)
            return False
        self.script.begin()
        self._of_script = True
        when_backward_ends(self._end_script)
        return True

    def _end_script(self) -> None:
        assert self.script is not None, "it has begun the micro step"
        self._of_script = False
        self.script.end()

    def check_place(self, calls: UnitCalls, name: str, grad: Tensor) -> None:
        """Called before parameter `name` gets its gradient: is this the backward of one of its unit's calls?

        Elsewhere the parameters need not be there; where they always are, only the gradients need another treatment.

        Raises:
            ModelError: the parameters are gathered for their unit's calls only.
        """
        calls.unseen = max(0, calls.unseen - 1)
        if calls.loose or calls.reads or (self._running is not None and self._running.calls is calls):
            return
        if not self._store.always_there:
            raise ModelError(
                f"model: `{name}` is used outside of the forward of `{calls.unit.name}`, where stage 3 has not "
                "gathered it",
                hint="call the module itself and not its weight, or set `zero_optimization.stage` to 2",
            )
        calls.scattered = True
        self._reducer.open(calls.unit)

    def read(self, calls: UnitCalls, position: int, *, transformed: bool = False) -> Tensor:
        """Returns what a read of a unit's parameter outside of its forward gets, see [Note: reads outside].

        Args:
            calls: forward calls of the unit.
            position: position of the parameter in `gathered_params`.
            transformed: inside a transform of torch.func, see [Note: transforms].
        """
        unit = calls.unit
        param = unit.gathered_params[position]
        is_there = self._store.is_there(unit)
        if not (self.is_active or (transformed and is_there)):
            unit.wait_update()
            return param
        if is_there and not self._store.always_there and not transformed:
            return param
        reading = OutsideRead(partial(self._store.read, unit, position), partial(self._open_loose, calls))
        if torch.is_grad_enabled():
            calls.reads.add(ref(reading, calls.reads.discard))
        made = handed_out(param, reading)
        if transformed:
            return made
        return aliased(made) if self._store.always_there else followed(made, param)

    def read_released(self, calls: UnitCalls, position: int) -> Tensor:
        """Returns the values of a parameter whose unit is not in use, with a gradient; see `zero/units/released.py`."""
        reading = OutsideRead(
            partial(self._store.read, calls.unit, position, evaluating=not self.is_active),
            partial(self._open_loose, calls),
        )
        calls.reads.add(ref(reading, calls.reads.discard))
        return handed_out(calls.unit.gathered_params[position], reading)

    def _open_loose(self, calls: UnitCalls) -> None:
        if self._counts():
            self._reducer.open(calls.unit)

    def _begin(self, call: _Call, grads: object) -> None:
        """The gradient of an output of `call` is known."""
        if in_transform():  # a backward of several gradients at once (`is_grads_batched`)
            with out_of_transforms():
                self._begin(call, None)
            return
        if call is self._running or call.serial in self._ended:
            return
        if not self._counts() and torch.is_grad_enabled():
            self._follow_graph_of_grads(call.calls)
        self._end_running()
        self._store.acquire(call.calls.unit)
        self._running = call
        if self._in_backward:
            self._reducer.open(call.calls.unit)
        else:
            # torch.autograd.grad in the script, or another engine's loss: parameters are needed, gradients are not.
            if self._asked[1]:
                self._reducer.lend(call.calls.unit)
            when_backward_ends(self.leave_backward)

    def _end_running(self) -> None:
        """See [Note: when a call's backward has ended]."""
        call, self._running = self._running, None
        if call is None:
            return
        calls = call.calls
        self._ended.add(call.serial)
        if not self._suspended:
            self._store.release(calls.unit)
        self._suspended = False
        if not self._in_backward:
            if self._asked[1]:
                calls.unit.drop_grads()
            return
        if call.again:
            calls.without_graph = max(0, calls.without_graph - 1)
        elif not self._retain_graph:
            calls.live.discard(call.serial)
        earlier = bool(calls.live) and min(calls.live) < call.serial
        if not (earlier or calls.without_graph or calls.anywhere or calls.unseen):
            self._reducer.complete(calls.unit)

    def _follow_graph_of_grads(self, calls: UnitCalls) -> None:
        """See [Note: gradients of gradients].

        Raises:
            ModelError: parameters take turns in slots.
        """
        calls.loose = True
        if not self._store.always_there:
            raise ModelError(
                f"model: a backward with create_graph=True goes through `{calls.unit.name}`; gradients of gradients "
                "need parameters for longer than stage 3 holds them",
                hint="set `zero_optimization.stage` to 2",
            )
